"""A real sandbox and a real chat for the agent's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agent.tools import Workspace
from environments import Sandbox, SandboxSpec, bubblewrap, open_sandbox


@pytest.fixture(scope="session")
def bubblewrap_works() -> None:
    """Skip where bubblewrap cannot be used; its own tests say why."""
    why = bubblewrap.why_unusable()
    if why is not None:
        pytest.skip(why)


@pytest.fixture
def sandbox(bubblewrap_works: None) -> Iterator[Sandbox]:
    with open_sandbox(SandboxSpec(), "bubblewrap") as sandbox:
        yield sandbox


@pytest.fixture
def workspace(sandbox: Sandbox) -> Workspace:
    return Workspace(sandbox)
