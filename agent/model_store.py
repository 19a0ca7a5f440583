"""Where models lie on this disk, and which are there. Imports no torch, so that it is quick."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agent import hub
from agent.catalogue import Entry, GgufEntry
from environments.paths import cache_dir


def gguf_folder() -> Path:
    """Folder of the GGUF files fetched by name."""
    return cache_dir("models", "gguf")


def converted_folder() -> Path:
    """Folder of the safetensors forms, one folder a GGUF file."""
    return cache_dir("models", "converted")


def converted_name(gguf: Path, sha256: str) -> str:
    """Name of the folder that holds the safetensors form of a GGUF file with that sum."""
    return f"{gguf.stem}-{sha256[:12]}"


@dataclass(frozen=True, slots=True)
class Stored:
    """A catalogue model on this disk."""

    folder: Path  # the converted form, the GGUF's folder before its first load, or the hub's cache
    size: int  # bytes, all forms together
    converted: bool  # ready to be loaded in seconds


def stored(entry: Entry) -> Stored | None:
    """What of a catalogue model is on this disk; None if nothing that is whole."""
    if not isinstance(entry, GgufEntry):
        local = hub.local_snapshot(entry.repo)
        return None if local is None else Stored(local, _bytes(local), True)
    gguf = gguf_folder() / entry.file
    if not gguf.is_file() or gguf.stat().st_size != entry.size:
        return None
    folder = converted_folder() / converted_name(gguf, entry.sha256)
    if not hub.whole(folder):
        return Stored(gguf.parent, entry.size, False)
    return Stored(folder, entry.size + _bytes(folder), True)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
