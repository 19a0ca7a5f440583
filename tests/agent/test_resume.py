"""A run that is killed and gone on with ends as the one that nothing disturbed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from resume_in_process import STEP, STEPS

from agent.trajectory import PATCH, TRAJECTORY, read_trajectory

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# What no two runs have in common: times, and the peak of a pool that was made anew.
UNEQUAL = {"time", "seconds", "tool_seconds", "peak_bytes"}


class Server:
    """The process that makes the attempts; see resume_in_process.py."""

    def __init__(self, process: subprocess.Popen[str], errors: Path) -> None:
        self.process, self.errors = process, errors

    def line(self) -> str:
        assert self.process.stdout is not None
        found = self.process.stdout.readline().strip()
        if not found:
            pytest.fail(self.errors.read_text())
        return found

    def begin(self, what: str, folder: Path) -> int:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what} {folder}\n")
        self.process.stdin.flush()
        return int(self.line().removeprefix("pid "))

    def end(self) -> int:
        return int(self.line().removeprefix("exit "))

    def make(self, folder: Path) -> float:
        """Make a run that nothing disturbs. Returns its seconds."""
        began = time.monotonic()
        self.begin("start", folder)
        assert self.end() == 0, self.errors.read_text()
        return time.monotonic() - began


@contextmanager
def served(model: str, kind: str, tmp_path: Path) -> Iterator[Server]:
    repo = tmp_path / "counter"
    (repo / "folder").mkdir(parents=True)
    (repo / "folder" / "x").write_text("x\n")
    (repo / "step.sh").write_text(STEP)
    (repo / ".gitignore").write_text("*.ignored\n")
    errors = tmp_path / "errors"
    with errors.open("w") as sink:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "resume_in_process.py"), model, kind, str(repo)],
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sink,
            text=True,
        )
    server = Server(process, errors)
    try:
        assert server.line() == "ready"
        yield server
    finally:
        process.kill()
        process.communicate()


def facts(folder: Path) -> tuple[list[Any], bytes, list[int]]:
    """All that two equal runs have in common: trajectory, patch, ids."""

    def equal(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: equal(v) for k, v in value.items() if not _unequal(k)}
        return value

    lines = [line for line in read_trajectory(folder) if line["kind"] != "resume"]
    ids = [token for line in lines for token in line.get("sampled", ())]
    return [equal(line) for line in lines], (folder / PATCH).read_bytes(), ids


def _unequal(key: str) -> bool:
    return key in UNEQUAL or key.endswith("_seconds")


def steps_made(folder: Path) -> int:
    if not (folder / TRAJECTORY).exists():
        return 0
    return sum(line["kind"] == "step" for line in read_trajectory(folder))


def kill_often(server: Server, folder: Path, times: int, turn: float, seed: int) -> set[int]:
    """Kill the run at random moments all along its way and go on each time.

    Each kill comes within `turn` seconds after a step, the first before there is any. Returns the
    steps that were gone on from.
    """
    draws = random.Random(seed)
    for number in range(times):
        child = server.begin("resume" if number else "start", folder)
        while steps_made(folder) < number * STEPS // (times + 1):
            time.sleep(0.01)
        time.sleep(draws.uniform(0.0, turn))
        os.kill(child, signal.SIGKILL)
        assert server.end() == -signal.SIGKILL, server.errors.read_text()
    server.begin("resume", folder)
    assert server.end() == 0, server.errors.read_text()
    files = [folder / TRAJECTORY, *folder.glob("trajectory.cut-*.jsonl")]
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    return {line["step"] for line in lines if line["kind"] == "resume"}


def test_killed_four_times(tiny_model: Path, tmp_path: Path) -> None:
    with served(str(tiny_model), "bubblewrap", tmp_path) as server:
        turn = server.make(tmp_path / "undisturbed") / STEPS
        expected = facts(tmp_path / "undisturbed")
        begun = kill_often(server, tmp_path / "killed", 4, turn, seed=1)
        assert len(begun) > 2
        assert facts(tmp_path / "killed") == expected
    steps = [line for line in expected[0] if line["kind"] == "step"]
    assert len(steps) == STEPS
    assert sum(step["stats"]["evictions"] for step in steps) > 10
    # files that were ignored or lay outside the workspace went along: the sums depend on them
    assert len({step["observation"] for step in steps}) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("docker", marks=pytest.mark.docker), "bubblewrap"])
def test_killed_twenty_times_with_a_trained_model(kind: str, tmp_path: Path) -> None:
    with served("smollm2-135m", kind, tmp_path) as server:
        turn = server.make(tmp_path / "undisturbed") / STEPS
        expected = facts(tmp_path / "undisturbed")
        begun = kill_often(server, tmp_path / "killed", 20, turn, seed=2)
        assert len(begun) > 8
        assert facts(tmp_path / "killed") == expected
