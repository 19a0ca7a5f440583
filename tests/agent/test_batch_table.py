"""What is shown of a batch, and the numbers at its end."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from agent.batch.item import Item
from agent.batch.summary import eviction_words, rows, summary
from agent.batch.table import Board, duration, show_summary


def item(name: str, cell: str = "", attempt: int = 1) -> Item:
    return Item(
        source="s", instance_id=name, digest="d", cell=cell, options={"seed": 5}, attempt=attempt
    )


def result(
    status: str = "resolved", *, total: float = 100.0, evictions: int = 2, **fields: Any
) -> dict[str, Any]:
    return {
        "state": "finished",
        "verdict": {"resolved": status == "resolved", "status": status},
        "exit": "submitted",
        "error": None,
        "totals": {"steps": 4, "tokens": 1000, "evictions": evictions, "peak_bytes": 7},
        "seconds": {"run": 60.0, "total": total},
        **fields,
    }


def failed(error: str) -> dict[str, Any]:
    return result() | {
        "state": "error", "verdict": None, "error": error, "exit": None,
        "totals": {}, "seconds": {},
    }  # fmt: skip


def screen(*, terminal: bool = False) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=120, color_system=None), out


# Numbers


def test_an_error_resolves_nothing_and_spoils_no_mean() -> None:
    items = [item(name) for name in "abcdef"]
    results = {
        items[0].key: result(),
        items[1].key: result("unresolved", evictions=0)
        | {"totals": {"steps": 8, "tokens": 3000, "evictions": 0, "peak_bytes": 9}},
        items[2].key: failed("SandboxLost: gone")
        | {"totals": {"steps": 99, "evictions": 5, "peak_bytes": 99}, "seconds": {"run": 9e9}},
        items[3].key: failed("SandboxLost: again"),
        items[4].key: failed("Grading: a limit"),
    }
    cell = summary(items, results)[""]
    assert (cell["runs"], cell["finished"], cell["open"], cell["resolved"]) == (6, 2, 1, 1)
    assert cell["errors"] == {"Grading": 1, "SandboxLost": 2}
    assert cell["verdicts"] == {"resolved": 1, "unresolved": 1}
    assert cell["mean"] == {
        "steps": 6.0, "tokens": 2000.0, "fed": None, "sampled": None, "minutes": 1.0,
    }  # fmt: skip
    assert (cell["evicted"], cell["evictions"], cell["peak_bytes"]) == (1, 2, 9)
    assert eviction_words(cell) == "2 evictions, in 1 of 2 runs"


def test_a_method_that_never_evicted_says_so() -> None:
    one = item("a")
    never = summary([one], {one.key: result(evictions=0)})[""]
    assert eviction_words(never).startswith("0 evictions: nothing was ever evicted")
    assert eviction_words(summary([one], {})[""]) == "no run is finished"
    dense = one.model_copy(update={"options": {"method": "dense"}})
    cell = summary([dense], {dense.key: result(evictions=0)})[""]
    assert eviction_words(cell) == "0 evictions: the method keeps everything"


def test_a_resolved_verdict_of_a_run_in_error_does_not_count() -> None:
    one = item("a")
    odd = failed("WorkerDied: x") | {"verdict": {"resolved": True, "status": "resolved"}}
    assert summary([one], {one.key: odd})[""]["resolved"] == 0


def test_cells_and_attempts_are_told_apart() -> None:
    items = [item("a", "x"), item("b", "x"), item("a", "x", 2), item("b", "x", 2), item("a", "y")]
    results = {one.key: result("unresolved") for one in items}
    results[items[2].key] = result()
    cells = summary(items, results)
    assert list(cells) == ["x", "y"]
    assert (cells["x"]["resolved"], cells["x"]["instances_resolved"]) == (1, 1)
    assert (cells["x"]["instances"], cells["x"]["attempts"]) == (2, 2)
    table = rows(items, results, {one.key: f"place of {one.key}" for one in items})
    assert [(row["instance_id"], row["attempt"], row["seed"]) for row in table[:3]] == [
        ("a", 1, 5), ("b", 1, 5), ("a", 2, 6),
    ]  # fmt: skip
    assert table[2]["resolved"]
    assert table[2]["folder"] == f"place of {items[2].key}"
    assert rows([item("z")], {}, {item("z").key: ""})[0]["state"] == "open"


def test_the_summary_as_it_is_shown() -> None:
    items = [item("a"), item("b"), item("c"), item("a", attempt=2)]
    results = {items[0].key: result(), items[1].key: failed("ImageMissing: x")}
    console, out = screen()
    show_summary(console, summary(items, results))
    said = " ".join(out.getvalue().split())
    assert "resolved errors turns tokens minutes 1 of 4 1 4.0 1,000 1.00" in said
    assert "2 evictions, in 1 of 1 runs" in said
    assert "pass@2: 1 of 3 instances resolved by any of 2 attempts" in said
    assert "1 × ImageMissing" in said
    assert "2 not run" in said


# While it goes on


def test_lines_say_how_each_run_ended() -> None:
    items = [item("a"), item("b"), item("c"), item("d")]
    console, out = screen()
    with Board(console, items, {items[0].key: result()}, beside=1) as board:
        for one, end in (
            (items[1], result("empty_patch")),
            (items[2], failed("SandboxLost: gone\x1b[2J\nmore")),
        ):
            board.event(one, {"event": "start", "try": 1})
            board.event(one, {"event": "tell", "step": 1, "resident": 5})
            if one is items[2]:
                board.event(one, {"event": "retry", "error": "WorkerDied: x"})
                board.event(one, {"event": "start", "try": 2})
            board.event(one, {"event": "end", "result": end})
    assert out.getvalue().splitlines() == [
        "2/4 b  empty patch  4 steps, 2 evictions, 1 min 40 s",
        "c: WorkerDied: x; to be tried again",
        "3/4 c  ERROR SandboxLost: gone[2J",
    ]


def test_quiet_is_quiet() -> None:
    console, out = screen(terminal=True)
    with Board(console, [item("a")], {}, beside=1, quiet=True) as board:
        board.event(item("a"), {"event": "start", "try": 1})
        board.event(item("a"), {"event": "end", "result": result()})
    assert out.getvalue() == ""


def test_the_table_shows_cells_and_what_is_running(monkeypatch: pytest.MonkeyPatch) -> None:
    items = [item("a", "x"), item("b", "x"), item("a", "y")]
    console, out = screen(terminal=True)
    with Board(console, items, {items[0].key: result()}, beside=1) as board:
        board.event(items[1], {"event": "start", "try": 2})
        board.event(
            items[1],
            {"event": "tell", "phase": "work", "step": 3, "resident": 1500, "budget": 2000},
        )
        console.print(board._table())
    said = " ".join(out.getvalue().split())
    assert "cell runs over resolved errors x 1 of 2 1 0 y 0 of 1 0 0" in said
    assert "b x 0 s work · step 3 · cache 1,500/2,000 try 2" in said
    assert "about 3 min 20 s to go" in said


def test_what_is_left_is_reckoned_from_runs_that_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    items = [item(name, cell) for cell in ("fast", "slow", "new") for name in "abc"]
    console, _ = screen()
    board = Board(console, items, {}, beside=2)
    monkeypatch.setattr(board, "_clock", lambda: now[0])
    assert board.left() is None
    board.event(items[0], {"event": "end", "result": result(total=10)})
    board.event(items[3], {"event": "end", "result": result(total=110)})
    # 2 of 10 s, 2 of 110 s, 3 of the mean, by two workers
    assert board.left() == pytest.approx((2 * 10 + 2 * 110 + 3 * 60) / 2)
    board.event(items[1], {"event": "start", "try": 1})
    board.event(items[4], {"event": "start", "try": 1})
    now[0] += 30
    # The first takes longer than others did: it may end at any moment.
    assert board.left() == pytest.approx((2 * 10 - 10 + 2 * 110 - 30 + 3 * 60) / 2)
    board.event(items[1], {"event": "end", "result": failed("x")})
    assert board.left() == pytest.approx((10 + 2 * 110 - 30 + 3 * 60) / 2)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (3599, "59 min 59 s"),
        (7260, "2 h 01 min"),
    ],
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said
