"""Every method against its definition in plain loops, and what all of them must hold."""

from __future__ import annotations

from typing import Any, Literal

import method_oracles
import pytest
import torch
from cache_harness import PRESETS, replayed, run, tiny, turns_of

from cache import (
    EvictingConfig,
    Method,
    Observation,
    methods,
    parse_config,
    preset,
    preset_names,
    register,
)

BUDGET = {"kind": "tokens", "tokens": 24}
SMALL: dict[str, dict[str, Any]] = {
    "snapkv": {"window": 6, "kernel": 5},
    "h2o": {"recent": 8, "recent_share": 0.0},
    "morphkv": {"window": 6},
    "streaming_llm": {"sinks": 3},
}
TURNS = [(37, 9), (1, 4), (29, 6)]


def small(name: str, **changes: Any) -> Any:
    return preset(name, **{"budget": BUDGET, **SMALL.get(name, {}), **changes})


def same_kept(name: str, model_name: str, chunk: int = 16, **changes: Any) -> None:
    result = run(tiny(model_name), small(name, **changes), turns_of(*TURNS), chunk=chunk)
    logits, captured = replayed(tiny(model_name), result)
    assert len(result.records) >= 2
    torch.testing.assert_close(result.logits, logits, atol=1e-4, rtol=0)
    assert result.kept == method_oracles.expected_kept(result, captured)


@pytest.mark.parametrize(
    "model_name", ["llama-g1-kv2", "llama-g3-kv2", "llama-g4-kv1", "qwen3-g4-kv2"]
)
@pytest.mark.parametrize("name", sorted(SMALL))
def test_kept_sets_are_those_of_the_definition(name: str, model_name: str) -> None:
    same_kept(name, model_name, scope="prefill+decode")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("snapkv", {"pooling": "avg"}),
        ("snapkv", {"group": "max", "prefill_eviction": "chunk"}),
        ("snapkv", {"scope": "prefill"}),
        ("snapkv", {"block_size": 4, "scope": "prefill+decode"}),
        ("h2o", {"prefill_eviction": "chunk"}),
        ("h2o", {"block_size": 4}),
        ("h2o", {"sinks": 2}),
        ("morphkv", {"fuse": "max"}),
        ("morphkv", {"block_size": 4, "prefill_eviction": "chunk"}),
        ("streaming_llm", {"block_size": 8, "sinks": 1}),
    ],
)
def test_options_follow_the_definition(name: str, changes: dict[str, Any]) -> None:
    same_kept(name, "qwen2-g4-kv2", **changes)


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_heavy_hitters_do_not_depend_on_the_chunks(chunk: int) -> None:
    same_kept("h2o", "llama-g4-kv1", chunk=chunk)


def test_heavy_hitters_keep_their_sums_through_evictions() -> None:
    result = run(tiny("qwen2-g4-kv2"), small("h2o"), turns_of(*TURNS), chunk=16)
    _, captured = replayed(tiny("qwen2-g4-kv2"), result)
    state, seen = result.cache.state(), len(result.ids)
    ids, sums = state.tensors["block_ids"], state.tensors["sums"]
    for layer in range(ids.shape[0]):
        for head in range(ids.shape[1]):
            present = sorted(ids[layer, head].tolist())
            expected = method_oracles.h2o(captured, layer, head, present, seen, result.cache.config)
            got = dict(zip(ids[layer, head].tolist(), sums[layer, head].tolist(), strict=True))
            assert got == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_half_of_the_budget_is_for_recent_tokens_unless_said_otherwise(share: float) -> None:
    config = preset("h2o", budget=BUDGET, **({} if share == 0.5 else {"recent_share": share}))
    result = run(tiny("llama-g4-kv1"), config, turns_of((40, 0)), chunk=16)
    _, captured = replayed(tiny("llama-g4-kv1"), result)
    newest = int(24 * share)
    for layer, (kept,) in enumerate(result.kept[0]):
        scores = method_oracles.h2o(captured, layer, 0, list(range(40)), 40, config)
        hitters = sorted(range(40 - newest), key=scores.__getitem__)[-(24 - newest) :]
        assert kept == sorted([*hitters, *range(40 - newest, 40)])


def test_pins_do_not_eat_up_the_share_of_heavy_hitters() -> None:
    """With most of the budget pinned, half of what is left is still for heavy hitters."""
    config = preset("h2o", budget=BUDGET)
    result = run(tiny("llama-g4-kv1"), config, turns_of((60, 0)), chunk=60, pins=[(0, 14)])
    assert result.kept == method_oracles.expected_kept(
        result, replayed(tiny("llama-g4-kv1"), result)[1], pins=[(0, 14)]
    )
    for (kept,) in result.kept[0]:
        assert set(range(14)) <= set(kept)
        assert (
            len([token for token in kept if 14 <= token < 55]) == 5
        )  # 10 left: 5 and the 5 newest


