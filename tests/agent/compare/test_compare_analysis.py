"""Results made up by a small generator, against figures worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_results import MIB, cell, expected, item, plain_item, result, turn

from agent.compare.analysis import Analysis, Row, analyse
from agent.compare.runs import ResultError, parse
from agent.compare.statistics import wilson
from agent.run_options import RunOptions

DENSE, NEXUS, H2O = cell("dense"), cell("nexus"), cell("h2o")


def rows(analysis: Analysis) -> dict[str, Row]:
    return {row.name: row for row in analysis.rows}


def analysed(*results: dict[str, Any], asked: Any = None) -> Analysis:
    return analyse([parse(found) for found in results], asked)


def some(method: Any, outcomes: dict[str, bool | None], **more: Any) -> list[dict[str, Any]]:
    return [result(item(method, name), value, **more) for name, value in outcomes.items()]


def test_outcomes_intervals_and_pairs_of_a_small_grid() -> None:
    """dense: a b c resolved, nexus: a, h2o: b d. Of 4 instances."""
    asked = expected([item(c, name) for name in "abcd" for c in (H2O, DENSE, NEXUS)])
    found = analysed(
        *some(DENSE, {"a": True, "b": True, "c": True, "d": False}),
        *some(NEXUS, {"a": True, "b": False, "c": False, "d": False}),
        *some(H2O, {"a": False, "b": True, "c": False, "d": True}),
        asked=asked,
    )
    assert found.instances == ("a", "b", "c", "d")
    assert [row.name for row in found.rows] == [  # as they were asked for
        "h2o/true_eviction/prefill+decode/b768",
        "dense/true_eviction",
        "nexus/true_eviction/prefill+decode/b768",
    ]
    h2o, dense, nexus = found.rows
    assert [(row.resolved, row.graded, row.errors, row.missing) for row in found.rows] == [
        (2, 4, 0, 0),
        (3, 4, 0, 0),
        (1, 4, 0, 0),
    ]
    assert dense.pass_at_1 is not None
    assert (dense.pass_at_1.value, dense.pass_at_1.kind) == (0.75, "wilson")
    assert (dense.pass_at_1.low, dense.pass_at_1.high) == wilson(0.75, 4)
    assert dense.against == {"dense": None, "nexus": None}
    pair = nexus.against["dense"]
    assert pair is not None
    # b and c are dense's alone: of two coins both fall so with 1/2, either side
    assert (pair.pairs, pair.only_ours, pair.only_theirs, pair.p) == (4, 0, 2, 0.5)
    pair = h2o.against["nexus"]
    assert pair is not None
    assert (pair.only_ours, pair.only_theirs, pair.p) == (2, 1, 1.0)
    assert nexus.against["nexus"] is None
    assert dense.statuses == {"resolved": 3, "unresolved": 1}


def test_costs_are_means_over_runs_and_of_times_over_turns() -> None:
    long = [
        turn(fed=1000, resident=700, peak_tokens=900, prefill_seconds=6.0, evictions=3),
        turn(fed=50, resident=768, peak_tokens=800, cache_bytes=8 * MIB, prefill_seconds=1.0),
        turn(fed=70, resident=740, peak_tokens=790, peak_bytes=9 * MIB, prefill_seconds=2.0),
    ]
    short = [turn(fed=900, resident=600, peak_tokens=700, prefill_seconds=3.0, evictions=0)]
    found = analysed(
        result(item(NEXUS, "a"), turns=long), result(item(NEXUS, "b"), turns=short, exit="stuck")
    )
    row = found.rows[0]
    assert row.turns == 2.0
    assert row.fed == (1120 + 900) / 2
    assert row.sampled == (30 + 10) / 2
    assert row.evictions == (5 + 0) / 2
    assert row.peak_tokens == (900 + 700) / 2
    assert row.peak_bytes == (9 + 6) / 2 * MIB
    assert row.resident_tokens == (768 + 600) / 2
    assert row.resident_bytes == (8 + 5) / 2 * MIB
    assert row.seconds == {"prefill": 12 / 4, "decode": 2.0, "eviction": 0.25, "tool": 4.0}
    assert row.exits == {"stuck": 1, "submitted": 1}
    # from turn 2 to 3: prefill 1 -> 2 s, all else equal
    assert row.growth is not None
    assert (row.growth.per_turn, row.growth.n, row.growth.runs) == (pytest.approx(1.0), 2, 1)
    assert row.evicted_runs == 1
    assert "evicted in 1 of 2 runs only" in row.notes


def test_growth_by_protocol_keeps_dense_apart_and_tools_out() -> None:
    full, dense_full = cell("nexus", "full_context"), cell("dense", "full_context")

    def grown(start: float, step: float) -> list[dict[str, float]]:
        seconds = [90.0, *(start + step * n for n in range(4))]  # turn 1 is not part of it
        return [
            turn(prefill_seconds=s, eviction_seconds=0.1 * n, tool_seconds=n**2.0)
            for n, s in enumerate(seconds)
        ]

    found = analysed(
        result(item(NEXUS, "a"), turns=grown(1, 0)),
        result(item(full, "a"), turns=grown(5, 2)),
        result(item(full, "b"), turns=grown(50, 2)),
        result(item(dense_full, "a"), turns=grown(5, 3)),
    )
    growth = {(line.protocol, line.evicts): line for line in found.growth}
    assert set(growth) == {
        ("true_eviction", True),
        ("full_context", True),
        ("full_context", False),
    }
    for key, prefill, n in (
        (("true_eviction", True), 0.0, 4),
        (("full_context", True), 2.0, 8),
        (("full_context", False), 3.0, 4),
    ):
        line = growth[key]
        assert line.prefill is not None
        assert line.seconds is not None
        assert line.prefill.per_turn == pytest.approx(prefill, abs=1e-9)
        assert line.seconds.per_turn == pytest.approx(prefill + 0.1)
        assert line.seconds.n == n


def test_errors_are_no_failures_of_the_model_and_what_is_missing_is_said() -> None:
    asked = expected([item(NEXUS, name) for name in "abcde"])
    found = analysed(
        result(item(NEXUS, "a"), True),
        result(item(NEXUS, "b"), False),
        result(item(NEXUS, "c"), error="SandboxLost: the engine went away"),
        {**result(item(NEXUS, "d"), False, status="error"), "state": "finished"},
        asked=asked,
    )
    row = found.rows[0]
    assert (row.expected, row.finished, row.errors, row.missing) == (5, 2, 2, 1)
    assert (row.resolved, row.graded) == (1, 2)
    assert row.pass_at_1 is not None
    assert (row.pass_at_1.value, row.pass_at_1.n) == (0.5, 2)
    assert row.turns == 2  # an error has no turns, and must not count as none
    assert row.notes == (
        "incomplete: 1 of 5 runs are missing",
        "2 runs ended in an error of the infrastructure, counted nowhere else",
    )


def test_a_run_without_hidden_tests_costs_but_is_neither_resolved_nor_not() -> None:
    found = analysed(*some(NEXUS, {"a": None, "b": True}))
    row = found.rows[0]
    assert (row.finished, row.graded, row.resolved) == (2, 1, 1)
    assert row.turns == 2
    assert "1 without a verdict: no hidden tests" in row.notes


def test_errors_and_missing_runs_make_no_pairs() -> None:
    found = analysed(
        *some(DENSE, {"a": True, "b": True, "c": True}),
        result(item(NEXUS, "a"), False),
        result(item(NEXUS, "b"), error="x: y"),
    )
    pair = rows(found)["nexus/true_eviction/prefill+decode/b768"].against["dense"]
    assert pair is not None
    assert (pair.pairs, pair.only_theirs) == (1, 1)


def test_a_cell_without_any_result_is_a_row_that_says_so() -> None:
    asked = expected([item(c, "a") for c in (DENSE, cell("snapkv", scope="prefill", density=0.2))])
    found = analysed(*some(DENSE, {"a": True}), asked=asked)
    row = found.rows[1]
    assert row.name == "snapkv/true_eviction/prefill/d0.2"
    assert (row.cell.scope, row.cell.density, row.cell.budget) == ("prefill", 0.2, None)
    assert row.notes == ("incomplete: 1 of 1 runs are missing",)
    assert (row.pass_at_1, row.turns, row.growth, row.against["dense"]) == (None, None, None, None)


def test_a_method_that_never_evicted_says_so() -> None:
    idle = [turn(evictions=0, evicted_tokens=0)]
    found = analysed(
        *some(NEXUS, {"a": True, "b": True}, turns=idle), *some(DENSE, {"a": True}, turns=idle)
    )
    row = rows(found)["nexus/true_eviction/prefill+decode/b768"]
    assert "never evicted: says nothing of the method" in row.notes
    assert not any("evicted" in note for note in rows(found)["dense/true_eviction"].notes)


def test_references_share_protocol_scope_and_size() -> None:
    def only(value: bool, **cell_: Any) -> dict[str, Any]:
        return result(item(cell(**cell_), "a"), value)

    found = rows(
        analysed(
            only(True, method="dense"),
            only(False, method="dense", protocol="full_context"),
            only(False, method="nexus"),
            only(True, method="nexus", scope="prefill", budget=768),
            only(True, method="nexus", scope="prefill+decode", density=0.2),
            only(True, method="h2o"),
            only(True, method="h2o", protocol="full_context"),
        )
    )
    h2o = found["h2o/true_eviction/prefill+decode/b768"]
    assert h2o.against["dense"] is not None
    assert h2o.against["dense"].only_ours == 0
    assert h2o.against["nexus"] is not None
    assert h2o.against["nexus"].only_ours == 1
    full = found["h2o/full_context/prefill+decode/b768"]
    assert full.against["nexus"] is None
    assert full.against["dense"] is not None
    assert full.against["dense"].only_ours == 1
    # dense has no scope or size, so no single nexus row is its counterpart
    assert found["dense/true_eviction"].against["nexus"] is None


def test_seeds_are_pooled_by_instance_and_make_pairs_that_depend() -> None:
    dense = [cell("dense", seed=seed) for seed in range(3)]
    nexus = [cell("nexus", seed=seed) for seed in range(3)]
    outcomes = {"a": (True, True, True), "b": (True, False, False), "c": (False, False, False)}
    found = analysed(
        *[
            result(item(c, name), value)
            for name, values in outcomes.items()
            for c, value in zip(nexus, values, strict=True)
        ],
        *[result(item(c, name), True) for name in outcomes for c in dense],
    )
    row = rows(found)["nexus/true_eviction/prefill+decode/b768"]
    assert row.seeds == (0, 1, 2)
    assert (row.resolved, row.graded) == (4, 9)
    assert row.pass_at_1 is not None
    assert row.pass_at_1.value == pytest.approx((1 + 1 / 3 + 0) / 3)
    assert (row.pass_at_1.n, row.pass_at_1.kind) == (3, "bootstrap")
    pair = row.against["dense"]
    assert pair is not None
    assert (pair.pairs, pair.only_theirs, pair.repeated) == (9, 5, True)
    assert pair.p == 2 / 32
    assert any("p is too small" in note for note in found.notes)


def test_results_of_other_options_are_left_out_where_it_is_known_what_was_asked() -> None:
    asked = expected([item(NEXUS, "a", temperature=0.6)])
    old = result(item(NEXUS, "a", temperature=0.7), True)
    found = analysed(result(item(NEXUS, "a", temperature=0.6), False), old, asked=asked)
    assert found.rows[0].resolved == 0
    assert found.rows[0].graded == 1
    assert any(
        note.startswith("1 results in the folder are of other options") for note in found.notes
    )


def test_where_it_is_not_known_other_options_are_rows_of_their_own() -> None:
    found = analysed(
        result(item(NEXUS, "a", temperature=0.6), False),
        result(item(NEXUS, "a", temperature=0.7), True),
        result(item(DENSE, "a", temperature=0.7), False),
    )
    name = "nexus/true_eviction/prefill+decode/b768"
    found_rows = rows(found)
    assert set(found_rows) == {"dense/true_eviction", f"{name} #1", f"{name} #2"}
    assert found_rows[f"{name} #1"].against["dense"] is None  # dense ran at 0.7 alone
    pair = found_rows[f"{name} #2"].against["dense"]
    assert pair is not None
    assert pair.only_ours == 1
    assert any("different options" in note for note in found.notes)


def test_a_folder_of_agent_eval_is_read_by_its_options() -> None:
    base = RunOptions(instance="any", seed=4)
    dense = base.model_copy(update={"method": "dense", "budget": 99})
    found = analysed(
        result(plain_item(base, "a"), True),
        result(plain_item(base, "a", attempt=2), False),
        result(plain_item(dense, "a"), False),
        result(plain_item(dense, "a", attempt=2), False),
    )
    nexus = rows(found)["nexus/true_eviction"]
    assert nexus.seeds == (4, 5)
    assert (nexus.expected, nexus.resolved, nexus.graded) == (2, 1, 2)
    pair = nexus.against["dense"]
    assert pair is not None
    assert (pair.pairs, pair.only_ours) == (2, 1)
    assert rows(found)["dense/true_eviction"].cell.budget is None


def test_of_runs_that_were_made_again_the_newest_counts() -> None:
    first = item(NEXUS, "a")
    again = first.model_copy(update={"config": "edited"})
    found = analysed(
        result(again, True, ended="2026-11-30T02:00:00Z"),
        result(first, False, ended="2026-11-30T01:00:00Z"),
    )
    assert (found.rows[0].resolved, found.rows[0].graded) == (1, 1)
    assert any("the newest counts" in note for note in found.notes)


def test_what_makes_cells_differ_beside_the_cache_is_said() -> None:
    cut = [turn(fed=60), turn()]
    found = analysed(
        *some(DENSE, {"a": True, "b": True}),
        result(item(NEXUS, "a"), True, turns=cut),
        result(item(NEXUS, "b"), True, versions={"torch": "2.12.0"}),
    )
    assert any("not fed as many tokens in every cell (a)" in note for note in found.notes)
    assert any("different versions" in note for note in found.notes)
    alike = analysed(*some(DENSE, {"a": True}), *some(NEXUS, {"a": True}))
    assert not any("versions" in note or "not fed" in note for note in alike.notes)


def test_a_thing_that_is_no_result_is_refused_by_name() -> None:
    with pytest.raises(ResultError, match="result 3 in DIR is no result of a batch"):
        parse({"key": "k", "item": {"options": {}}}, "result 3 in DIR")


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["dense", "nexus", "h2o"]),
            st.sampled_from("abc"),
            st.integers(0, 2),
            st.sampled_from(["resolved", "unresolved", "ungraded", "error"]),
        ),
        unique_by=lambda run: run[:3],
    )
)
def test_every_run_is_counted_once(made: list[tuple[str, str, int, str]]) -> None:
    results = [
        result(
            item(cell(method, seed=seed), name),
            {"resolved": True, "unresolved": False}.get(ending),
            error="E: x" if ending == "error" else None,
        )
        for method, name, seed, ending in made
    ]
    asked = expected(
        [
            item(cell(method, seed=seed), name)
            for method in ("dense", "nexus", "h2o")
            for name in "abc"
            for seed in range(3)
        ]
    )
    found = analysed(*results, asked=asked)
    for row in found.rows:
        own = [ending for method, _, _, ending in made if method == row.cell.method]
        assert row.resolved == own.count("resolved")
        assert row.graded == own.count("resolved") + own.count("unresolved")
        assert row.errors == own.count("error")
        assert row.finished == len(own) - row.errors
        assert row.missing == 9 - len(own)
        if row.pass_at_1 is not None:
            assert row.pass_at_1.low <= row.pass_at_1.value <= row.pass_at_1.high
