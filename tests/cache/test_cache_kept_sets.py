"""Kept sets equal those of a brute-force Nexus step, and depend on nothing that they must not."""

from __future__ import annotations

import itertools

import oracles
import pytest
from cache_harness import Run, expected_kept, logits_of, random_ids, replayed, run, tiny, turns_of

from cache import EvictingCache, make_pool, preset

TURNS = [(61, 7), (50, 5), (43, 6)]
HEADS = ["kv_head", "layer_mean", "layer_attention"]
MODEL = "qwen2-g4-kv2"


def config(**changes):
    options = {
        "block_size": 4,
        "window": 5,
        "budget": {"kind": "tokens", "tokens": 41},
        "seed": 2**33 + 5,
    }
    return preset("nexus", **{**options, **changes})


def assert_as_brute_force(name: str, result: Run, pins=()) -> None:
    _, captured = replayed(tiny(name), result)
    schedule = oracles.expected_schedule(result.cache.config, result.passes, pins)
    happened = [(r.seen, r.phase, r.after) for r in result.records]
    assert happened == [(due.seen, due.phase, due.count) for due in schedule]
    assert len(happened) > 1
    assert result.kept == expected_kept(result, captured, pins)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("walk_rows", ["even", "newest", "all"])
def test_head_modes_and_walk_rows(heads, walk_rows):
    result = run(tiny(MODEL), config(heads=heads, walk_rows=walk_rows), turns_of(*TURNS), chunk=32)
    assert {r.phase for r in result.records} == {"prefill", "decode"}
    assert_as_brute_force(MODEL, result)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama-g4-kv1", {"walk_steps": 0}),
        ("llama-g1-kv2", {"walk_steps": 1}),
        ("qwen2-g4-kv2", {"walk_steps": 2, "samples": 1}),
        ("qwen3-g4-kv2", {"walk_steps": 5, "window": 9}),
        ("qwen3-g1-kv2", {"walk_steps": 3, "walk_weight": 4.0}),
        ("qwen2-g1-kv1", {"selection": "top_k"}),
        ("llama-g1-kv2", {"selection": "top_k", "walk_steps": 0, "recency_tiebreak": 0.5}),
        ("llama-g4-kv1", {"samples": 1, "heads": "layer_mean"}),
        ("qwen3-g4-kv2", {"samples": 2, "sinks": 0}),
        ("qwen2-g4-kv2", {"sinks": 3, "recent": 6}),
        ("llama-one-layer", {"prefill_eviction": "chunk"}),
        ("qwen3-g4-kv2", {"prefill_eviction": "chunk", "scope": "prefill"}),
        ("llama-g1-kv2", {"budget": {"kind": "density", "density": 0.2, "min_free": 2}}),
        (
            "qwen2-g4-kv2",
            {"budget": {"kind": "density", "density": 0.3, "density_base": "present"}},
        ),
        (
            "qwen2-g4-kv2",
            {"budget": {"kind": "density", "density": 0.6, "density_base": "first_prompt"}},
        ),
    ],
)
def test_options(name, changes):
    result = run(tiny(name), config(**changes), turns_of(*TURNS, seed=1), chunk=17)
    assert_as_brute_force(name, result)


@pytest.mark.parametrize("block_size", [1, 8, 32])
def test_block_sizes(block_size):
    turns = turns_of((29, 5), (18, 4)) if block_size == 1 else turns_of((170, 9), (203, 12))
    tokens = {1: 13, 8: 66, 32: 165}[block_size]
    settings = config(block_size=block_size, budget={"kind": "tokens", "tokens": tokens})
    result = run(tiny(MODEL), settings, turns, chunk=64)
    assert_as_brute_force(MODEL, result)


@pytest.mark.parametrize("remainder", range(32))
def test_every_length_modulo_the_block_size(remainder):
    """One rounding rule for the store and its readers (fault 15), with a second cut on top."""
    name = "llama-g4-kv1"
    settings = preset("nexus", budget={"kind": "tokens", "tokens": 165}, recent=20, window=4)
    result = run(tiny(name), settings, turns_of((224 + remainder, 0), (75, 0)), chunk=1000)
    assert_as_brute_force(name, result)
    first, second = result.records
    assert first.before == (7 if remainder == 0 else 8)
    tail = (224 + remainder) % 32
    held = 4 * 32 + tail if tail else 5 * 32
    assert second.before == -(-(held + 75) // 32)


def test_pins_are_kept_and_cost_budget():
    pins = [(9, 14), (70, 71)]
    settings = config(budget={"kind": "tokens", "tokens": 48})
    result = run(tiny(MODEL), settings, turns_of(*TURNS), chunk=32, pins=pins)
    assert_as_brute_force(MODEL, result, pins)
    last = result.records[-1].kept
    for block in (2, 3, 17):
        assert (last == block).any(-1).all()
    free = run(tiny(MODEL), settings, turns_of(*TURNS), chunk=32).records[-1].kept
    assert not all((free == block).any(-1).all() for block in (2, 3, 17))


def test_same_kept_sets_for_any_chunk_size_and_on_a_second_run():
    """With `end` the schedule does not know of chunks."""
    runs = [
        run(tiny(MODEL), config(), turns_of(*TURNS), chunk=chunk) for chunk in (61, 500, 16, 7, 500)
    ]
    assert len(runs[0].records) > 3
    for other in runs[1:]:
        assert other.kept == runs[0].kept


def test_another_row_of_a_larger_pool_beside_other_sessions_changes_nothing():
    """Nothing of one session may leak into another (fault 9)."""
    settings = config()
    alone = run(tiny(MODEL), settings, turns_of(*TURNS), chunk=20)

    model = tiny(MODEL)
    pool = make_pool(model, settings, rows=3)
    others = [EvictingCache(model, settings, pool=pool) for _ in range(2)]
    stream = iter(random_ids(10_000, seed=99))

    def disturb(cache, phase):
        """The others read and evict between all of this session's passes."""
        for count, other in zip((3, 11), others, strict=True):
            logits_of(model, other, [next(stream) for _ in range(count)])
            other.evict("prefill")

    beside = run(model, settings, turns_of(*TURNS), chunk=20, pool=pool, after_pass=disturb)
    assert beside.cache.row != alone.cache.row
    assert all(other.stats.evictions > 5 for other in others)
    assert beside.kept == alone.kept
    assert (beside.logits - alone.logits).abs().max() < 1e-5


def test_seeds_and_steps_draw_anew():
    def kept(seed):
        return run(tiny(MODEL), config(seed=seed), turns_of(*TURNS), chunk=500).kept

    assert kept(1) != kept(2)
    assert kept(1) == kept(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "walk_rows", "steps", "samples", "selection", "block_size", "prefill_eviction"),
    list(
        itertools.product(
            HEADS,
            ["even", "newest", "all"],
            [0, 1, 2, 3],
            [1, 5],
            ["reservoir", "top_k"],
            [1, 3, 8],
            ["end", "chunk"],
        )
    ),
)
def test_all_of_it(heads, walk_rows, steps, samples, selection, block_size, prefill_eviction):
    settings = config(
        heads=heads,
        walk_rows=walk_rows,
        walk_steps=steps,
        samples=samples,
        selection=selection,
        block_size=block_size,
        prefill_eviction=prefill_eviction,
        budget={"kind": "tokens", "tokens": 6 * block_size + 10},
    )
    result = run(tiny(MODEL), settings, turns_of(*TURNS, seed=6), chunk=21)
    assert_as_brute_force(MODEL, result)
