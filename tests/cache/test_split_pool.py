"""A model on several devices: the cache lies beside its layers, and nothing else changes.

No two GPUs are needed: accelerate places a tiny model on two pretended devices (see
`pretend_devices`), whose tensors cannot be mixed. What comes out is held, bit for bit, against the
same model placed on one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cache_harness import PRESETS, Run, logits_of, random_ids, run, tiny, turns_of
from pretend_devices import FIRST, SECOND, MixedDevices, place, pretended_devices
from transformers import PreTrainedModel

from cache import (
    AnyConfig,
    EvictingCache,
    Pool,
    RaggedPool,
    Sampling,
    decode,
    load_snapshot,
    make_pool,
    prefill,
    preset,
    save_snapshot,
)
from cache.placement import grouped, input_device, layer_devices
from cache.split_store import SplitPool

NAME, LAYERS = "qwen3-g4-kv2", "011"
TURNS = turns_of((26, 2), (10, 3), seed=5)


@pytest.fixture(autouse=True)
def two_devices() -> Iterator[None]:
    with pretended_devices():
        yield


def config(name: str, block_size: int = 4) -> AnyConfig:
    if name == "dense":
        return preset(name, block_size=block_size)
    # Whatever a preset asks for that a stream of 41 tokens is too short for.
    small = {"window": 4} if preset(name).window else {}
    budget = {"kind": "tokens", "tokens": 20}
    changed = {"block_size": block_size, "sinks": 4 // block_size, "recent": 4, "samples": 2}
    return preset(name, **small, **changed, budget=budget, prefill_eviction="chunk")


def same_content(ours: EvictingCache, theirs: EvictingCache) -> None:
    mine, yours = ours.state(), theirs.state()
    assert mine.tensors.keys() == yours.tensors.keys()
    for name, tensor in mine.tensors.items():
        assert torch.equal(tensor.cpu(), yours.tensors[name].cpu()), name
    assert (mine.seen, mine.scaling, mine.policy) == (yours.seen, yours.scaling, yours.policy)
    assert mine.room == yours.room


def beside_its_layers(cache: EvictingCache) -> None:
    """Every tensor of the cache is on its layer's device."""
    assert isinstance(cache.pool, SplitPool)
    for layer, device in enumerate(layer_devices(cache._model)):
        keys, values = cache.pool.view(layer, cache.row)
        held = cache.pool.held(cache.row, range(layer, layer + 1))
        planes = [keys, values, held.block_ids, *([] if held.sums is None else [held.sums])]
        queries = cache._window.newest(cache.seen, cache._window.size, range(layer, layer + 1))
        assert {plane.device for plane in planes} == {device}
        assert queries is None or queries.device == device


def one_device(name: str = NAME) -> PreTrainedModel:
    return place(tiny(name), "0" * len(tiny(name).model.layers))


def both(settings: AnyConfig, layers: str = LAYERS, name: str = NAME) -> tuple[Run, Run]:
    split = run(place(tiny(name), layers), settings, TURNS, chunk=16)
    return split, run(one_device(name), settings, TURNS, chunk=16)


@pytest.mark.parametrize("name", PRESETS)
def test_every_method_decides_as_on_one_device(name: str) -> None:
    split, whole = both(config(name))
    beside_its_layers(split.cache)
    assert torch.equal(split.logits, whole.logits)
    assert split.kept == whole.kept
    assert bool(split.kept) == (name != "dense")
    assert split.cache.resident == whole.cache.resident
    assert split.cache.nbytes == whole.cache.nbytes
    assert split.cache.state_bytes == whole.cache.state_bytes
    same_content(split.cache, whole.cache)


@pytest.mark.parametrize("name", ["nexus", "h2o", "ada-pyramidkv"])
def test_single_tokens_and_layers_that_alternate(name: str) -> None:
    settings = config(name, block_size=1)
    split, whole = both(settings, layers="0110", name="qwen2-g4-kv2")
    assert [len(each.layers) for each in split.cache.pool.places] == [1, 2, 1]
    beside_its_layers(split.cache)
    assert torch.equal(split.logits, whole.logits)
    assert split.kept == whole.kept
    same_content(split.cache, whole.cache)


