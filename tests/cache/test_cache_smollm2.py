"""The same exactness on a real model, where losing the first tokens is seen at once."""

from __future__ import annotations

import inspect
import textwrap

import oracles
import pytest
import torch
from cache_harness import Run, Turn, expected_kept, logits_of, replayed, run
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from cache import EvictingCache, generate, preset

pytestmark = pytest.mark.model

# 21 blocks of text go through 8, in three turns; each turn is cut, and decoding cuts as well.
LENGTHS = [(160, 17), (80, 8), (70, 8)]
SETTINGS = preset(
    "nexus",
    block_size=16,
    window=8,
    prefill_eviction="chunk",
    budget={"kind": "tokens", "tokens": 135},
)


@pytest.fixture(scope="module")
def loaded():
    from agent.models import load

    return load("smollm2-135m", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def text_ids(loaded) -> list[int]:
    return loaded.tokenizer(inspect.getsource(textwrap)).input_ids


@pytest.fixture(scope="module")
def evicted(loaded, text_ids) -> Run:
    turns, at = [], 0
    for fed, decoded in LENGTHS:
        turns.append(Turn(text_ids[at : at + fed], text_ids[at + fed : at + fed + decoded]))
        at += fed + decoded
    return run(loaded.model, SETTINGS, turns, chunk=64)


@pytest.fixture(scope="module")
def oracle(loaded, evicted):
    return replayed(loaded.model, evicted)


def test_logits_equal_the_replayed_oracle(evicted, oracle):
    assert {r.phase for r in evicted.records} == {"prefill", "decode"}
    assert len(evicted.records) >= 5
    assert (evicted.logits - oracle[0]).abs().max() < 1e-4


def test_kept_sets_equal_brute_force(evicted, oracle):
    assert evicted.kept == expected_kept(evicted, oracle[1])


def test_sinks_survive_and_the_text_goes_on(loaded, text_ids, evicted):
    """Without its first tokens a trained model falls apart; random ones do not show it (fault 4).

    The control hides block 0 from all queries after the first eviction.
    """
    assert all((record.kept[..., 0] == 0).all() for record in evicted.records)

    def loss(logits: torch.Tensor) -> float:
        return float(cross_entropy(logits[-100:-1], torch.tensor(evicted.ids[-99:])))

    first = evicted.records[0].seen
    visible = oracles.visible_keys(
        evicted.records,
        tokens=len(evicted.ids),
        block_size=16,
        layers=loaded.model.config.num_hidden_layers,
        heads=loaded.model.config.num_key_value_heads,
    )
    visible[:, :, first:, :16] = False
    beheaded, _ = oracles.replay(loaded.model, evicted.ids, visible)
    assert loss(evicted.logits) < 3.5
    assert loss(beheaded) > loss(evicted.logits) + 0.5

    end = loaded.tokenizer.eos_token_id
    assert end not in evicted.logits[-100:].argmax(-1).tolist()


def test_greedy_text_after_many_evictions_is_no_instant_end(loaded, text_ids):
    cache = EvictingCache(loaded.model, SETTINGS)
    reply = generate(loaded.model, text_ids[:240], cache, max_new_tokens=18, chunk=64)
    assert cache.stats.evictions >= 3
    assert loaded.tokenizer.eos_token_id not in reply
    assert len(set(reply)) > 5


def test_dense_is_dynamic_cache_with_its_greedy_ids(loaded, text_ids):
    model, ids = loaded.model, text_ids[:120]
    cache = EvictingCache(model, preset("dense"))
    own = generate(model, ids, cache, max_new_tokens=8, chunk=50)
    logits = logits_of(model, cache, own[-1:])
    model.set_attn_implementation("sdpa")
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=8,
    )[0].tolist()
    assert own == out[len(ids) :]
    expected = logits_of(model, DynamicCache(), ids + own)[-1:]
    assert (logits - expected).abs().max() < 1e-4
