"""A run's folder: what happened, the patch, the report. Nothing written is lost by `kill -9`.

`trajectory.jsonl` grows by one line a step, each flushed to the disk before the next step begins;
`patch.diff` and `report.json` are replaced whole.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

TRAJECTORY, PATCH, REPORT = "trajectory.jsonl", "patch.diff", "report.json"


def new_run_folder(parent: Path, label: str) -> Path:
    """Make a new folder for a run, named by time, label and a random part."""
    safe = "".join(char if char.isalnum() or char in "._-" else "-" for char in label)[:60]
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = parent / f"{stamp}-{safe}-{secrets.token_hex(2)}"
    folder.mkdir(parents=True)
    return folder


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, and a crash loses neither."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with scratch.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)
    _sync_folder(path.parent)


class Trajectory:
    """The writer of one run's folder. Use as a context manager, or close it."""

    def __init__(self, folder: Path) -> None:
        """Open `folder` (made if missing). Raises FileExistsError if a run was written there."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._file = (folder / TRAJECTORY).open("x", encoding="utf-8", newline="\n")
        _sync_folder(folder)

    @classmethod
    def reopen(cls, folder: Path, size: int) -> Trajectory:
        """Go on with a run whose trajectory was `size` bytes long at the state it goes on from.

        Lines after it are of turns that are made again; they go to a file of their own. Raises
        ValueError if the trajectory is shorter.
        """
        path = folder / TRAJECTORY
        data = path.read_bytes()
        if len(data) < size:
            raise ValueError(
                f"{path} has {len(data)} bytes, fewer than the saved state says: {size}"
            )
        if data[size:]:
            number = 1 + len(list(folder.glob("trajectory.cut-*.jsonl")))
            write_atomic(folder / f"trajectory.cut-{number}.jsonl", data[size:])
            write_atomic(path, data[:size])
        trajectory = cls.__new__(cls)
        trajectory.folder = folder
        trajectory._file = path.open("a", encoding="utf-8", newline="\n")
        return trajectory

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        return os.fstat(self._file.fileno()).st_size

    def append(self, kind: str, entry: Mapping[str, Any]) -> None:
        """Add a line, on the disk when this returns."""
        line = {"kind": kind, "time": round(time.time(), 3), **entry}
        # Surrogates (bytes that were no UTF-8) are escaped, so that every line can be encoded.
        self._file.write(json.dumps(line, ensure_ascii=True) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def patch(self, data: bytes) -> None:
        """Replace the patch, byte for byte."""
        write_atomic(self.folder / PATCH, data)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def write_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Replace the report of a folder."""
    text = json.dumps(report, indent=2, ensure_ascii=True) + "\n"
    write_atomic(folder / REPORT, text.encode())


def read_trajectory(folder: Path) -> Iterator[dict[str, Any]]:
    """The lines of a run, oldest first. A last line that was torn by a crash is left out.

    Raises ValueError for a damaged line before the last, FileNotFoundError where no run is.
    """
    with (folder / TRAJECTORY).open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{folder / TRAJECTORY}: line {number}: {error}") from error
            yield entry


def _sync_folder(folder: Path) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return  # not every system opens folders; the file itself is on the disk
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
