"""Where a run stands between two turns, on the disk: what a later process goes on from.

    state/turn-000012.json          the loop: token log, counters, limits used; names of the others
    state/tree-000012.zip           the sandbox's files (environments.treesave)
    state/cache-000010.safetensors  the cache, now and then; younger turns are replayed from the log
    state/base.tar, home.tar        the tree at the beginning, where nothing else can give it again,
                                    and the home that set-up made
    state/base.zip                  the same, where an image had made the tree

A state is written last and whole, after the files that it names, so that whatever ends the process
leaves the old state or the new one. The last two are kept.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.trajectory import write_atomic
from environments.treearchive import TreeArchive

STATE_FOLDER = "state"
_FORMAT = 1
_KEPT = 2
_TREE, _HOME = "base.tar", "home.tar"


class NoState(ValueError):
    """A folder from which no run can go on; the text says why."""


@dataclass(frozen=True, slots=True)
class SavedState:
    """One saved state. `loop` is what `Loop.state` gave, `tree` the archive of the sandbox's files,
    `trajectory_bytes` how long the trajectory was."""

    turn: int
    loop: Mapping[str, Any] = field(repr=False)
    tree: bytes = field(repr=False)
    trajectory_bytes: int


class StateFolder:
    """The states of one attempt."""

    def __init__(self, run: Path) -> None:
        self.folder = run / STATE_FOLDER

    def save(self, turn: int, loop: Mapping[str, Any], tree: bytes, trajectory_bytes: int) -> None:
        """Write the state after `turn`; of older ones the last stays. Raises OSError."""
        self.folder.mkdir(exist_ok=True)
        name = f"tree-{turn:06}.zip"
        write_atomic(self.folder / name, tree)
        data = {
            "format": _FORMAT,
            "turn": turn,
            "trajectory_bytes": trajectory_bytes,
            "tree": {"name": name, "sha256": hashlib.sha256(tree).hexdigest()},
            "loop": loop,
        }
        text = json.dumps(data, ensure_ascii=True)
        write_atomic(self.folder / f"turn-{turn:06}.json", text.encode())
        self._thin("turn", ".json")
        self._thin("tree", ".zip")

    def cache_path(self, turn: int) -> Path:
        """Where the cache goes that has read the log up to the reply of `turn`."""
        self.folder.mkdir(exist_ok=True)
        return self.folder / f"cache-{turn:06}.safetensors"

    def thin_caches(self) -> None:
        """Keep the last two caches."""
        self._thin("cache", ".safetensors")

    def caches(self, turn: int) -> list[tuple[int, Path]]:
        """Caches that were saved up to `turn`, the newest first."""
        found = [(at, path) for at, path in self._named("cache", ".safetensors") if at <= turn]
        return found[::-1]

    def newest(self) -> SavedState:
        """The newest state that is whole. Raises NoState where there is none."""
        faults = []
        for _, path in reversed(list(self._named("turn", ".json"))):
            try:
                return self._read(path)
            except (OSError, ValueError, KeyError, TypeError) as error:
                faults.append(f"{path.name}: {error}")
        why = "; ".join(faults) or "it holds no saved state"
        raise NoState(f"{self.folder.parent} cannot be gone on with: {why}")

    @property
    def begun(self) -> bool:
        """Whether any state was saved."""
        return any(self._named("turn", ".json"))

    def keep_base(self, tree: bytes, task: Mapping[str, Any]) -> None:
        """Keep the tree that the run began with, and what was known of the task."""
        self.folder.mkdir(exist_ok=True)
        write_atomic(self.folder / "base.zip", tree)
        write_atomic(self.folder / "task.json", json.dumps(task).encode())

    def keep_archives(
        self, tree: TreeArchive, home: TreeArchive | None, task: Mapping[str, Any]
    ) -> None:
        """The same, of a tree that came from this machine. Raises OSError."""
        self.folder.mkdir(exist_ok=True)
        for name, archive in ((_TREE, tree), (_HOME, home)):
            if archive is not None:
                partial = self.folder / f".{name}.partial"
                partial.unlink(missing_ok=True)
                archive.save(partial)
                partial.replace(self.folder / name)
        write_atomic(self.folder / "task.json", json.dumps(task).encode())

    def archives(self) -> tuple[TreeArchive | None, TreeArchive | None]:
        """Tree and home, if they were kept; to be closed. Raises OSError, tarfile.TarError."""
        tree, home = (
            TreeArchive.opened(self.folder / name) if (self.folder / name).is_file() else None
            for name in (_TREE, _HOME)
        )
        return tree, home

    def task(self) -> dict[str, Any] | None:
        """What `keep_base` was told of the task. Raises NoState for a damaged file."""
        path = self.folder / "task.json"
        if not path.is_file():
            return None
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(found, dict):
                raise ValueError("it is no object")
        except ValueError as error:
            raise NoState(
                f"{path} is damaged ({error}): the run cannot go on; begin anew"
            ) from None
        return found

    def base(self) -> bytes | None:
        """The tree that the run began with, if it was kept."""
        path = self.folder / "base.zip"
        return path.read_bytes() if path.is_file() else None

    def remove(self) -> None:
        """Take everything away: the run is over."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self, path: Path) -> SavedState:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != _FORMAT:
            raise ValueError(f"format {data['format']}; this version reads format {_FORMAT}")
        tree = (self.folder / data["tree"]["name"]).read_bytes()
        if hashlib.sha256(tree).hexdigest() != data["tree"]["sha256"]:
            raise ValueError(f"{data['tree']['name']} is damaged")
        return SavedState(data["turn"], data["loop"], tree, data["trajectory_bytes"])

    def _named(self, kind: str, ending: str) -> Iterator[tuple[int, Path]]:
        """Numbered files of a kind, the oldest first."""
        for path in sorted(self.folder.glob(f"{kind}-*{ending}")):
            number = path.name.removeprefix(f"{kind}-").removesuffix(ending)
            if number.isdigit():
                yield int(number), path

    def _thin(self, kind: str, ending: str) -> None:
        for _, path in list(self._named(kind, ending))[:-_KEPT]:
            path.unlink(missing_ok=True)
