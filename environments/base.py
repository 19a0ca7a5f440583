"""What every sandbox offers, and how it fails.

A sandbox holds one workspace (a source tree) and runs commands in it, without network unless asked,
under memory, pid and CPU limits. Whatever a model writes stays inside; files go in and out through
the sandbox only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from environments.patchfile import is_test_file, sections


class SandboxError(Exception):
    """Any failure of the sandbox itself (a command's own failure is an `ExecResult`)."""


class SandboxLost(SandboxError):
    """The sandbox died or was removed while in use; it cannot be used again."""


class EngineUnreachable(SandboxError):
    """The container engine does not answer."""


class ImageMissing(SandboxError):
    """The image is neither present nor can it be fetched or built here."""


class StartTimeout(SandboxError):
    """The sandbox did not come up in time."""


class SandboxFileError(SandboxError):
    """A path inside the sandbox cannot be read or written (missing, a folder, too large)."""


class Limits(BaseModel):
    """What a sandbox may use."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory_mb: int = Field(2048, ge=64, description="memory, swap included, in MiB")
    pids: int = Field(256, ge=16, description="processes and threads")
    cpus: float = Field(1.0, gt=0, description="CPU cores")
    network: bool = Field(False, description="whether commands reach a network")


class SandboxSpec(BaseModel):
    """How to open a sandbox."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: str | None = Field(None, description="Docker image; None takes the project's own base")
    pull: Literal["missing", "never"] = Field(
        "missing", description="whether an image that is not there may be fetched"
    )
    limits: Limits = Limits.model_validate({})
    env: dict[str, str] = Field(default_factory=dict, description="extra environment variables")
    mounts: dict[str, str] = Field(
        default_factory=dict, description="host folder -> path inside, always read-only"
    )
    python_path: str | None = Field(
        None, description="folder inside that holds the project's `python`, put first on PATH"
    )
    workdir: str = Field(
        "/workspace",
        pattern="^/.+",
        description="the workspace's path inside; unset, an image with /testbed has it there",
    )
    start_timeout: float = Field(60.0, gt=0, description="seconds")
    ttl: float = Field(6 * 3600.0, gt=0, description="seconds after which a sandbox ends by itself")


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The outcome of one command. Output is stdout and stderr in the order they were written."""

    exit_code: int
    head: bytes
    tail: bytes = b""
    omitted: int = 0  # bytes left out between head and tail
    timed_out: bool = False
    out_of_memory: bool = False
    pids_exhausted: bool = False
    duration: float = 0.0  # seconds

    @property
    def output(self) -> bytes:
        """Head and tail, with one line between them that says how much is missing."""
        if not self.omitted:
            return self.head + self.tail
        return self.head + f"\n[... {self.omitted} bytes left out ...]\n".encode() + self.tail

    @property
    def text(self) -> str:
        """The output decoded once, as UTF-8; bytes that are not become U+FFFD."""
        return self.output.decode("utf-8", errors="replace")


@dataclass(frozen=True, slots=True)
class Patch:
    """The difference between the workspace at start and now, as `git apply` takes it."""

    data: bytes
    files: tuple[str, ...] = field(default=())  # paths touched, relative to the workspace
    skipped: tuple[str, ...] = field(default=())  # files left out: unreadable or above 50 MB
    submodules: tuple[str, ...] = field(default=())  # repositories inside it with changed files
    problem: str = ""  # why `git apply` would not turn the base into the workspace by it

    def __bool__(self) -> bool:
        return bool(self.data)

    def tests(self, test_paths: Sequence[str] = ()) -> tuple[str, ...]:
        """Those of the files that are tests: see `environments.patchfile.is_test_file`."""
        return tuple(path for path in self.files if is_test_file(path, test_paths))

    def without(self, paths: Iterable[str]) -> Patch:
        """The patch without its changes to these files; the rest is kept byte for byte."""
        left_out = set(paths)
        kept = [text for path, text in sections(self.data) if path not in left_out]
        files = tuple(path for path in self.files if path not in left_out)
        return replace(self, data=b"".join(kept), files=files)


@runtime_checkable
class Sandbox(Protocol):
    """One open sandbox. A context manager: leaving it closes it; closing twice is harmless."""

    kind: str  # "docker", "bubblewrap"
    workdir: str  # absolute path of the workspace inside

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
        """Run a shell line (str, by bash) or an argv; wait for it at most `timeout` seconds.

        At most `output_cap` bytes are kept, half from each end. After the time limit every process
        of the command is killed. Raises SandboxLost when the sandbox is gone.
        """
        ...

    def read_file(self, path: str, *, max_bytes: int = 10_000_000) -> bytes:
        """Bytes of a regular file; relative paths start at `workdir`. Raises SandboxFileError."""
        ...

    def write_file(self, path: str, data: bytes, *, executable: bool = False) -> None:
        """Write a file whole, parents included. Raises SandboxFileError."""
        ...

    def put_tree(self, source: Path, dest: str | None = None) -> None:
        """Copy a host folder's content into the sandbox (`dest` defaults to `workdir`)."""
        ...

    def mark_base(self) -> None:
        """Take the workspace as it is now as the state that `diff` compares with.

        Where the workspace is a repository, what lies after its HEAD (tags, remotes, other
        branches, reflog, unreachable objects) is removed first: see `environments.history`.
        """
        ...

    def diff(self) -> Patch:
        """What changed since `mark_base`: byte-exact, new files included, made inside the sandbox
        with a git folder and index of its own that are not the workspace's."""
        ...

    def close(self) -> None:
        """End every process and remove all traces. Never raises because it was gone already."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
