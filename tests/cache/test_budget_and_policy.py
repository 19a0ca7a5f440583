"""How many blocks stay, which ones must, and when a cut falls."""

from __future__ import annotations

import math
from fractions import Fraction

import oracles
import pytest
import torch
from cache_harness import logits_of, random_ids, run, tiny, turns_of
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from cache import EvictingCache, parse_config, prefill, preset
from cache.budgets import blocks_to_keep
from cache.config import DensityBudget, TokenBudget
from cache.policy import Policy

MODEL = "llama-g4-kv1"


def density(value: float, **options):
    return {"kind": "density", "density": value, **options}


# --- B ----------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    share=st.integers(1, 100),
    base=st.integers(0, 5000),
    forced=st.integers(0, 9),
    size=st.sampled_from([1, 7, 8, 32]),
    min_free=st.integers(0, 6),
    min_tokens=st.integers(0, 400),
)
def test_density_formula(share, base, forced, size, min_free, min_tokens):
    """B = max(floor(d ceil(base / b) + 1/2), forced + min_free, min_tokens in blocks)."""
    budget = DensityBudget(density=share / 100, min_free=min_free, min_tokens=min_tokens)
    got = blocks_to_keep(budget, base=base, forced=forced, block_size=size)
    blocks = math.ceil(Fraction(base, size))
    exact = math.floor(Fraction(share, 100) * blocks + Fraction(1, 2))
    # d is a float: where d * blocks is a half exactly, it may lie on either side.
    half = (Fraction(share, 100) * blocks) % 1 == Fraction(1, 2)
    floor = max(forced + min_free, math.ceil(Fraction(min_tokens, size)))
    assert isinstance(got, int)
    assert got == max(exact, floor) or (half and got == max(exact - 1, floor))


@pytest.mark.parametrize(
    ("share", "blocks", "expected"),
    [(0.2, 10, 2), (0.1, 100, 10), (0.29, 100, 29), (0.57, 100, 57), (0.5, 1, 1), (0.5, 5, 3)],
)
def test_shares_that_float_truncation_gets_wrong(share, blocks, expected):
    """int(10 * (1 - .8)) is 1 elsewhere (fault 13)."""
    budget = DensityBudget(density=share, min_free=0)
    assert blocks_to_keep(budget, base=blocks * 32, forced=0, block_size=32) == expected


@given(tokens=st.integers(1, 3000), size=st.sampled_from([1, 8, 32]), forced=st.integers(0, 20))
def test_a_token_budget_is_never_exceeded_and_never_below_the_forced(tokens, size, forced):
    budget = TokenBudget(tokens=tokens)
    if tokens // size < max(forced, 1):
        with pytest.raises(ValueError, match=f"{tokens} tokens") as error:
            blocks_to_keep(budget, base=10**6, forced=forced, block_size=size)
        assert str(max(forced, 1) * size) in str(error.value)
        assert "raise the budget" in str(error.value)
    else:
        got = blocks_to_keep(budget, base=10**6, forced=forced, block_size=size)
        assert got * size <= tokens < (got + 1) * size


def test_a_budget_below_the_forced_blocks_fails_before_anything_is_lost():
    model = tiny(MODEL)
    cache = EvictingCache(model, preset("nexus", budget={"kind": "tokens", "tokens": 40}))
    logits_of(model, cache, random_ids(100, seed=0))
    with pytest.raises(ValueError, match=r"40 tokens is 1 blocks of 32, fewer than the 3"):
        cache.evict("prefill")
    assert cache.resident == cache.seen == 100


