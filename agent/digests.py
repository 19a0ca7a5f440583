"""sha256 of model files, worked out once for each state (size and time of change) of a file."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from agent.progress import Progress, Silent
from environments.paths import cache_dir

_CHUNK = 1 << 22


def of_file(path: Path, progress: Progress | None = None) -> str:
    """sha256 of a file's bytes, as hex. A sum kept from before is used while the file's size and
    time of change are the same."""
    path = path.resolve()
    state = path.stat()
    key = [state.st_size, state.st_mtime_ns]
    note = _note(path)
    try:
        kept = json.loads(note.read_text())
        if kept["state"] == key:
            return str(kept["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no note, or one that was damaged: work it out
    digest = _read(path, state.st_size, progress or Silent())
    remember(path, digest)
    return digest


def remember(path: Path, sha256: str) -> None:
    """Keep the sum of a file that was just written and summed on the way."""
    path = path.resolve()
    state = path.stat()
    note = _note(path)
    text = json.dumps(
        {"path": str(path), "state": [state.st_size, state.st_mtime_ns], "sha256": sha256}
    )
    fresh = note.with_name(f"{note.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(note)


def of_folder(folder: Path, progress: Progress | None = None) -> str:
    """One sum for a model folder: sha256 over the lines "<sha256>  <name>" of its safetensors
    files and config.json, sorted by name (what `sha256sum` prints for them, summed)."""
    files = sorted([*folder.glob("*.safetensors"), folder / "config.json"], key=lambda p: p.name)
    lines = "".join(f"{of_file(file, progress)}  {file.name}\n" for file in files)
    return hashlib.sha256(lines.encode()).hexdigest()


def _note(path: Path) -> Path:
    return cache_dir("digests") / (hashlib.sha256(os.fsencode(path)).hexdigest()[:32] + ".json")


def _read(path: Path, size: int, progress: Progress) -> str:
    digest = hashlib.sha256()
    progress.begin(f"checking {path.name}", size)
    done = 0
    with path.open("rb") as handle:
        while chunk := handle.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress.at(done)
    return digest.hexdigest()
