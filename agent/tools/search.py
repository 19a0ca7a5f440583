"""`search`: lines of the tree that contain a text."""

from __future__ import annotations

from collections.abc import Mapping

from agent.tools.base import Observation, required
from agent.tools.text import clip
from agent.tools.workspace import EXCLUDED, Workspace

_LINE = 160  # characters shown of a line that matches


def search(workspace: Workspace, arguments: Mapping[str, str]) -> Observation:
    """Lines with the text `text` (no pattern) under `path`, as `path:line:text`."""
    text = required(arguments, "text").strip("\n")
    path = workspace.path(arguments.get("path", "") or ".")
    command = ["grep", "-rnIF", *EXCLUDED, "-e", text, "--", path]
    result = workspace.run(command)
    if result.exit_code == 1:
        return Observation(f"{text!r} is nowhere in {path}.")
    if result.exit_code > 1 and not result.head:
        return Observation(f"The search failed: exit code {result.exit_code}.")
    rows = [row.removeprefix("./")[:_LINE] for row in result.text.splitlines()]
    return Observation(clip("\n".join(rows), workspace.observation_chars))
