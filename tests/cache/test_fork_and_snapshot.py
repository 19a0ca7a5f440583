"""Copies of a cache go on as it would have, share nothing with it, and are refused elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_harness import PRESETS, logits_of, random_ids, tiny
from safetensors import safe_open
from safetensors.torch import save_file

from cache import (
    EvictingCache,
    PoolFull,
    generate,
    load_snapshot,
    make_pool,
    preset,
    save_snapshot,
)
from cache.snapshot import BadSnapshot

MODEL = "qwen2-g4-kv2"


def config(name: str, **changes: Any) -> Any:
    if name == "dense":
        return preset(name)
    small = {"block_size": 4, "recent": 8, "budget": {"kind": "tokens", "tokens": 32}}
    window = {} if name in ("h2o", "random", "streaming_llm") else {"window": 6}
    return preset(name, **{**small, **window, "scope": "prefill+decode", **changes})


def started(name: str, model: Any, **changes: Any) -> EvictingCache:
    cache = EvictingCache(model, config(name, **changes))
    cache.pin(8, 12)
    generate(model, random_ids(50, 1), cache, max_new_tokens=9, chunk=16)
    return cache


def go_on(cache: EvictingCache, model: Any) -> tuple[list[int], torch.Tensor, Any]:
    ids = generate(model, random_ids(21, 2), cache, max_new_tokens=14, chunk=16)
    with torch.no_grad():
        logits = logits_of(model, cache, random_ids(3, 3))
    return ids, logits, cache.kept_blocks()


def assert_same(one: Any, two: Any) -> None:
    assert one[0] == two[0]
    assert torch.equal(one[1], two[1])
    assert torch.equal(one[2], two[2])


@pytest.mark.parametrize("name", PRESETS)
def test_a_fork_goes_on_as_the_original_and_leaves_it_alone(name: str) -> None:
    model = tiny(MODEL)
    undisturbed = go_on(started(name, model), model)
    cache = started(name, model)
    twin = cache.fork()
    generate(model, random_ids(40, 9), twin, max_new_tokens=5, chunk=8)  # elsewhere
    other = cache.fork()
    assert_same(go_on(cache, model), undisturbed)
    assert_same(go_on(other, model), undisturbed)
    assert (other.stats.evictions, other.seen) == (cache.stats.evictions, cache.seen)


def test_a_fork_shares_no_memory() -> None:
    cache = started("h2o", tiny(MODEL))
    twin = cache.fork()
    for name, tensor in cache.state().tensors.items():
        other = twin.state().tensors[name]
        assert torch.equal(tensor, other)
        assert tensor.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


def test_a_fork_can_live_in_another_row_of_the_pool() -> None:
    model = tiny(MODEL)
    pool = make_pool(model, config("nexus"), rows=2)
    cache = EvictingCache(model, config("nexus"), pool=pool)
    generate(model, random_ids(50, 1), cache, max_new_tokens=9, chunk=16)
    twin = cache.fork(pool=pool)
    assert (twin.pool, twin.row) != (pool, cache.row)
    assert_same(go_on(cache, model), go_on(twin, model))
    with pytest.raises(PoolFull):
        cache.fork(pool=pool)


@pytest.mark.parametrize("name", PRESETS)
def test_a_snapshot_goes_on_as_the_original(name: str, tmp_path: Path) -> None:
    model = tiny(MODEL)
    cache = started(name, model)
    save_snapshot(cache, tmp_path / "cache.st", model_id="abc")
    restored = load_snapshot(tmp_path / "cache.st", tiny(MODEL), model_id="abc")
    assert list(tmp_path.iterdir()) == [tmp_path / "cache.st"]
    assert_same(go_on(restored, restored._model), go_on(cache, model))


def test_a_snapshot_of_another_model_or_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cache.st"
    save_snapshot(started("nexus", tiny(MODEL)), path, model_id="abc")
    with pytest.raises(BadSnapshot, match="'abc', not 'def'"):
        load_snapshot(path, tiny(MODEL), model_id="def")
    with pytest.raises(BadSnapshot, match="another model: model_type was 'qwen2'"):
        load_snapshot(path, tiny("llama-g1-kv2"), model_id="abc")
    with safe_open(path, framework="pt") as file:
        metadata, keys = file.metadata(), list(file.keys())
        tensors = {key: file.get_tensor(key) for key in keys}
    key, manifest = next((k, json.loads(v)) for k, v in metadata.items())
    save_file(tensors, path, metadata={key: json.dumps({**manifest, "format": 99})})
    with pytest.raises(BadSnapshot, match="format 99; this version reads format 1"):
        load_snapshot(path, tiny(MODEL), model_id="abc")
    tensors["keys"][0, 0, 0, 0] += 1
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(BadSnapshot, match="damaged"):
        load_snapshot(path, tiny(MODEL), model_id="abc")
    save_file(tensors, path)
    with pytest.raises(BadSnapshot, match="not a snapshot of a cache"):
        load_snapshot(path, tiny(MODEL), model_id="abc")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_torn_snapshot_is_refused(share: float, tmp_path: Path) -> None:
    path = tmp_path / "cache.st"
    save_snapshot(started("nexus", tiny(MODEL)), path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(BadSnapshot, match="torn or not a snapshot"):
        load_snapshot(path, tiny(MODEL))
    with pytest.raises(BadSnapshot, match="there is no snapshot"):
        load_snapshot(tmp_path / "none.st", tiny(MODEL))


def test_a_restored_cache_asks_for_its_config() -> None:
    model = tiny(MODEL)
    state = started("nexus", model).state()
    other = EvictingCache(model, config("nexus", seed=5))
    with pytest.raises(ValueError, match="another config: seed was 0, here it is 5"):
        other.restore(state)


def test_saving_over_an_old_snapshot_leaves_one_of_the_two(tmp_path: Path) -> None:
    """A process killed at any time in mid-save leaves a file that loads."""
    path = tmp_path / "cache.st"
    here = Path(__file__).parent
    script = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from test_fork_and_snapshot import MODEL, started, tiny\n"
        "from cache import save_snapshot\n"
        "cache = started('nexus', tiny(MODEL))\n"
        "while True:\n"
        "    save_snapshot(cache, sys.argv[1]); print('saved', flush=True)\n"
    )
    command = [sys.executable, "-c", script, str(path), str(here), str(here.parents[1])]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        for _ in range(5):
            assert child.stdout.readline() == b"saved\n"
        child.kill()
    assert load_snapshot(path, tiny(MODEL)).seen == 58