@pytest.mark.parametrize("name", ["nexus", "ada-nexus", "h2o"])
@pytest.mark.parametrize("direction", ["two to one", "one to two"])
def test_a_snapshot_moves_between_machines(name: str, direction: str, tmp_path: Path) -> None:
    settings = config(name)
    models = [place(tiny(NAME), LAYERS), one_device()]
    if direction == "one to two":
        models.reverse()
    before, after = models
    saved = run(before, settings, TURNS, chunk=16).cache
    save_snapshot(saved, tmp_path / "cache")
    loaded = load_snapshot(tmp_path / "cache", after)
    assert isinstance(loaded.pool, SplitPool) == (direction == "one to two")
    same_content(loaded, saved)
    for ids in (random_ids(11, 91), [3], [4], [5]):
        assert torch.equal(logits_of(after, loaded, ids), logits_of(before, saved, ids))
        phase = "prefill" if len(ids) > 1 else "decode"
        loaded.evict(phase)
        saved.evict(phase)
    same_content(loaded, saved)


@pytest.mark.parametrize("name", ["nexus", "ada-nexus"])
def test_forks_and_rows_of_a_split_pool(name: str) -> None:
    model, settings = place(tiny(NAME), LAYERS), config(name)
    pool = make_pool(model, settings, rows=2)
    original = run(model, settings, TURNS, chunk=16, pool=pool).cache
    twin = original.fork(pool=pool)
    beside_its_layers(twin)
    same_content(twin, original)
    before = {name: tensor.clone() for name, tensor in original.state().tensors.items()}
    logits_of(model, twin, random_ids(9, 17))
    twin.evict("prefill")
    after = original.state().tensors
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    twin.close()
    assert pool.take() != original.row


@pytest.mark.parametrize("name", ["snapkv", "ada-nexus"])
def test_a_fork_goes_on_by_another_method(name: str) -> None:
    found = []
    for model in (place(tiny(NAME), LAYERS), one_device()):
        dense = EvictingCache(model, config("dense"), forks=[config(name)])
        logits_of(model, dense, random_ids(50, 8))
        twin = dense.fork(config=config(name))
        twin.evict("prefill")
        logits_of(model, twin, [7])
        found.append(twin)
    beside_its_layers(found[0])
    assert found[0].stats.evictions == 1
    same_content(*found)


def test_generation_goes_in_and_comes_out_at_the_embedding() -> None:
    told = []
    for model in (place(tiny(NAME), "110"), one_device()):
        cache = EvictingCache(model, config("nexus"))
        # Without inference mode, which pretended tensors do not know.
        logits = prefill.__wrapped__(model, cache, random_ids(30, 3), chunk=16)
        assert logits.device == input_device(model) == FIRST
        sampling = Sampling(temperature=0.8, seed=4)
        drawn = decode.__wrapped__(model, cache, logits, sampling=sampling)
        told.append([next(drawn) for _ in range(12)])
    assert told[0] == told[1]
    assert len(set(told[0])) > 5


def test_a_pool_is_split_only_where_layers_are_apart() -> None:
    together = place(tiny(NAME), "111")
    for name, kind in (("nexus", Pool), ("ada-nexus", RaggedPool)):
        pool = make_pool(together, config(name))
        assert type(pool) is kind
        assert pool.places[0].device == SECOND
        assert type(make_pool(tiny(NAME), config(name))) is kind


def test_pins_are_looked_for_on_all_devices() -> None:
    model = place(tiny(NAME), LAYERS)
    cache = EvictingCache(model, config("nexus"))
    logits_of(model, cache, random_ids(40, 6))
    cache.pin(8, 12)
    cache.evict("prefill")
    assert (cache.kept_blocks() == 2).any(-1).all()
    gone = min(set(range(9)) - set(cache.kept_blocks().flatten().tolist()))
    with pytest.raises(ValueError, match="evicted already"):
        cache.pin(gone * 4, gone * 4 + 1)


def test_devices_of_layers_are_grouped_where_they_follow_each_other() -> None:
    assert [(p.layers, p.device) for p in grouped([FIRST, SECOND, SECOND, FIRST])] == [
        (range(1), FIRST),
        (range(1, 3), SECOND),
        (range(3, 4), FIRST),
    ]


def test_the_pretended_devices_do_not_mix() -> None:
    ours, theirs = torch.ones(2, device=FIRST), torch.ones(2, device=SECOND)
    for wrong in (lambda: ours + theirs, lambda: ours + torch.ones(2), lambda: theirs @ ours):
        with pytest.raises(MixedDevices):
            wrong()
    assert (ours + theirs.to(FIRST)).tolist() == [2, 2]
    assert (ours + torch.tensor(1.0)).device == FIRST
