"""Ctrl-C, SIGTERM and kill -9 in mid-run: the patch so far, a readable trajectory, no sandbox."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.trajectory import PATCH, read_trajectory

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def sandboxed(marker: str) -> list[int]:
    """Processes whose command line is the sandboxed sleep. Containers run on this kernel too."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[:2] == [b"sleep", marker.encode()]:
                found.append(int(entry.name))
    return found


def wait_for(what: str, seconds: float, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.05)
    pytest.fail(f"no {what} after {seconds:g} s")


@pytest.fixture
def running(sandbox_kind: str, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A run in a process of its own, inside its third step, and its folder."""
    folder = tmp_path / f"run-{os.getpid() % 1000:03}{time.monotonic_ns() % 1000:03}"
    process = subprocess.Popen(
        [sys.executable, str(HERE / "run_in_process.py"), sandbox_kind, str(folder)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )

    def ready() -> bool:
        return bool(sandboxed(marker(str(folder)))) or process.poll() is not None

    try:
        wait_for("sandboxed command", 90, ready)
        if process.poll() is not None:
            pytest.fail(process.communicate()[0])
        yield process, str(folder)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def steps(folder: str) -> list[str]:
    lines = read_trajectory(Path(folder) / "run")
    return [line["call"]["name"] for line in lines if line["kind"] == "step"]


def patch(folder: str) -> str:
    return (Path(folder) / "run" / PATCH).read_text()


def marker(folder: str) -> str:
    return f"3600.{folder[-6:]}"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_with_the_patch_so_far(
    running: tuple[subprocess.Popen[str], str], number: signal.Signals
) -> None:
    process, folder = running
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert output.strip().endswith("interrupted")
    assert process.returncode == 0
    assert steps(folder) == ["edit", "edit"]
    assert "+    return 2" in patch(folder)
    assert "+x = 1" in patch(folder)
    assert list(read_trajectory(Path(folder) / "run"))[-1]["exit"] == "interrupted"
    wait_for("end of the sandbox", 5, lambda: not sandboxed(marker(folder)))


def test_kill_9_leaves_a_readable_trajectory_and_no_sandbox(
    running: tuple[subprocess.Popen[str], str],
) -> None:
    process, folder = running
    process.kill()
    process.wait()
    assert steps(folder) == ["edit", "edit"]
    assert "+    return 2" in patch(folder)
    assert "+x = 1" in patch(folder)
    wait_for("end of the sandbox", 5, lambda: not sandboxed(marker(folder)))
