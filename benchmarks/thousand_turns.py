"""A run of a thousand turns: whether memory stays flat, and what a turn costs at its end.

The whole loop with a real sandbox: cache, token log, trajectory and saved states. The model is the
first layers of a small one, so that a turn takes a fraction of a second; what it says makes no
sense and is not read: the call is always the same command, with another output each time.

python -m benchmarks.thousand_turns [--turns 1000] [--method nexus] [--save]
"""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import torch
from rich.console import Console

from agent import attempt
from agent.chat import Chat
from agent.dialects.base import Call, ParsedTurn
from agent.keeper import KeepOptions
from agent.loop import Silence, Step
from agent.models import load
from agent.run_options import RunOptions
from benchmarks import reporting
from tasks.repo import RepoTask

_COMMAND = "n=$(($(cat n 2>/dev/null || echo 0) + 1)); echo $n > n; seq $n 3 $((n + 120))"


class _OneCommand:
    """A dialect that takes every reply for the same call."""

    name, format_help = "one_command", ""

    def stop(self, text: str) -> bool:
        return False

    def parse(self, text: str) -> ParsedTurn:
        return ParsedTurn(text, call=Call("run", {"command": _COMMAND}))

    def render(self, call: Call) -> str:
        return ""


class _Meter(Silence):
    """Notes memory and time after each step."""

    def __init__(self, console: Console, turns: int) -> None:
        self.rows: list[tuple[int, int, int, int, float]] = []
        self._console, self._turns = console, turns
        self._last = time.perf_counter()

    def step(self, step: Step) -> None:
        now = time.perf_counter()
        stats = step.reply.stats
        if step.number % 25 == 0:
            gc.collect()  # what waits to be collected is not growth; at every step it would cost
        row = (stats.seen, stats.resident, stats.cache_bytes, _resident_bytes(), now - self._last)
        self.rows.append(row)
        self._last = time.perf_counter()
        if step.number % 50 == 0:
            self._console.print(f"{step.number} of {self._turns} turns, {stats.seen:,} tokens")


def _resident_bytes() -> int:
    """Memory of this process, in bytes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def measure(
    model: str, layers: int, method: str, budget: int, turns: int, console: Console
) -> _Meter:
    """One run. Raises RuntimeError if it ended early."""
    overrides = [
        "system=You count.", "user={{ problem }}", "code=", "context.code_chars=0",
        f"limits.steps={turns}", "limits.new_tokens=16", "limits.total_tokens=100000000",
        "limits.wall_time=1000000",
    ]  # fmt: skip
    options = RunOptions(
        repo=".", issue="Count.", model=model, dtype="float32", tools="compact", method=method,
        budget=None if method == "dense" else budget, temperature=0.0, overrides=tuple(overrides),
    )  # fmt: skip
    loaded = load(model, dtype="float32", device="cpu")
    loaded.model.config.max_position_embeddings = 100_000_000  # rotary positions have no end
    loaded.model.config.num_hidden_layers = layers
    loaded.model.model.layers = loaded.model.model.layers[:layers]
    meter = _Meter(console, turns)
    with (
        patch.object(attempt, "make_dialect", lambda *_, **__: _OneCommand()),
        tempfile.TemporaryDirectory() as folder,
        RepoTask(_repo(Path(folder)), "Count.") as task,
    ):
        done = attempt.make_attempt(
            task,
            loaded,
            Chat(loaded.tokenizer, loaded.name),
            attempt.cache_config(options, 0),
            options,
            Path(folder) / "run",
            seed=0,
            sandbox="bubblewrap",
            watcher=meter,
            keep=KeepOptions(turns=5, seconds=60),
        )
    if done.outcome.steps != turns:
        raise RuntimeError(f"it ended after {done.outcome.steps} turns: {done.outcome.detail}")
    return meter


def _repo(folder: Path) -> Path:
    repo = folder / "repo"
    repo.mkdir()
    (repo / "README").write_text("Counts.\n", encoding="utf-8")
    return repo


def table(meter: _Meter) -> str:
    """A row for every tenth of the run."""
    header = ["turn", "tokens seen", "resident", "cache MiB", "process MiB", "ms a turn (median)"]
    rows = []
    part = max(1, len(meter.rows) // 10)
    for end in range(part, len(meter.rows) + 1, part):
        seen, resident, cache, process, _ = meter.rows[end - 1]
        spent = statistics.median(row[4] for row in meter.rows[end - part : end])
        sizes = [f"{cache / 2**20:.2f}", f"{process / 2**20:.0f}"]
        rows.append([str(end), f"{seen:,}", f"{resident:,}", *sizes, f"{spent * 1000:.0f}"])
    return reporting.markdown(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=1000)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--layers", type=int, default=4, help="of the model, the first ones")
    parser.add_argument("--method", default="nexus")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    given = parser.parse_args()
    torch.set_num_threads(1)
    console, origin = Console(stderr=True), reporting.Origin()
    meter = measure(given.model, given.layers, given.method, given.budget, given.turns, console)
    text = "\n".join(
        [
            f"{given.turns} turns, first {given.layers} layers of {given.model}, "
            f"{given.method}, budget {given.budget}\n",
            *origin.lines(),
            "The cache has room for the budget, a block, and the longest chunk that was read so "
            "far (at most 256 tokens).\n",
            table(meter),
        ]
    )
    print(text)
    if given.save:
        reporting.save(reporting.RESULTS / "thousand_turns.md", text)


if __name__ == "__main__":
    main()
