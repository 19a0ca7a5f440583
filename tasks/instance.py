"""A task: a source tree with a problem, and (for graded tasks) the tests that decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from environments.base import Sandbox, SandboxSpec


class TaskError(Exception):
    """What a user asked of a task cannot be done; the text says why and what to do. The base of
    FetchError (sources), RepoError (own repositories) and PatchRefused (applying a patch)."""


@dataclass(frozen=True, slots=True)
class Instance:
    """What the agent may know of a task. Hidden tests and reference patches are never here."""

    instance_id: str
    problem: str  # title and text of the issue
    package: str | None = None  # name of the project, for display
    test_command: str | None = None  # how the project's present tests are run, from the workspace
    test_paths: tuple[str, ...] = ()  # files and folders that hold tests
    env: Mapping[str, str] = field(default_factory=dict)  # e.g. PYTHONPATH
    python: bool = True  # whether the project is one of Python's


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a patch was graded."""

    resolved: bool
    status: str  # resolved | unresolved | empty_patch | patch_failed | error
    fail_to_pass: Mapping[str, str] = field(default_factory=dict)  # test id -> outcome
    pass_to_pass: Mapping[str, str] = field(default_factory=dict)
    detail: str = ""
    seconds: float = 0.0


@runtime_checkable
class Task(Protocol):
    """One task, ready to be worked on. Sources are fetched when first needed and cached."""

    @property
    def instance(self) -> Instance:
        """What the agent may know."""
        ...

    def tree(self) -> Path | None:
        """Host folder with the original source tree (read-only for everybody). None: the spec's
        image has it."""
        ...

    def spec(self) -> SandboxSpec:
        """The sandbox the task needs (mounts, environment); the caller may replace limits."""
        ...

    def grade(self, patch: bytes) -> Verdict | None:
        """Grade in a fresh sandbox: original tree, patch, hidden tests. None if it has no tests."""
        ...


@runtime_checkable
class SandboxOpener(Protocol):
    """Opens a sandbox by spec; `environments.open_sandbox` is one."""

    def __call__(self, spec: SandboxSpec) -> Sandbox: ...