# --- forced blocks ----------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    seen=st.integers(0, 300),
    size=st.sampled_from([1, 3, 8, 32]),
    window=st.integers(4, 20),
    recent=st.none() | st.integers(20, 70),
    sinks=st.integers(0, 3),
    pins=st.lists(st.tuples(st.integers(0, 290), st.integers(1, 20)), max_size=9),
)
def test_forced_blocks_by_walking_over_all_tokens(seen, size, window, recent, sinks, pins):
    config = preset(
        "nexus", block_size=size, window=window, recent=recent, sinks=sinks, budget=density(0.2)
    )
    policy = Policy(config)
    spans = [(start, start + length) for start, length in pins]
    for span in spans:
        policy.pin(*span)
    blocks = torch.arange(-(-seen // size))
    expected = oracles.forced_blocks(config, seen, spans)
    mask = policy.forced_mask(blocks, seen)
    assert {int(b) for b in blocks[mask]} == expected
    assert policy.forced_count(seen) == len(expected)
    # Order of the pages does not matter to the mask.
    if seen:
        assert torch.equal(policy.forced_mask(blocks.flip(0), seen), mask.flip(0))


@pytest.mark.parametrize("heads", ["kv_head", "layer_mean", "layer_attention"])
@pytest.mark.parametrize("selection", ["reservoir", "top_k"])
def test_sinks_pins_and_recent_tokens_survive_every_cut(heads, selection):
    """Re-applied StreamingLLM lost its sinks at the 4th cut elsewhere (faults 4 and 5)."""
    pins = [(18, 30), (55, 56)]
    config = preset(
        "nexus",
        block_size=4,
        window=5,
        sinks=2,
        heads=heads,
        selection=selection,
        prefill_eviction="chunk",
        budget={"kind": "tokens", "tokens": 48},
    )
    turns = turns_of((60, 16), (40, 12), (70, 10))
    result = run(tiny(MODEL), config, turns, chunk=16, pins=pins)
    assert len(result.records) > 12
    for record in result.records:
        for ids in record.kept.flatten(0, 1).tolist():
            assert ids == sorted(ids)
            assert oracles.forced_blocks(config, record.seen, pins) <= set(ids)


def test_pins_name_what_is_wrong():
    model = tiny("llama-one-layer")
    config = preset(
        "nexus", block_size=8, window=6, heads="layer_mean", budget={"kind": "tokens", "tokens": 47}
    )
    cache = EvictingCache(model, config)
    for span in [(3, 3), (-1, 4), (5, 2)]:
        with pytest.raises(ValueError, match=f"{span[0]}..{span[1]}"):
            cache.pin(*span)
    with pytest.raises(ValueError, match="raise the budget"):
        cache.pin(0, 40)
    prefill(model, cache, random_ids(160, seed=0))
    gone = next(b for b in range(20) if b not in cache.kept_blocks()[0, 0].tolist())
    with pytest.raises(ValueError, match="evicted already"):
        cache.pin(gone * 8, gone * 8 + 3)
    survivor = int(cache.kept_blocks()[0, 0, 1])
    cache.pin(survivor * 8 + 2, survivor * 8 + 3)
    for turn in range(6):
        prefill(model, cache, random_ids(60, seed=turn))
        assert (cache.kept_blocks() == survivor).any(-1).all()


def test_spans_still_to_come_can_be_pinned():
    """The system prompt's span is known before it is fed; this used to raise in arange."""
    model = tiny(MODEL)
    config = preset("nexus", block_size=8, window=6, budget={"kind": "tokens", "tokens": 60})
    cache = EvictingCache(model, config)
    cache.pin(20, 30)
    prefill(model, cache, random_ids(20, seed=0))
    cache.pin(100, 101)
    prefill(model, cache, random_ids(200, seed=1))
    for block in (2, 3, 12):
        assert (cache.kept_blocks() == block).any(-1).all()


# --- schedule ---------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["seen", "present", "first_prompt"])
@pytest.mark.parametrize("prefill_eviction", ["end", "chunk"])
def test_density_bases_and_the_schedule(base, prefill_eviction):
    config = preset(
        "nexus",
        block_size=4,
        window=5,
        prefill_eviction=prefill_eviction,
        budget=density(0.4, density_base=base, min_free=2, min_tokens=24),
    )
    result = run(tiny(MODEL), config, turns_of((90, 25), (60, 18), (5, 9)), chunk=25)
    schedule = oracles.expected_schedule(config, result.passes)
    assert [(r.seen, r.phase, r.after) for r in result.records] == [
        (due.seen, due.phase, due.count) for due in schedule
    ]
    assert len({r.after for r in result.records}) > 1 or base != "seen"


def test_a_density_is_fixed_by_the_prompt_while_a_turn_decodes():
    """ "Pins the cache": reading on raises B, generating does not."""
    config = preset("nexus", block_size=4, window=5, budget=density(0.5))
    result = run(tiny(MODEL), config, turns_of((80, 60), (40, 8)), chunk=500)
    by_phase = [(r.phase, r.after) for r in result.records]
    assert by_phase[0] == ("prefill", 10)
    assert by_phase[1:16] == [("decode", 10)] * 15
    assert by_phase[16:] == []  # 180 tokens seen: B is 23, 20 blocks are held
    assert result.cache.blocks == 22


def test_forced_blocks_stay_though_a_short_prompt_fixed_a_smaller_density():
    """After 3 tokens one block is forced, so B = 1; later the recent window alone takes four."""
    config = preset(
        "nexus", block_size=4, window=5, recent=16, sinks=1, budget=density(0.2, min_free=0)
    )
    result = run(tiny(MODEL), config, turns_of((3, 60)), chunk=500)
    assert len(result.records) > 3
    for record in result.records:
        for ids in record.kept.flatten(0, 1).tolist():
            assert oracles.forced_blocks(config, record.seen) <= set(ids)


def test_the_phase_is_passed_so_a_prompt_of_one_token_is_a_prefill():
    """Elsewhere it looked like a decode step (fault 8)."""
    model = tiny(MODEL)
    config = preset("nexus", block_size=8, window=6, budget={"kind": "tokens", "tokens": 40})
    cache = EvictingCache(model, config, record_kept=True)
    logits_of(model, cache, random_ids(90, seed=0))
    logits_of(model, cache, [5])
    assert cache.evict("decode") is None  # 91 tokens: no block has just filled
    record = cache.evict("prefill")
    assert (record.phase, record.seen, record.after) == ("prefill", 91, 5)

    only_prefill = EvictingCache(model, config.model_copy(update={"scope": "prefill"}))
    logits_of(model, only_prefill, random_ids(96, seed=0))
    assert only_prefill.evict("decode") is None
    assert only_prefill.evict("prefill").phase == "prefill"


def test_chunked_prefill_holds_the_budget_after_each_chunk_with_the_sinks_of_the_stream():
    """Not those of the chunk (fault 7)."""
    after = []
    config = preset(
        "nexus",
        block_size=8,
        window=6,
        prefill_eviction="chunk",
        budget={"kind": "tokens", "tokens": 47},
    )
    result = run(
        tiny(MODEL),
        config,
        turns_of((300, 0)),
        chunk=40,
        after_pass=lambda cache, _: after.append(cache.resident),
    )
    assert max(after) <= 40
    assert result.cache.stats.peak_tokens <= 80
    assert len(result.records) == 7
    assert all((record.kept[..., 0] == 0).all() for record in result.records)


def test_end_waits_for_the_last_chunk():
    model = tiny(MODEL)
    config = preset("nexus", block_size=8, window=6, budget={"kind": "tokens", "tokens": 47})
    cache = EvictingCache(model, config)
    for _ in range(3):
        logits_of(model, cache, random_ids(50, seed=0))
        assert cache.evict("prefill", last_chunk=False) is None
    assert cache.evict("prefill").before == 19
    assert cache.evict("prefill") is None  # within the budget: nothing to do


def test_dense_never_evicts_whatever_is_asked():
    model = tiny(MODEL)
    cache = EvictingCache(model, preset("dense"))
    for phase in ("prefill", "decode"):
        logits_of(model, cache, random_ids(64, seed=0))
        assert cache.evict(phase) is None
    assert (cache.stats.evictions, cache.stats.evicted_tokens, cache.resident) == (0, 0, 128)


# --- config -----------------------------------------------------------------------------------


def test_presets_hold_the_decisions_of_the_definitions():
    nexus, paper = preset("nexus"), preset("nexus-paper")
    for config in (nexus, paper):
        assert (config.window, config.walk_steps, config.walk_weight) == (16, 3, 0.5)
        assert (config.recency_tiebreak, config.samples, config.block_size) == (1e-6, 5, 32)
        assert (config.sinks, config.recent_tokens, config.selection) == (1, 32, "reservoir")
    assert (nexus.heads, nexus.walk_rows) == ("kv_head", "even")
    assert (nexus.budget.kind, nexus.budget.tokens) == ("tokens", 8192)
    assert (paper.heads, paper.walk_rows) == ("layer_mean", "newest")
    assert paper.prefill_eviction == "end"
    assert (paper.budget.kind, paper.budget.density, paper.budget.density_base) == (
        "density",
        0.2,
        "seen",
    )
    assert (paper.budget.min_free, paper.budget.min_tokens) == (4, 0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"walk_steps": 17}, "walk_steps=17 exceeds window=16"),
        ({"recent": 8}, "recent=8 is below window=16"),
        ({"budget": density(1.5)}, "density"),
        ({"budget": {"kind": "tokens", "tokens": 0}}, "tokens"),
        ({"heads": "query"}, "heads"),
        ({"no_such_option": 1}, "no_such_option"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_options_are_named(changes, named):
    with pytest.raises(ValidationError, match=named):
        preset("nexus", **changes)


def test_unknown_presets_name_the_known_ones_and_configs_round_trip():
    with pytest.raises(ValueError, match="nexus-paper"):
        preset("nexsus")
    config = preset("nexus-paper", seed=5)
    assert parse_config(config.model_dump()) == config
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 6
