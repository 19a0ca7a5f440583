"""Sandboxes for the grading tests: bubblewrap everywhere, Docker where an engine answers."""

from __future__ import annotations

import pytest

from environments import open_sandbox
from environments.base import Sandbox, SandboxSpec
from tasks.instance import SandboxOpener


def opener(kind: str) -> SandboxOpener:
    def opened(spec: SandboxSpec) -> Sandbox:
        return open_sandbox(spec, kind)  # type: ignore[arg-type]

    return opened


@pytest.fixture(params=["bubblewrap", pytest.param("docker", marks=pytest.mark.docker)])
def each_kind(request: pytest.FixtureRequest) -> SandboxOpener:
    return opener(request.param)


@pytest.fixture
def bubblewrap() -> SandboxOpener:
    return opener("bubblewrap")


@pytest.fixture
def docker() -> SandboxOpener:
    return opener("docker")
