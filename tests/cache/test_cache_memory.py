"""How much is held, counted in bytes of tensors, over long runs."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from cache_harness import logits_of, random_ids, replayed, run, tiny, turns_of

from cache import EvictingCache, Sampling, decode, generate, make_pool, prefill, preset

NAME = "qwen2-g4-kv2"  # 4 layers, 2 KV heads of 8 query heads, head size 4
LAYERS, KV_HEADS, QUERY_HEADS, DIM = 4, 2, 8, 4


def config(**changes):
    options = {"block_size": 8, "window": 6, "budget": {"kind": "tokens", "tokens": 47}}
    return preset("nexus", **{**options, **changes})


def storages_of(cache) -> int:
    """Bytes of all distinct tensor storages that the cache can reach, found by walking it."""
    found: dict[int, int] = {}
    seen, todo = set(), [cache]
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, type | torch.nn.Module):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(thing, dict):
            todo += thing.values()
        elif isinstance(thing, list | tuple | set):
            todo += thing
        elif hasattr(thing, "__dict__"):
            todo += vars(thing).values()
    return sum(found.values())


@pytest.mark.parametrize("prefill_eviction", ["chunk", "end"])
def test_bytes_are_flat_over_forty_turns_of_observations_beyond_the_budget(prefill_eviction):
    """SinkCache died on its second turn (fault 20); others store all query heads (fault 10)."""
    model = tiny(NAME)
    settings = config(prefill_eviction=prefill_eviction)
    cache = EvictingCache(model, settings)
    sizes, pointers, unfed = [], [], []
    for turn in range(40):
        before = cache.stats.evictions
        length = 50 + (turn * 13) % 60  # always more than the budget of 47 tokens
        reply = generate(
            model, unfed + random_ids(length, seed=turn), cache, max_new_tokens=9, chunk=32
        )
        assert len(reply) == 9
        unfed = reply[-1:]
        assert cache.stats.evictions > before
        sizes.append(cache.nbytes)
        pointers.append(cache.pool.keys.data_ptr())
        assert cache.nbytes == storages_of(cache)
        assert cache.resident <= (5 + 1) * 8
    assert len(set(sizes[2:])) == 1, sizes
    assert cache.seen > 40 * 50
    slots = (5 + 1) * 8 + (32 if prefill_eviction == "chunk" else 0)
    kv = 2 * LAYERS * KV_HEADS * slots * DIM * 4  # H_kv heads are stored, not H_q
    ids = LAYERS * KV_HEADS * (slots // 8) * 8
    window = LAYERS * QUERY_HEADS * 6 * DIM * 4
    assert sizes[-1] == kv + ids + window
    if prefill_eviction == "chunk":
        assert len(set(pointers[2:])) == 1, "the pool was allocated anew in the middle of a run"
        assert cache.stats.peak_tokens <= (5 + 1) * 8 + 32


def test_twenty_turns_stay_exact_and_bounded_in_slots():
    held = []
    turns = turns_of(*[(60, 4)] * 20)
    settings = config(prefill_eviction="chunk")
    result = run(
        tiny(NAME), settings, turns, chunk=30, after_pass=lambda cache, _: held.append(cache.blocks)
    )
    assert max(held) <= 6
    assert result.cache.stats.evictions == 39  # the first chunk fits
    expected, _ = replayed(tiny(NAME), result)
    assert (result.logits - expected).abs().max() < 1e-4
    assert result.cache.seen == 20 * 64


def test_never_more_than_one_block_over_the_budget_while_decoding():
    model = tiny(NAME)
    cache = EvictingCache(model, config())
    logits = prefill(model, cache, random_ids(100, seed=1))
    steps, most = decode(model, cache, logits, sampling=Sampling()), 0
    for _ in range(200):
        next(steps)
        most = max(most, cache.resident)
    # Just before a cut one block more is full; after it no more than the budget is held.
    assert most < (5 + 1) * 8
    assert cache.stats.peak_tokens == 100


def test_the_peak_of_an_end_cut_is_reported():
    """Prefill holds everything until the cut: say so, do not call it the budget (fault 17)."""
    model = tiny(NAME)
    cache = EvictingCache(model, config(prefill_eviction="end"))
    prefill(model, cache, random_ids(400, seed=1), chunk=64)
    assert cache.resident == 5 * 8
    assert cache.stats.peak_tokens == 400
    assert cache.peak_bytes >= 2 * LAYERS * KV_HEADS * 400 * DIM * 4
    assert cache.nbytes < cache.peak_bytes / 4
    prefill(model, cache, random_ids(10, seed=2))
    assert cache.stats.peak_tokens == 400


def test_scope_prefill_grows_while_decoding_and_reports_it():
    model = tiny(NAME)
    cache = EvictingCache(model, config(scope="prefill"))
    generate(model, random_ids(100, seed=1), cache, max_new_tokens=150)
    assert cache.resident == 4 * 8 + 4 + 149
    assert cache.stats.evictions == 1
    assert cache.stats.peak_tokens == cache.resident


def test_a_closed_row_is_free_again_and_its_content_forgotten():
    model = tiny(NAME)
    settings = config()
    pool = make_pool(model, settings, rows=1)
    first = EvictingCache(model, settings, pool=pool)
    prefill(model, first, random_ids(70, seed=1))
    first.close()
    with pytest.raises(RuntimeError, match="closed"):
        logits_of(model, first, [1])
    second = EvictingCache(model, settings, pool=pool)
    assert second.resident == 0
    fresh_model = tiny(NAME)
    fresh = EvictingCache(fresh_model, settings)
    ids = random_ids(90, seed=2)
    assert torch.equal(prefill(model, second, ids), prefill(fresh_model, fresh, ids))
    assert torch.equal(second.kept_blocks(), fresh.kept_blocks())


def test_reset_is_as_good_as_new():
    model = tiny(NAME)
    cache = EvictingCache(model, config(), record_kept=True)
    cache.pin(0, 20)
    ids = random_ids(150, seed=2)
    prefill(model, cache, random_ids(77, seed=1))
    cache.reset()
    assert (cache.seen, cache.resident, cache.stats.evictions) == (0, 0, 0)
    twin_model = tiny(NAME)
    twin = EvictingCache(twin_model, config(), record_kept=True)
    assert torch.equal(prefill(model, cache, ids), prefill(twin_model, twin, ids))
    assert torch.equal(cache.kept_blocks(), twin.kept_blocks())


def test_nothing_of_a_dropped_cache_stays_behind():
    model = tiny(NAME)
    cache = EvictingCache(model, config())
    prefill(model, cache, random_ids(70, seed=1))
    left = [weakref.ref(cache), weakref.ref(cache.pool.keys)]
    del cache
    gc.collect()
    assert [ref() for ref in left] == [None, None]
