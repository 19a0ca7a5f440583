"""What the loop says beyond a tool's output: the project's tests, and when work is held back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripted import xml
from test_loop import FIX, Rig, rig

from agent.dialects.base import Call
from agent.exits import ExitReason
from agent.tools import Observation
from agent.tools.run import failures

__all__ = ["rig"]  # the fixture

BROKEN = FIX.replace("1 - discount / 100", "2 - discount / 100")


@pytest.fixture
def checked(rig: Rig) -> Rig:
    """A run in which the project's tests follow each change."""
    return rig.limits(test_time=60)


def test_passing_tests_are_reported_after_a_change(checked: Rig) -> None:
    checked.run(FIX, xml("submit"))
    assert "The tests of the project pass." in checked.observation(1)
    assert "total() takes the discount as a fraction" in checked.observation(1)


def test_failing_tests_hold_a_submission_back_once(checked: Rig) -> None:
    outcome = checked.run(BROKEN, xml("submit"), xml("submit"))
    assert "Tests of the project fail:" in checked.observation(1)
    assert "AssertionError" in checked.observation(1)
    assert "submit block" not in checked.observation(1)
    assert "only if the tests are wrong" in checked.observation(2)
    assert (outcome.reason, outcome.steps) == (ExitReason.SUBMITTED, 3)
    assert "2 - discount / 100" in outcome.patch.data.decode()


def test_a_change_that_passes_is_not_held_back(checked: Rig) -> None:
    outcome = checked.run(BROKEN, FIX, xml("submit"))
    assert "Tests of the project fail:" in checked.observation(1)
    assert "The tests of the project pass." in checked.observation(2)
    assert (outcome.reason, outcome.steps) == (ExitReason.SUBMITTED, 3)


def test_no_tests_are_run_without_time_for_them(rig: Rig) -> None:
    rig.limits(test_time=0).run(BROKEN, xml("submit"))
    assert "ests of the project" not in rig.observation(1)
    assert rig.outcome.reason is ExitReason.SUBMITTED


def test_tests_that_take_too_long_say_nothing(rig: Rig, tmp_path: Path) -> None:
    rig.limits(test_time=0.5)
    rig.instance = type(rig.instance)(
        rig.instance.instance_id, rig.instance.problem, test_command="sleep 60; false"
    )
    rig.run(FIX, xml("submit"))
    assert "ests of the project" not in rig.observation(1)


def test_the_issue_is_recalled_where_a_call_came_to_nothing(rig: Rig) -> None:
    rig.run(xml("edit", path="none.py", start="1", text="x"), FIX, xml("submit"))
    assert "The issue is: total() takes the discount as a fraction." in rig.observation(1)


def test_the_telling_lines_of_a_test_run() -> None:
    output = (
        "collected 3 items\n\n____ test_a ____\n\n    assert f() == 2\n>   assert f() == 2\n"
        "E       assert 1 == 2\nFAILED tests/test_a.py::test_a - assert 1 == 2\n1 failed in 0.1s\n"
    )
    assert (
        failures(output) == "E       assert 1 == 2\nFAILED tests/test_a.py::test_a - assert 1 == 2"
    )
    assert failures("line\n" * 3 + "go: 2 failures") == "line\ngo: 2 failures".replace(
        "line\n", "line\nline\nline\n"
    )
    assert len(failures("E   " + "x" * 10_000)) < 300


def test_what_was_said_is_remembered_by_another_process(checked: Rig) -> None:
    view = xml("view", path="shop/money.py")
    checked.limits(steps=2).run(BROKEN, view)
    before = checked.loop._advice
    after = type(before)(checked.settings, checked.instance, checked.loop._workspace, [])
    after.restore(json.loads(json.dumps(before.state())))
    assert after.state() == before.state()
    patch = checked.outcome.patch.data
    said = [advice.held_back(patch) for advice in (before, after)]
    assert said[0] == said[1] is not None
    assert after.state() == before.state() != {}
    call = Call("view", {"path": "shop/money.py"})
    seen = Observation(checked.observation(2).rsplit("\n", 1)[0])  # less "0 answers are left"
    again = after.completed(call, seen, patch, failed=False, steps_left=9, tokens_left=9_999)
    assert "before, with the same result" in again.text
