"""One process at a time for a run's folder. What a process that died held is free at once."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK = ".lock"
_GLANCE = 1.0  # seconds; `is_held` holds the lock for an instant


class FolderBusy(RuntimeError):
    """Another process works in the folder."""


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold `folder` until the block is left. Raises FolderBusy."""
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _take(handle, folder)
        yield
    finally:
        os.close(handle)


def _take(handle: int, folder: Path) -> None:
    end = time.monotonic() + _GLANCE
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > end:
                raise FolderBusy(
                    f"another process works in {folder}; wait for it or end it"
                ) from error
        time.sleep(0.05)


def is_held(folder: Path) -> bool | None:
    """Whether some process works in `folder` now; None where that cannot be seen."""
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY)
    except OSError:
        return None
    try:
        # Shared, so that two who look do not take each other for a run.
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(handle)
    return False
