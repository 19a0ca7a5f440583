"""What a run's folder says, read without trust: lines may be torn, values of any kind.

For display only. Who needs every line to be right reads with `agent.trajectory.read_trajectory`.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.trajectory import TRAJECTORY


@dataclass(slots=True)
class Lines:
    """The lines of a trajectory, oldest first, read on from where the last `poll` ended.

    damaged: numbers of lines that say nothing. torn: a last line without its end, which is being
    written or was cut by a crash; it is read once it is whole.
    """

    folder: Path
    entries: list[dict[str, Any]] = field(default_factory=list)
    damaged: list[int] = field(default_factory=list)
    torn: bool = False
    _offset: int = 0
    _count: int = 0
    _file: int = 0

    @classmethod
    def read(cls, folder: Path) -> Lines:
        """All that is there now; nothing where there is no trajectory."""
        lines = cls(folder)
        lines.poll()
        return lines

    def poll(self) -> None:
        """Read what was added; all lines anew where the file is another one than before, as it is
        when a run goes on from an earlier turn."""
        try:
            with (self.folder / TRAJECTORY).open("rb") as file:
                found = os.fstat(file.fileno())
                if self._file and (found.st_ino != self._file or found.st_size < self._offset):
                    self.entries, self.damaged = [], []
                    self._offset = self._count = 0
                self._file = found.st_ino
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return
        whole, end, rest = data.rpartition(b"\n")
        self.torn = bool(rest)
        self._offset += len(whole) + len(end)
        for line in whole.split(b"\n") if end else ():
            self._count += 1
            entry = _entry(line)
            if entry is None:
                self.damaged.append(self._count)
            else:
                self.entries.append(entry)

    @property
    def start(self) -> dict[str, Any]:
        """Turn 0; empty where it is not there."""
        return next(iter(self.of("start")), {})

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The turns."""
        return self.of("step")

    @property
    def end(self) -> dict[str, Any] | None:
        """How the run ended; None while it goes on, and for one that was killed.

        A run that was taken up again has an earlier end before it.
        """
        for entry in reversed(self.entries):
            if entry["kind"] == "end":
                return entry
            if entry["kind"] in ("step", "resume"):
                return None
        return None

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The lines of a kind."""
        return [entry for entry in self.entries if entry["kind"] == kind]


def read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object; None if there is none or it is damaged."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def section(data: Any, *path: str) -> dict[str, Any]:
    """The mapping at a path of keys; an empty one where there is none."""
    for key in path:
        data = data.get(key) if isinstance(data, dict) else None
    return data if isinstance(data, dict) else {}


def text(data: Any, key: str) -> str:
    """The text at a key; empty where there is none."""
    value = data.get(key) if isinstance(data, dict) else None
    return value if isinstance(value, str) else ""


def number(data: Any, key: str) -> float | None:
    """The finite number at a key."""
    value = data.get(key) if isinstance(data, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else None


def whole(data: Any, key: str) -> int:
    """The whole number at a key; 0 where there is none."""
    return int(number(data, key) or 0)


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
        return None
    return entry
