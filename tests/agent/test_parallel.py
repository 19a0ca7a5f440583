"""`agent run --attempts K --parallel`: attempts side by side are those made in turn."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from commands import agent, only_run, report, run_repo
from test_cli import SMALL, said

from agent import run_attempts
from agent.interrupts import Interrupted, interruptible
from agent.parallel import LineWatcher, side_by_side
from agent.trajectory import read_trajectory
from environments import SandboxError


def test_attempts_at_once_are_those_in_turn(tiny_model: Path, repo: Path, tmp_path: Path) -> None:
    options = [*SMALL, "--attempts", "3", "--seed", "5", "--set", "limits.steps=4"]
    assert run_repo(tiny_model, repo, tmp_path / "turn", *options)[0] == 0
    status, text = run_repo(tiny_model, repo, tmp_path / "once", *options, "--parallel")
    assert status == 0
    turn, once = only_run(tmp_path / "turn"), only_run(tmp_path / "once")
    for number in (1, 2, 3):
        steps = said(once / f"attempt-{number}")
        assert steps == said(turn / f"attempt-{number}")
        assert f"attempt {number}: step 1: " in text
    data, other = report(once), report(turn)
    assert [entry["seed"] for entry in data["attempts"]] == [5, 6, 7]
    assert data["options"]["parallel"]
    assert data["shared_prompt"] == other["shared_prompt"]
    # The first prompt was read once; where one token was written, others were beside it.
    fed = [list(read_trajectory(once / f"attempt-{n}"))[1]["stats"]["fed"] for n in (1, 2, 3)]
    assert sorted(fed) == [0, 0, data["shared_prompt"]["tokens"]]
    assert data["serving"]["tokens"] > 1.5 * data["serving"]["steps"]


def test_ctrl_c_ends_all_with_their_patches(
    tiny_model: Path, repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[object] = []

    def step(self: LineWatcher, step: object) -> None:
        steps.append(step)
        if len(steps) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(LineWatcher, "step", step)
    options = [*SMALL, "--attempts", "2", "--set", "limits.steps=500", "--parallel"]
    status, text = run_repo(tiny_model, repo, tmp_path / "out", *options)
    assert status == 130
    assert "agent run --resume" in text
    folder = only_run(tmp_path / "out")
    data = report(folder)
    assert data["state"] == "interrupted"
    assert [entry["exit"] for entry in data["attempts"]] == ["interrupted", "interrupted"]
    for number in (1, 2):
        assert (folder / f"attempt-{number}" / "patch.diff").exists()
        assert list(read_trajectory(folder / f"attempt-{number}"))[-1]["detail"] == "SIGINT"


def test_an_attempt_that_cannot_begin_does_not_end_the_others(
    tiny_model: Path, repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = run_attempts.make_attempt

    def broken(*arguments: object, **named: object) -> object:
        if named["seed"] == 1:
            raise SandboxError("no second sandbox today")
        return make(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(run_attempts, "make_attempt", broken)
    options = [*SMALL, "--attempts", "3", "--set", "limits.steps=3", "--parallel"]
    status, text = run_repo(tiny_model, repo, tmp_path / "out", *options)
    assert status not in (0, 130)
    assert "no second sandbox today" in text
    folder = only_run(tmp_path / "out")
    data = report(folder)
    assert data["state"] == "failed"
    assert [entry["exit"] for entry in data["attempts"]] == ["step_limit", "step_limit"]
    for number in (1, 3):
        assert len(said(folder / f"attempt-{number}")) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--parallel"], "--attempts K"),
        (["--parallel", "--attempts", "2", "--until-resolved"], "not with --parallel"),
    ],
)
def test_options_that_do_not_go_with_it(options: list[str], message: str) -> None:
    status, text = agent("run", *options)
    assert status == 2
    assert message in " ".join(text.split())


def test_side_by_side_gives_what_each_returned_or_raised_in_order() -> None:
    together = threading.Barrier(3, timeout=20)

    def fail() -> int:
        together.wait()
        raise KeyError("two")

    found = side_by_side([lambda: together.wait() * 0 + 1, fail, lambda: together.wait() * 0 + 3],
                         stop=pytest.fail)  # fmt: skip
    assert [found[0], found[2]] == [1, 3]
    assert isinstance(found[1], KeyError)
    assert side_by_side([], stop=pytest.fail) == []


def test_an_interrupt_stops_all_and_waits_for_them_and_a_second_one_does_not_wait() -> None:
    told, may_end = threading.Event(), threading.Event()
    reasons: list[str] = []

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def work() -> str:
        interrupt()
        assert told.wait(20)
        return "ended in order"

    def stop(why: str) -> None:
        reasons.append(why)
        told.set()

    with interruptible():
        assert side_by_side([work], stop=stop) == ["ended in order"]
    assert reasons == ["SIGTERM"]

    def stuck() -> None:
        interrupt()
        assert may_end.wait(20)

    with interruptible(), pytest.raises(Interrupted):
        side_by_side([stuck], stop=lambda _: interrupt())
    may_end.set()
