"""Faults that other projects' eviction codes had, one regression test for each.

The numbers are those of the project's list of known faults; each is named in the test's docstring.

 2  layers of unequal lengths, for one and for several queries
        test_ragged.py::test_layers_of_unequal_lengths
 6  queries of the window that lost their own positions
        test_known_faults.py::test_window_queries_carry_their_own_positions
10  query heads stored where KV heads would do
        test_cache_memory.py::test_bytes_are_flat_over_forty_turns_of_observations_beyond_the_budget
12  a new token enters with score 0 and dies first
        test_methods.py::test_a_new_token_does_not_die_first
13  budgets cut by int() of a float, none kept, one layer
        test_allocation.py::test_no_block_is_lost_to_rounding
14  budgets that miss their sum, and that fall back to uniform in silence
        test_allocation.py::test_a_pyramid_is_never_uniform_in_silence
17  prefill-only methods that grow in decode and are called fixed
        test_cache_memory.py::test_the_peak_of_an_end_cut_is_reported
22  question-aware scores that look good on one question
        test_known_faults.py::test_what_a_first_question_evicted_is_gone_for_a_second
23  MorphKV's state out of step with its heads
        test_known_faults.py::test_morphkv_scores_follow_the_heads
24  sets by head where blocks span heads
        test_known_faults.py::test_blocks_shared_by_a_layer_stay_the_same_in_all_heads
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import method_oracles
import pytest
import torch
from cache_harness import Turn, logits_of, random_ids, replayed, run, tiny, turns_of

from cache import EvictingCache, Observation, preset
from cache.methods import make_method
from cache.methods.nexus import Nexus

HERE = Path(__file__).parent


def listed() -> list[tuple[int, str, str]]:
    entries = re.findall(r"^ ?(\d+)  .*\n +(\S+\.py)::(\S+)$", __doc__ or "", re.MULTILINE)
    return [(int(number), file, test) for number, file, test in entries]


def test_the_list_is_complete() -> None:
    assert [number for number, _, _ in listed()] == [2, 6, 10, 12, 13, 14, 17, 22, 23, 24]


@pytest.mark.parametrize(("number", "file", "test"), listed())
def test_each_fault_has_its_test(number: int, file: str, test: str) -> None:
    tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
    found = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert f"fault {number}" in (ast.get_docstring(found[test]) or "")


@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_window_queries_carry_their_own_positions(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window that holds prefilled and decoded tokens has each rotated by its own place (fault 6).

    kvpress rotates all queries of the window by the position of the last one.
    """
    seen: list[tuple[int, int, torch.Tensor]] = []
    weights = Nexus.weights

    def spy(self: Nexus, observation: Observation) -> torch.Tensor:
        first = getattr(observation, "first_layer", 0)
        assert observation.query_index.tolist() == list(range(observation.seen))[-9:]
        for layer, queries in enumerate(observation.queries):
            seen.append((observation.seen, first + layer, queries.clone()))
        return weights(self, observation)

    monkeypatch.setattr(Nexus, "weights", spy)
    name = "llama-g3-kv2"
    budget = {"kind": "tokens", "tokens": 44}
    config = preset("nexus", block_size=4, window=9, recent=9, budget=budget)
    result = run(tiny(name), config, turns_of((70, 11), (37, 6)), chunk=chunk)
    _, captured = replayed(tiny(name), result)
    assert {at for at, _, _ in seen} == {record.seen for record in result.records}
    # After 6 decoded tokens the window holds tokens of both kinds, after 10 decoded ones alone.
    assert {70, 76, 80} <= {at for at, _, _ in seen}
    assert {layer for _, layer, _ in seen} == {0, 1, 2}
    for at, layer, queries in seen:
        torch.testing.assert_close(
            queries, captured.queries[layer][:, at - 9 : at], atol=1e-4, rtol=0
        )


def small(name: str, **changes: Any) -> Any:
    fields: dict[str, Any] = {"budget": {"kind": "tokens", "tokens": 24}, "recent": 8}
    if getattr(preset(name), "window", 0):
        fields["window"] = 6
    if name == "h2o":
        fields["recent_share"] = 0.0  # more room for what is scored
    return preset(name, **{**fields, **changes})


