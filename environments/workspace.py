"""What sandboxes have in common, however their commands are run and their files are moved."""

from __future__ import annotations

import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import IO, Any, Self

from environments.base import (
    ExecResult,
    Patch,
    SandboxError,
    SandboxFileError,
    SandboxSpec,
)
from environments.gitdiff import BaseTree
from environments.history import scrub_history
from environments.treearchive import Contents, TreeArchive, everything

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
HOME = "/home/agent"
DISK_HOME = "/var/tmp/home"  # where a sandbox has it after set-up: on disk, and kept
TRANSFER_RATE = 2_000_000  # bytes per second that any transport is expected to manage

# Nothing may wait for a person, and output is read by a program.
QUIET_ENV = {
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "EDITOR": "true",
    "VISUAL": "true",
    "GIT_EDITOR": "true",
    "GIT_TERMINAL_PROMPT": "0",
    "DEBIAN_FRONTEND": "noninteractive",
    "HOME": HOME,
    # Bytecode is told from its source by size and second: two edits in one second would be one.
    "PYTHONDONTWRITEBYTECODE": "1",
}


def check_spec(spec: SandboxSpec) -> None:
    """Raises SandboxError for a mount that cannot be made."""
    for host, inside in spec.mounts.items():
        if not Path(host).is_absolute() or not Path(host).exists():
            raise SandboxError(f"cannot mount {host}: it must be an existing absolute path")
        if not inside.startswith("/") or inside == "/":
            raise SandboxError(f"cannot mount {host} at {inside!r}: not an absolute path below /")


def sandbox_env(spec: SandboxSpec, path: str = PATH) -> dict[str, str]:
    """Environment of the resident program and so of every command."""
    if spec.python_path:
        path = f"{spec.python_path}:{path}"
    return {**QUIET_ENV, "PATH": path, **spec.env}


class WorkspaceSandbox(ABC):
    """A sandbox but for `_run`, `read_file`, `write_file` and its end. For one thread at a time."""

    kind = "abstract"

    def __init__(self, spec: SandboxSpec, workdir: str) -> None:
        self.workdir = workdir
        self.spec = spec
        self._base: BaseTree | None = None
        self._held: list[Contents] = []  # what came from the host
        self._archives: list[TreeArchive] = []  # those of them to close
        self._left_out: tuple[str, ...] = ()
        self._placed: TreeArchive | None = None  # as long as nothing else wrote into the workspace

    @abstractmethod
    def _run(
        self,
        command: str | Sequence[str],
        timeout: float,
        output_cap: int,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | IO[bytes] | None = None,
        *,
        split: bool = False,
    ) -> tuple[dict[str, Any], bytes]:
        """Run a command. Returns what `result_of` takes: keys code, head, total, timed_out, oom,
        pids, seconds, and with `split` stderr (text, apart from the output)."""

    @abstractmethod
    def read_file(self, path: str, *, max_bytes: int = 10_000_000) -> bytes:
        """See `Sandbox.read_file`."""

    @abstractmethod
    def write_file(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """See `Sandbox.write_file`. An existing file keeps its mode; a full disk its content."""

    @abstractmethod
    def close(self) -> None:
        """See `Sandbox.close`."""

    # commands

    def run(
        self,
        command: str | Sequence[str],
        *,
        timeout: float = 60.0,
        output_cap: int = 100_000,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
    ) -> ExecResult:
        """See `Sandbox.run`. A command that cannot be started gives 127 (not found) or 126."""
        self._placed = None
        head, body = self._run(command, timeout, output_cap, cwd, env, stdin)
        return result_of(head, body)

    def _path(self, path: str) -> str:
        return str(PurePosixPath(self.workdir) / path)

    def put_tree(self, source: Path, dest: str | None = None) -> None:
        """See `Sandbox.put_tree`. Symbolic links are copied as links, special files left out.

        Raises SandboxFileError when the folder is missing or the copy fails.
        """
        if not source.is_dir():
            raise SandboxFileError(f"cannot copy {source}: it is not a folder")
        archive = TreeArchive.of(source, everything(source), vanishing=True)
        self._archives.append(archive)
        self.put_archive(archive, dest, named=str(source))

    def put_archive(
        self, archive: TreeArchive, dest: str | None = None, *, named: str = "the tree"
    ) -> None:
        """Like `put_tree`, from an archive, which must stay open as long as the sandbox.

        Raises SandboxFileError.
        """
        target = self._path(dest or "")
        script = 'mkdir -p -- "$1" && exec tar -xof - -C "$1"'
        argv = ["sh", "-c", script, "sh", target]
        self._placed = None
        try:
            for part in archive.parts():
                seconds = 120.0 + part.seek(0, os.SEEK_END) / TRANSFER_RATE
                head, body = self._run(argv, seconds, 8000, "/", None, part)
                if head["code"]:
                    said = result_of(head, body).text
                    raise SandboxFileError(f"cannot copy {named} to {target}: {said}")
        except OSError as error:
            raise SandboxFileError(f"cannot copy {named}: {error}") from error
        self._held.append(archive)
        if dest is None:
            self._placed = archive

    # what changed

    def mark_base(self) -> None:
        """See `Sandbox.mark_base`. The base is kept on the host, out of the sandbox's reach."""
        placed = self._placed
        if placed is None or placed.holds_git or self.spec.image is not None:
            scrub_history(self, f"/var/tmp/nexus-{secrets.token_hex(8)}")
            self._placed = placed  # that took nothing from it but `.git` folders
        base = self._commit_base()
        self._drop_base()
        self._base = base

    def leave_out(self, paths: Iterable[str]) -> None:
        """Files that the next base is to have but no patch, whatever becomes of them; nor what is
        new in folders that hold nothing else."""
        self._left_out = tuple(paths)

    def diff(self) -> Patch:
        """See `Sandbox.diff`. Raises SandboxError when no base was marked."""
        if self._base is None:
            raise SandboxError("no base to compare with: call mark_base() first")
        return self._take_diff(self._base)

    @abstractmethod
    def _commit_base(self) -> BaseTree:
        """The workspace as it is now, kept on the host."""

    @abstractmethod
    def _take_diff(self, base: BaseTree) -> Patch:
        """The patch from the base to the workspace as it is now."""

    def _drop_base(self) -> None:
        if self._base is not None:
            self._base.close()
            self._base = None

    def _drop_tree(self) -> None:
        """Free what is kept on the host."""
        self._drop_base()
        self._held.clear()
        while self._archives:
            self._archives.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def result_of(head: Mapping[str, Any], body: bytes) -> ExecResult:
    first, last = body[: head["head"]], body[head["head"] :]
    omitted = head["total"] - len(body)
    if omitted:
        first, last = _whole_characters(first, last)
        omitted = head["total"] - len(first) - len(last)
    return ExecResult(
        exit_code=head["code"],
        head=first,
        tail=last,
        omitted=omitted,
        timed_out=head["timed_out"],
        out_of_memory=head["oom"],
        pids_exhausted=head["pids"],
        duration=head["seconds"],
    )


def _whole_characters(first: bytes, last: bytes) -> tuple[bytes, bytes]:
    """Cut a UTF-8 character that the gap divides from both sides; other bytes stay."""
    for back in range(1, min(4, len(first)) + 1):
        lead = first[-back]
        if lead & 0xC0 == 0x80:
            continue
        length = 4 if lead >= 0xF0 else 3 if lead >= 0xE0 else 2 if lead >= 0xC0 else 1
        if length > back:
            first = first[:-back]
        break
    start = 0
    while start < min(3, len(last)) and last[start] & 0xC0 == 0x80:
        start += 1
    return first, last[start:]
