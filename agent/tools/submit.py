"""`submit`: hand in the work."""

from __future__ import annotations

from collections.abc import Mapping

from agent.tools.base import Observation
from agent.tools.workspace import Workspace


def submit(workspace: Workspace, arguments: Mapping[str, str]) -> Observation:
    """End the run; what was changed in the tree is the answer."""
    return Observation("Submitted.", final=True)
