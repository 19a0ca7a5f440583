"""Where the project keeps what it fetched or built: one user cache folder, shared by all rooms."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_dir(*parts: str) -> Path:
    """The cache folder, or a folder below it; created when missing.

    `NEXUS_CACHE` names it; else it is `nexus-agent` in `XDG_CACHE_HOME` (default `~/.cache`).
    Everything below it can be deleted and comes back when needed.
    """
    named = os.environ.get("NEXUS_CACHE")
    if named:
        root = Path(named).expanduser()
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nexus-agent"
    folder = root.absolute().joinpath(*parts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def locked(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold an exclusive lock on `path` (a file made for it) across processes.

    The kernel releases it when the process ends in whatever way, so a killed holder blocks nobody.
    `on_wait` is called once if another process holds it. The file stays: removing it would let
    two processes lock two different files of one name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait is not None:
                on_wait()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
