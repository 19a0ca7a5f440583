"""Every option with every other: all pairs in few cases, a large sample of the product by hand."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import oracles
import pytest
import torch
from cache_harness import Run, logits_of, random_ids, replayed, tiny, turns_of
from pairwise import Case, all_pairs, pairs, wanted_pairs

from cache import EvictingCache, load_snapshot, preset, preset_names, save_snapshot
from cache.config import Phase

BUDGETS: dict[str, dict[str, Any]] = {
    "tokens": {"kind": "tokens", "tokens": 48},
    **{
        base: {"kind": "density", "density": share, "density_base": base, "min_free": 1}
        for base, share in (("seen", 0.5), ("present", 0.7), ("first_prompt", 0.6))
    },
}
TURNS = turns_of((61, 9), (30, 11), seed=8)
METHODS = [
    name
    for name in preset_names()
    if name != "dense" and not name.endswith("-paper") and not name.startswith("test_")
]
OPTIONS: dict[str, list[Any]] = {
    "method": METHODS,
    "heads": ["kv_head", "layer_mean", "layer_attention"],
    "scope": ["prefill", "prefill+decode"],
    "protocol": ["true_eviction", "full_context"],
    "model": ["llama-g1-kv2", "llama-g3-kv2", "qwen2-g4-kv2"],
    "chunk": [1, 5, 16, 64],
    "prefill_eviction": ["end", "chunk"],
    "snapshot": [False, True],
    "fork": [False, True],
    "block_size": [1, 4, 8],
    "budget": list(BUDGETS),
}


def allowed(case: Case) -> bool:
    """One decision per layer is an option of Nexus, where heads do not differ."""
    one_decision = case.get("heads", "kv_head") != "kv_head"
    return not one_decision or case.get("method", "nexus") in ("nexus", "topk")


PAIRWISE = all_pairs(OPTIONS, allowed)


def test_all_pairs_occur() -> None:
    wanted = set(wanted_pairs(OPTIONS, allowed))
    found = set().union(*(pairs(case, list(OPTIONS)) for case in PAIRWISE))
    assert wanted == found  # none is missing, and none that is not allowed occurs
    assert all(list(case) == list(OPTIONS) for case in PAIRWISE)
    assert len(PAIRWISE) < 2 * len(METHODS) * len(OPTIONS["chunk"])
    assert {"nexus", "snapkv", "h2o", "morphkv", "streaming_llm", "random", "topk"} <= set(METHODS)


def test_few_cases_are_enough() -> None:
    options = {name: list(range(3)) for name in "abcd"}
    cases = all_pairs(options)
    assert 9 <= len(cases) <= 12  # nine are the least there can be
    assert len(wanted_pairs(options)) == 6 * 9
    with pytest.raises(ValueError, match="no value of b goes with"):
        all_pairs({"a": [0], "b": [0], "c": [0]}, lambda case: not {"a", "b"} <= set(case))


def config_of(case: Case) -> Any:
    name = case["method"]
    changes: dict[str, Any] = {
        "scope": case["scope"],
        "prefill_eviction": case["prefill_eviction"],
        "block_size": case["block_size"],
        "budget": BUDGETS[case["budget"]],
        "recent": 8,
    }
    if name in ("nexus", "topk"):
        changes["heads"] = case["heads"]
    if getattr(preset(name), "window", 0):
        changes["window"] = 6
    if name == "streaming_llm":
        changes["sinks"] = 2
    return preset(name, **changes)


Pass = tuple[list[int], Phase, bool]


def streams(case: Case) -> Iterator[list[Pass]]:
    """What each cache of a run is fed: (ids, phase, last chunk of its turn) by forward pass.

    full_context has a fresh cache at every turn, which reads all that was said before.
    """

    def prompt(ids: list[int]) -> list[Pass]:
        starts = range(0, len(ids), case["chunk"])
        return [
            (ids[at : at + case["chunk"]], "prefill", at + case["chunk"] >= len(ids))
            for at in starts
        ]

    def reply(ids: list[int]) -> list[Pass]:
        return [([token], "decode", True) for token in ids]

    if case["protocol"] == "true_eviction":
        yield [each for turn in TURNS for each in prompt(turn.fed) + reply(turn.decoded)]
        return
    said: list[int] = []
    for turn in TURNS:
        yield prompt(said + turn.fed) + reply(turn.decoded)
        said += turn.fed + turn.decoded


def elsewhere(model: Any, cache: EvictingCache) -> None:
    """What becomes of the original must not matter to a copy."""
    logits_of(model, cache, random_ids(9, seed=77))
    cache.evict("prefill")
    logits_of(model, cache, random_ids(1, seed=78))
    cache.evict("decode")
    cache.close()


def saved_and_loaded(model: Any, cache: EvictingCache, path: Path) -> EvictingCache:
    save_snapshot(cache, path)
    records = list(cache.stats.records)
    elsewhere(model, cache)
    loaded = load_snapshot(path, model)
    loaded.record_kept = True
    loaded.stats.records.extend(records)
    return loaded


def forked(model: Any, cache: EvictingCache) -> EvictingCache:
    twin = cache.fork()
    elsewhere(model, cache)
    return twin


def live(
    model: Any, config: Any, passes: list[Pass], middle: Callable[[EvictingCache], EvictingCache]
) -> Run:
    """Run one cache through `passes`, check what it holds after each, and swap it half-way."""
    out = Run(EvictingCache(model, config, record_kept=True))
    parts, held = [], []
    for number, (ids, phase, last) in enumerate(passes):
        if number == len(passes) // 2:
            out.cache = middle(out.cache)
        parts.append(logits_of(model, out.cache, ids))
        out.cache.evict(phase, last_chunk=last)
        out.ids += ids
        out.passes.append((phase, len(ids), last))
        held.append(out.cache.resident)
        assert out.cache.seen == len(out.ids)
    out.logits = torch.cat(parts)
    assert held == expected_residents(config, out.passes)
    if config.budget.kind == "tokens":
        check_budget(config, out.passes, held)
    return out


def expected_residents(config: Any, passes: list[tuple[str, int, bool]]) -> list[int]:
    """Tokens held per layer and head after each pass and what was then evicted."""
    due = {
        (each.seen, each.phase): each.count for each in oracles.expected_schedule(config, passes)
    }
    size, seen, held, out = config.block_size, 0, 0, []
    for phase, tokens, _ in passes:
        seen, held = seen + tokens, held + tokens
        if (seen, phase) in due:
            held = due[seen, phase] * size - -seen % size
        out.append(held)
    return out


def check_budget(config: Any, passes: list[tuple[str, int, bool]], held: list[int]) -> None:
    """A number of tokens is kept to at once, or it is said how far it is not."""
    size = config.block_size
    blocks, decoded = config.budget.tokens // size, 0
    for (phase, _, last), tokens in zip(passes, held, strict=True):
        decoded = decoded + 1 if phase == "decode" else 0
        if phase == "prefill":
            if last or config.prefill_eviction == "chunk":
                assert math.ceil(tokens / size) <= blocks
        elif config.scope == "prefill+decode":
            assert tokens < (blocks + 1) * size
        else:  # grows by what was decoded, and by nothing else
            assert tokens <= blocks * size + decoded


def check(case: Case, folder: Path) -> None:
    model, config = tiny(case["model"]), config_of(case)

    def middle(cache: EvictingCache) -> EvictingCache:
        if case["snapshot"]:
            cache = saved_and_loaded(model, cache, folder / "cache.st")
        return forked(model, cache) if case["fork"] else cache

    for passes in streams(case):
        result = live(model, config, passes, middle)
        assert len(result.records) == result.cache.stats.evictions > 0
        happened = [(record.seen, record.phase, record.after) for record in result.records]
        schedule = oracles.expected_schedule(config, result.passes)
        assert happened == [(due.seen, due.phase, due.count) for due in schedule]
        for record, kept in zip(result.records, result.kept, strict=True):
            forced = oracles.forced_blocks(config, record.seen)
            sizes = [len(head) for layer in kept for head in layer]
            assert sum(sizes) == record.after * len(sizes)
            assert all(forced <= set(head) for layer in kept for head in layer)
        assert bool(torch.isfinite(result.logits).all())
        logits, _ = replayed(tiny(case["model"]), result)
        torch.testing.assert_close(result.logits, logits, atol=1e-4, rtol=0)
        if case["snapshot"] or case["fork"]:  # as if nothing had been copied
            undisturbed = live(model, config, passes, lambda cache: cache)
            assert result.kept == undisturbed.kept
            assert torch.equal(result.logits, undisturbed.logits)


def name_of(case: Case) -> str:
    flags = [name for name in ("snapshot", "fork") if case[name]]
    named = ("method", "heads", "scope", "protocol", "model", "chunk", "prefill_eviction")
    return "-".join(
        [*(str(case[name]) for name in named), f"b{case['block_size']}", case["budget"], *flags]
    )


@pytest.mark.parametrize("case", PAIRWISE, ids=name_of)
def test_every_pair(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)


def sample(count: int) -> list[Case]:
    """A part of the full product, the same one every time."""
    product = [
        case
        for values in itertools.product(*OPTIONS.values())
        if allowed(case := dict(zip(OPTIONS, values, strict=True)))
    ]
    return random.Random(20).sample(product, count)


@pytest.mark.slow
@pytest.mark.parametrize("case", sample(600), ids=name_of)
def test_many_at_once(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)
