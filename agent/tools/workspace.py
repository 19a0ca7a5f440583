"""The tools' view of a sandbox: text files by path, commands, and how much may be shown."""

from __future__ import annotations

import posixpath
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agent.tools.text import SourceText
from environments.base import ExecResult, Sandbox

# Folders of what others wrote, and of what tools made, that a search of the tree leaves out.
NOT_OWN = (".git", ".venv", "venv", ".tox", "node_modules", "site-packages")
EXCLUDED = tuple(f"--exclude-dir={folder}" for folder in NOT_OWN)  # for grep
_READ_LIMIT = 4_000_000  # bytes; a larger file is no source text


@dataclass(slots=True)
class Workspace:
    """A sandbox with one run's limits. All file access of the tools passes through here.

    `undo` and `shown` are all the state it has: they are plain JSON (lone surrogates included).
    """

    sandbox: Sandbox
    test_command: str | None = None
    test_paths: tuple[str, ...] = ()
    command_timeout: float = 60.0  # seconds
    observation_chars: int = 3_000
    view_lines: int = 80
    shown: tuple[tuple[str, str], ...] = ()  # path and name of the functions shown with the issue
    # What edits of `file_editor` replaced, by path, the newest last; None: there was no file.
    undo: dict[str, list[str | None]] = field(default_factory=dict)
    deadline: float | None = None  # on `clock`; no command runs beyond it
    clock: Callable[[], float] = field(default=time.monotonic)

    def path(self, text: str) -> str:
        """A path as the model wrote it, relative to the workspace where it lies inside it."""
        path = text.strip().strip("`'\"").strip()
        path = posixpath.normpath(path) if path else "."
        root = self.sandbox.workdir.rstrip("/")
        if path == root:
            return "."
        return path.removeprefix(root + "/")

    def existing(self, text: str) -> str:
        """A path as the model wrote it; where there is no such file, the only one of its name."""
        path = self.path(text)
        name = posixpath.basename(path)
        if self.run(["test", "-e", path]).exit_code == 0 or not name:
            return path
        command = ["find", ".", "-name", name, "-type", "f", "-not", "-path", "*/.*"]
        found = self.run(command).text.splitlines()
        return self.path(found[0]) if len(found) == 1 else path

    def read(self, path: str) -> SourceText:
        """A text file. Raises SandboxFileError (missing, a folder), ValueError (not a text)."""
        return SourceText.decode(self.sandbox.read_file(path, max_bytes=_READ_LIMIT))

    def write(self, path: str, source: SourceText) -> None:
        """Write a text file back, every untouched byte as it was."""
        self.sandbox.write_file(path, source.encode())

    def run(
        self,
        command: str | Sequence[str],
        *,
        output_cap: int | None = None,
        timeout: float | None = None,
    ) -> ExecResult:
        """Run a command within its time (default: `command_timeout`) and that of the run."""
        timeout = self.command_timeout if timeout is None else timeout
        if self.deadline is not None:
            timeout = max(1.0, min(timeout, self.deadline - self.clock()))
        # A character takes up to four bytes; twice that leaves room for clipping by lines.
        cap = 8 * self.observation_chars if output_cap is None else output_cap
        return self.sandbox.run(command, timeout=timeout, output_cap=cap)

    def is_test(self, path: str) -> bool:
        """Whether a path is one of the project's tests."""
        path = self.path(path)
        if any(path == test or path.startswith(test.rstrip("/") + "/") for test in self.test_paths):
            return True
        name = posixpath.basename(path)
        return name.startswith("test_") or name.endswith("_test.py") or name == "conftest.py"