def test_a_new_token_does_not_die_first() -> None:
    """H2O's newest tokens have had few queries; the recent part keeps them (fault 12)."""
    result = run(tiny("llama-g1-kv2"), small("h2o"), turns_of((30, 40)), chunk=30)
    assert len(result.records) > 30
    for record in result.records:
        newest = set(range(record.seen - 8, record.seen))
        for layer in record.kept.tolist():
            assert all(newest <= set(head) for head in layer)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("selection", ["top_k", "reservoir"])
def test_all_methods_hold_the_budget_and_what_is_forced(name: str, selection: str) -> None:
    if name == "dense":
        pytest.skip("never evicts")
    changes: dict[str, Any] = {"selection": selection, "block_size": 4, "recent": 8, "sinks": 1}
    if name not in ("streaming_llm", "random", "h2o"):
        changes["window"] = 6
    config = preset(
        name, **{"budget": {"kind": "tokens", "tokens": 32}, **changes}, scope="prefill+decode"
    )
    held: list[int] = []
    result = run(
        tiny("qwen2-g4-kv2"),
        config,
        turns_of((50, 12), (33, 7)),
        chunk=16,
        pins=[(8, 12)],
        after_pass=lambda cache, phase: held.append(cache.resident) if phase == "decode" else None,
    )
    assert result.records
    assert max(held) <= 32 + 4
    assert bool(torch.isfinite(result.logits).all())
    for record in result.records:
        kept = record.kept
        assert record.after == 8
        assert int((kept >= 0).sum()) == 8 * kept[..., 0].numel()
        assert torch.equal(kept, kept.sort(-1).values)
        for block in (0, 2, (record.seen - 1) // 4, (record.seen - 8) // 4):
            assert bool((kept == block).any(-1).all()), (record, block)
    logits, _ = replayed(tiny("qwen2-g4-kv2"), result)
    torch.testing.assert_close(result.logits, logits, atol=1e-4, rtol=0)


def test_random_keeps_every_block_equally_often() -> None:
    counts = torch.zeros(12)
    for seed in range(150):
        config = preset(
            "random", block_size=1, sinks=0, recent=1, seed=seed, budget={**BUDGET, "tokens": 5}
        )
        result = run(tiny("llama-g1-kv2"), config, turns_of((13, 0)), chunk=13)
        kept = result.records[0].kept.flatten()
        counts += torch.bincount(kept[kept < 12], minlength=12)
    draws = 150 * 3 * 2  # layers, heads
    expected = draws * 4 / 12
    # Sampling without replacement: the statistic is 11/12 of a chi-square's; 31.3 is p = 0.001.
    statistic = float(((counts - expected) ** 2 / (expected * (1 - 4 / 12))).sum())
    assert statistic < 31.3
    assert float(counts.sum()) == draws * 4


def test_a_method_from_outside_shows_up_by_its_name() -> None:
    class KeyNormConfig(EvictingConfig):
        method: Literal["test_key_norm"] = "test_key_norm"
        block_size: int = 1

    class KeyNorm(Method[KeyNormConfig]):
        Config = KeyNormConfig

        def weights(self, observation: Observation) -> torch.Tensor:
            norms = observation.keys.float().norm(dim=-1)
            return observation.block_weights(1 / (1 + norms))

    register(KeyNorm)
    assert "test_key_norm" in methods()
    assert "test_key_norm" in preset_names()
    config = preset("test_key_norm", budget=BUDGET, sinks=0, recent=2)
    result = run(tiny("llama-g1-kv2"), config, turns_of((40, 0)), chunk=40)
    _, captured = replayed(tiny("llama-g1-kv2"), result)
    for layer, kept in enumerate(result.kept[0]):
        for head, blocks in enumerate(kept):
            norms = captured.keys[layer][head, :38].norm(dim=-1)
            smallest = norms.argsort()[:22].tolist()
            assert blocks == sorted([*smallest, 38, 39])
    with pytest.raises(ValueError, match="'test_key_norm' is there already"):
        register(type("Other", (KeyNorm,), {}))


def test_an_unknown_method_is_refused_with_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"unknown method 'magic'.*dense.*snapkv"):
        parse_config({"method": "magic"})
    with pytest.raises(ValueError, match=r"unknown method 'magic'.*nexus-paper"):
        preset("magic")
