"""Logits with evictions equal full attention under the mask that the kept sets replay."""

from __future__ import annotations

import itertools

import pytest
import torch
from cache_harness import SHAPES, Run, replayed, run, tiny, turns_of
from oracles import replay

from cache import preset

MODELS = [name for name in SHAPES if name not in ("llama-one-layer", "llama-g3-kv2")]
HEADS = ["kv_head", "layer_mean", "layer_attention"]
# Three turns; the observations alone are beyond the budget of 5 blocks of 8 tokens.
TURNS = [(61, 9), (50, 8), (43, 10)]
TOLERANCE = 1e-4


def config(**changes):
    options = {
        "block_size": 8,
        "window": 6,
        "budget": {"kind": "tokens", "tokens": 47},
        "prefill_eviction": "end",
        "scope": "prefill+decode",
        "seed": 3,
    }
    return preset("nexus", **{**options, **changes})


def assert_exact(name: str, result: Run) -> None:
    assert result.cache.stats.evictions == len(result.records) > 0
    expected, _ = replayed(tiny(name), result)
    worst = (result.logits - expected).abs().max()
    assert worst < TOLERANCE, f"{worst:.2e} after {len(result.records)} evictions"


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_and_head_mode(name, heads):
    result = run(tiny(name), config(heads=heads), turns_of(*TURNS), chunk=32)
    assert_exact(name, result)
    full = [r.after for r in result.records]
    assert full == [5] * len(full)


@pytest.mark.parametrize("scope", ["prefill", "prefill+decode"])
@pytest.mark.parametrize("prefill_eviction", ["end", "chunk"])
@pytest.mark.parametrize("chunk", [1, 13, 500])
def test_every_schedule_and_chunk_size(chunk, prefill_eviction, scope):
    name = "qwen2-g4-kv2"
    settings = config(prefill_eviction=prefill_eviction, scope=scope)
    result = run(tiny(name), settings, turns_of(*TURNS, seed=1), chunk=chunk)
    assert_exact(name, result)
    phases = {record.phase for record in result.records}
    assert phases == ({"prefill", "decode"} if scope == "prefill+decode" else {"prefill"})


@pytest.mark.parametrize("block_size", [1, 5, 32])
def test_block_sizes_and_a_density(block_size):
    name = "llama-g1-kv2"
    settings = config(block_size=block_size, budget={"kind": "density", "density": 0.3})
    result = run(tiny(name), settings, turns_of((200, 12), (160, 9), (90, 12)), chunk=64)
    assert_exact(name, result)


def test_pages_are_out_of_order_while_it_stays_exact():
    """Attention must not depend on slot order: show that this run does have scrambled slots."""
    scrambled = []

    def look(cache, phase):
        ids = cache.block_ids
        scrambled.append(bool((ids.diff(dim=-1) < 0).any()))

    name = "qwen3-g4-kv2"
    result = run(tiny(name), config(), turns_of(*TURNS, seed=2), chunk=20, after_pass=look)
    assert any(scrambled)
    assert_exact(name, result)


@pytest.mark.parametrize("chunk", [9, 500])
def test_exact_to_the_last_bits_in_float64(chunk):
    """Float32's 1e-4 could hide a small error; nothing hides here."""
    name = "qwen2-g4-kv2"
    result = run(tiny(name).double(), config(), turns_of(*TURNS, seed=5), chunk=chunk)
    expected, _ = replayed(tiny(name).double(), result)
    assert len(result.records) > 3
    assert (result.logits - expected).abs().max() < 1e-12


def test_what_left_is_missed():
    """The oracle can tell: the same ids with everything visible give other logits."""
    name = "llama-g4-kv1"
    result = run(tiny(name), config(), turns_of(*TURNS), chunk=32)
    tokens = len(result.ids)
    first = result.records[0].seen
    everything = torch.ones(3, 1, tokens, tokens, dtype=torch.bool).tril()
    full, _ = replay(tiny(name), result.ids, everything)
    apart = (result.logits - full).abs().amax(-1)
    assert apart[:first].max() < TOLERANCE
    assert apart[first:].median() > 100 * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "heads", "scope", "prefill_eviction", "chunk", "walk_rows", "selection"),
    list(
        itertools.product(
            MODELS,
            HEADS,
            ["prefill", "prefill+decode"],
            ["end", "chunk"],
            [1, 13, 64],
            ["even", "newest", "all"],
            ["reservoir", "top_k"],
        )
    ),
)
def test_all_of_it(name, heads, scope, prefill_eviction, chunk, walk_rows, selection):
    settings = config(
        heads=heads,
        scope=scope,
        prefill_eviction=prefill_eviction,
        walk_rows=walk_rows,
        selection=selection,
    )
    assert_exact(name, run(tiny(name), settings, turns_of(*TURNS, seed=4), chunk=chunk))