def told(name: str, questions: list[list[int]]) -> list[list[list[list[int]]]]:
    """Kept sets after each question on one document, in one stream."""
    config = small(name, block_size=1)
    document = random_ids(40, seed=1)
    turns = [Turn(document + questions[0], []), *(Turn(ids, []) for ids in questions[1:])]
    return run(tiny("qwen3-g4-kv2"), config, turns, chunk=100).kept


def of_document(kept: list[list[list[int]]]) -> list[set[int]]:
    return [{block for block in head if block < 40} for layer in kept for head in layer]


ONE, OTHER = random_ids(20, seed=2), random_ids(20, seed=3)


@pytest.mark.parametrize("name", ["snapkv", "morphkv", "h2o", "topk"])
def test_what_a_first_question_evicted_is_gone_for_a_second(name: str) -> None:
    """Scores that know the question look better than they are on one question (fault 22).

    What the second question alone would have kept was evicted under the first, and stays away.
    """
    first, second = told(name, [ONE, OTHER])
    alone = of_document(told(name, [OTHER])[0])
    under_first, under_both = of_document(first), of_document(second)
    assert all(later <= before for later, before in zip(under_both, under_first, strict=True))
    missed = [mine - before for mine, before in zip(alone, under_first, strict=True)]
    assert sum(map(len, missed)) > 3, "the questions ask for the same"
    assert not any(later & lost for later, lost in zip(under_both, missed, strict=True))


@pytest.mark.parametrize("name", ["nexus", "snapkv", "h2o", "morphkv", "streaming_llm", "random"])
def test_a_method_says_whether_its_scores_know_the_question(name: str) -> None:
    """`query_aware` is what a report says (fault 22): here it is what the method does."""
    one, other = (of_document(told(name, [question])[0]) for question in (ONE, OTHER))
    assert make_method(small(name)).query_aware == (one != other)


@pytest.mark.parametrize(("name", "fuse"), [("qwen3-g4-kv2", "sum"), ("llama-g3-kv2", "max")])
def test_morphkv_scores_follow_the_heads(name: str, fuse: str) -> None:
    """MorphKV's own code keeps the window's logits by query head and the keys by KV head, and
    gathers them by different indices from the first eviction on (fault 23)."""
    result = run(tiny(name), small("morphkv", fuse=fuse), turns_of((40, 30)), chunk=40)
    _, captured = replayed(tiny(name), result)
    assert len(result.records) == 31
    assert result.kept == method_oracles.expected_kept(result, captured)
    apart = [layer[0] != layer[1] for kept in result.kept for layer in kept]
    assert sum(apart) > 0.9 * len(apart)


@pytest.mark.parametrize("heads", ["layer_mean", "layer_attention"])
@pytest.mark.parametrize("layer_budgets", ["uniform", "pyramid"])
def test_blocks_shared_by_a_layer_stay_the_same_in_all_heads(
    heads: str, layer_budgets: str
) -> None:
    """Where a layer decides as one its blocks can span its heads, and stay so (fault 24)."""
    name, pages = "llama-g3-kv2", []
    budget = {"kind": "tokens", "tokens": 48}
    config = preset(
        "nexus", heads=heads, block_size=4, window=6, budget=budget, layer_budgets=layer_budgets
    )

    def look(cache: EvictingCache, phase: str) -> None:
        pages.append(cache.kept_blocks())

    result = run(
        tiny(name), config, turns_of((70, 20), (41, 13), (50, 9)), chunk=16, after_pass=look
    )
    assert len(result.records) > 10
    for kept in pages:
        assert torch.equal(kept, kept[:, :1].expand_as(kept))
    for record in result.kept:
        assert all(head == layer[0] for layer in record for head in layer)
    _, captured = replayed(tiny(name), result)
    assert result.kept == method_oracles.expected_kept(result, captured)
    sizes = [len(layer[0]) for layer in result.kept[-1]]
    assert (sizes[0] > sizes[1] > sizes[2]) == (layer_budgets == "pyramid")
    assert sum(sizes) == 3 * 12
    assert bool(torch.isfinite(logits_of(result.cache._model, result.cache, [1, 2, 3])).all())
