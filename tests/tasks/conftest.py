"""Openers of sandboxes for the grading tests."""

from __future__ import annotations

import pytest

from environments import open_sandbox
from environments.base import Sandbox, SandboxSpec
from environments.bubblewrap import why_unusable
from tasks.instance import SandboxOpener


def opener(kind: str) -> SandboxOpener:
    def opened(spec: SandboxSpec) -> Sandbox:
        return open_sandbox(spec, kind)

    return opened


@pytest.fixture
def each_kind(sandbox_kind: str) -> SandboxOpener:
    """A test runs once for each kind of sandbox that this host can run."""
    return opener(sandbox_kind)


@pytest.fixture
def any_kind() -> SandboxOpener:
    """bubblewrap, which opens faster, or else what there is."""
    return opener("bubblewrap" if why_unusable() is None else "auto")


@pytest.fixture
def docker() -> SandboxOpener:
    return opener("docker")
