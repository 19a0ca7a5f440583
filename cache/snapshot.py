"""Saving a cache to one file, and going on from it."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from cache.evicting_cache import EvictingCache
from cache.methods import parse_config
from cache.pools import AnyPool
from cache.state import CacheState

_FORMAT = 1
_KEY = "nexus-agent-cache"


class BadSnapshot(ValueError):
    """A snapshot that cannot be used; the text says why."""


def save_snapshot(cache: EvictingCache, path: str | Path, *, model_id: str = "") -> None:
    """Write the cache to `path`: one safetensors file whose header holds a small manifest.

    Atomic: `path` is the old file or the whole new one. model_id: a name for the model's weights
    (a sha256, say) that `load_snapshot` then asks for. Raises OSError when it cannot be written.
    """
    path = Path(path)
    state = cache.state()
    tensors = {name: tensor.contiguous().cpu() for name, tensor in state.tensors.items()}
    manifest = {
        "format": _FORMAT,
        "model_id": model_id,
        "model": dict(state.model),
        "config": dict(state.config),
        "seen": state.seen,
        "scaling": state.scaling,
        "policy": state.policy,
        "stats": state.stats,
        "room": state.room,
        "sha256": _digest(tensors),
    }
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        save_file(tensors, part, metadata={_KEY: json.dumps(manifest)})
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load_snapshot(
    path: str | Path, model: PreTrainedModel, *, model_id: str = "", pool: AnyPool | None = None
) -> EvictingCache:
    """A cache that goes on where the saved one was, with the same ids.

    Raises BadSnapshot for a file that is missing, torn or of another format, and for another model.
    """
    manifest, tensors = _read(Path(path))
    if manifest["model_id"] != model_id:
        raise BadSnapshot(
            f"{path} is of model {manifest['model_id']!r}, not {model_id!r}: a cache makes sense "
            "with the weights it was made with only"
        )
    try:
        cache = EvictingCache(model, parse_config(manifest["config"]), pool=pool)
    except ValueError as error:
        raise BadSnapshot(f"{path}: its config is not understood here: {error}") from error
    state = CacheState(
        model=manifest["model"],
        config=manifest["config"],
        seen=manifest["seen"],
        scaling=tuple(manifest["scaling"]),
        policy=manifest["policy"],
        stats=manifest["stats"],
        room=manifest["room"],
        tensors=tensors,
    )
    try:
        cache.restore(state)
    except ValueError as error:
        cache.close()
        raise BadSnapshot(f"{path}: {error}") from error
    return cache


def _read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(_KEY)
            # An open file has keys(), but cannot be iterated over.
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise BadSnapshot(f"there is no snapshot {path}") from error
    except (SafetensorError, OSError) as error:
        raise BadSnapshot(f"{path} is torn or not a snapshot: {error}") from error
    if text is None:
        raise BadSnapshot(f"{path} is a safetensors file, but not a snapshot of a cache")
    manifest: dict[str, Any] = json.loads(text)
    if manifest["format"] != _FORMAT:
        raise BadSnapshot(
            f"{path} has format {manifest['format']}; this version reads format {_FORMAT}"
        )
    if manifest["sha256"] != _digest(tensors):
        raise BadSnapshot(f"{path} is damaged: its content does not have the sum it was saved with")
    return manifest, tensors


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()
