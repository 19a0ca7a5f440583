"""A loop that takes up the saved state of another: its limits, its counts, what its tools know."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

from scripted import xml
from test_advice import BROKEN
from test_loop import FIX, SOURCE, Rig, rig
from test_tool_sets import use

from agent.exits import ExitReason

__all__ = ["rig"]  # the fixture

VIEW = xml("view", path="shop/money.py")


class Kept:
    """The newest state, as a file of JSON gives it back."""

    text = "{}"

    def keep(self, turn: int, state: Callable[[], dict[str, Any]], *, changed: bool) -> None:
        self.text = json.dumps(state())

    def state(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.text)
        return data


def stop() -> NoReturn:
    raise KeyboardInterrupt


def stopped(rig: Rig, *script: str) -> dict[str, Any]:
    """The state after a run of `script` was interrupted; the rig is ready for another."""
    rig.keeper = kept = Kept()
    assert rig.run(*script, stop).reason is ExitReason.INTERRUPTED
    rig.folder = rig.folder.with_name("again")
    return kept.state()


def test_what_is_taken_up_is_what_was_saved(rig: Rig) -> None:
    now = [0.0]
    rig.clock = lambda: now[0]

    def late() -> str:
        now[0] = 30.0
        return "no call"

    before = stopped(rig.limits(test_time=30), VIEW, BROKEN, xml("submit"), late)
    assert before["seconds"] == 30.0
    assert before["advice"]["doubted"]  # it was told that tests fail, and not to be told again
    found: list[dict[str, Any]] = []

    def look() -> str:
        found.append(json.loads(json.dumps(rig.loop.state())))
        return xml("submit")

    now[0] = 9_000.0
    outcome = rig.run(look, state=before)
    assert found == [before]
    assert (outcome.reason, outcome.steps) == (ExitReason.SUBMITTED, 5)
    assert "+    return sum(prices) * (2 - discount / 100)" in rig.patch()


def test_what_was_used_of_the_limits_stays_used(rig: Rig) -> None:
    now = [0.0]
    rig.clock = lambda: now[0]

    def late() -> str:
        now[0] = 90.0
        return VIEW

    state = stopped(rig.limits(wall_time=100), late)
    now[0] = 1_000.0

    def later() -> str:
        now[0] = 1_011.0
        return FIX

    outcome = rig.run(later, VIEW, state=state)
    assert (outcome.reason, outcome.steps) == (ExitReason.WALL_TIME, 2)


def test_malformed_replies_in_a_row_are_counted_on(rig: Rig) -> None:
    state = stopped(rig.limits(format_errors=3), "no call", "no call")
    assert rig.run("no call", state=state).reason is ExitReason.FORMAT_ERRORS


def test_an_edit_before_can_be_undone(rig: Rig) -> None:
    edit = {"path": "shop/money.py", "old_str": "- discount", "new_str": "+ discount"}
    state = stopped(use(rig, "r2e"), xml("file_editor", command="str_replace", **edit))
    rig.run(xml("file_editor", command="undo_edit", path="shop/money.py"), stop, state=state)
    assert rig.sandbox.read_file("shop/money.py").decode() == SOURCE
    assert rig.patch() == ""


def test_other_files_than_those_saved_end_it(rig: Rig) -> None:
    state = stopped(rig, FIX)
    rig.sandbox.write_file("shop/money.py", SOURCE.encode())
    outcome = rig.run(VIEW, state=state)
    assert outcome.reason is ExitReason.ERROR
    assert "StateMismatch" in outcome.detail
    assert outcome.steps == 1
