"""Running the parts: each under a time limit, in a process that may die or hang."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.h200.correctness import correct
from benchmarks.h200.machine import machine
from benchmarks.h200.report import report
from benchmarks.h200.speeds import batched, compiled, profiles, read, table4
from benchmarks.h200.work import OverTime, Work, add, records_of

_KILL_AFTER = 20.0  # seconds beyond its limit that a part has to stop by itself


@dataclass(frozen=True)
class Part:
    """A part and its time limit in seconds."""

    run: Callable[[Work], None]
    limit: float


PARTS = {
    "machine": Part(machine, 60),
    "correct": Part(correct, 90),
    "table4": Part(table4, 250),
    "batched": Part(batched, 110),
    "read": Part(read, 60),
    "profiles": Part(profiles, 60),
    "compiled": Part(compiled, 120),
}


def child(work: Work, names: list[str], deadline: float) -> None:
    """Run parts one after the other in this process."""

    def over(*_: Any) -> None:
        raise OverTime

    signal.signal(signal.SIGALRM, over)
    for name in names:
        left = deadline - time.time()
        limit = min(PARTS[name].limit, left)
        work.part = name
        if limit < 1:
            work.tell("missing", what=name, why="no time was left")
            work.tell("end", seconds=0.0)
            continue
        work.tell("begin", limit=limit)
        began = time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, limit)
        try:
            with work.noted(name):
                PARTS[name].run(work)
        except OverTime:
            work.tell("error", what=name, why=f"stopped after {limit:.0f} s: its time was up")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        work.tell("end", seconds=time.perf_counter() - began)
        if work.device.type == "cuda":
            # After an error of the device nothing else in this process works: the parts that are
            # left then get a new one.
            torch.cuda.synchronize(work.device)
            torch.cuda.empty_cache()


def supervise(out: Path, names: list[str], dry: bool, device: str, deadline: float) -> None:
    """Run parts in processes: a new one for what is left whenever one died or hung."""
    left = list(names)
    while left and time.time() < deadline:
        command = [sys.executable, "-m", "benchmarks.h200", "--out", str(out), "--device", device]
        command += ["--child", ",".join(left), "--deadline", str(deadline)]
        process = subprocess.Popen(command + (["--dry-run"] if dry else []))
        why = _watch(process, out, dry, deadline)
        records = records_of(out)
        begun = {r["part"]: r["at"] for r in records if r["kind"] == "begin"}
        ended = [r["part"] for r in records if r["kind"] == "end"]
        broken = [name for name in left if name in begun and name not in ended]
        for name in broken:
            add(out, {"part": name, "kind": "error", "what": name, "why": why})
            add(out, {"part": name, "kind": "end", "seconds": time.time() - begun[name]})
        if not any(name in begun or name in ended for name in left):
            add(out, {"part": left[0], "kind": "error", "what": left[0], "why": f"{why} at once"})
            left = left[1:]
        left = [name for name in left if name not in begun and name not in ended]
        report(out, dry)


def _watch(process: subprocess.Popen[bytes], out: Path, dry: bool, deadline: float) -> str:
    """Wait for a process, and kill it when a part overstays; why it ended, in words."""
    while True:
        try:
            code = process.wait(timeout=1)
            return f"its process ended with {code}"
        except subprocess.TimeoutExpired:
            pass
        report(out, dry)
        begun = [r for r in records_of(out) if r["kind"] in ("begin", "end")]
        late = time.time() > deadline + _KILL_AFTER
        if begun and begun[-1]["kind"] == "begin":
            late |= time.time() > begun[-1]["at"] + begun[-1]["limit"] + _KILL_AFTER
        if late:
            process.kill()
            process.wait()
            return "it hung and was killed"
