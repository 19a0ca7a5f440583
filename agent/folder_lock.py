"""One process at a time for a run's folder. What a process that died held is free at once."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = ".lock"


class FolderBusy(RuntimeError):
    """Another process works in the folder."""


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold `folder` until the block is left. Raises FolderBusy."""
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FolderBusy(f"another process works in {folder}; wait for it or end it") from error
        yield
    finally:
        os.close(handle)


def is_held(folder: Path) -> bool:
    """Whether some process works in `folder` now."""
    try:
        handle = os.open(folder / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
