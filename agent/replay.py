"""A run to be replayed: what its reports and trajectories say of each attempt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.run_entry import RUNNING, RunEntry, attempt_folders, read_run
from agent.run_lines import Lines, read_object, section, whole
from agent.trajectory import PATCH, REPORT


class NoSuchStep(Exception):
    """Steps or attempts that the run does not have; the text says which there are."""


@dataclass(slots=True)
class Replay:
    """One attempt of a run: what its reports and its trajectory say."""

    run: RunEntry
    folder: Path
    report: Mapping[str, Any]
    lines: Lines
    attempt: int
    attempts: int

    def data(self, steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """As plain data, with these steps."""
        try:
            patch = (self.folder / PATCH).read_text(encoding="utf-8", errors="replace")
        except OSError:
            patch = None
        return {
            "attempt": self.attempt,
            "folder": str(self.folder),
            "start": self.lines.start or None,
            "steps": list(steps),
            "resumed": self.lines.of("resume"),
            "end": self.lines.end,
            "patch": patch,
            "damaged_lines": self.lines.damaged,
            "torn": self.lines.torn,
        }


def load(
    folder: Path, attempt: int | None = None, lines: Callable[[Path], Lines] = Lines.read
) -> list[Replay]:
    """The attempts of a run, or the one asked for; `lines` reads their trajectories.

    How the run stands is looked at before they are read: of one that is over no line is missed.
    Raises NoSuchStep.
    """
    run, report = read_run(folder, lines), read_object(folder / REPORT) or {}
    folders = attempt_folders(folder)
    count = len(folders)
    if run.state == RUNNING:  # others may follow
        count = max(count, whole(section(report, "options"), "attempts"))
    wanted = range(1, len(folders) + 1)
    if attempt is not None:
        if attempt not in wanted:
            raise NoSuchStep(f"--attempt {attempt}: {folder.name} has {_count(len(folders))}")
        wanted = range(attempt, attempt + 1)
    return [
        Replay(
            run=run,
            folder=folders[n - 1],
            report={**report, **_own_report(folder, folders[n - 1], report, n)},
            lines=lines(folders[n - 1]),
            attempt=n,
            attempts=count,
        )
        for n in wanted
    ]


def chosen(replay: Replay, steps: str | None) -> list[dict[str, Any]]:
    """Steps `N`, `A:B` (both included), `A:` or `:B` of a run; negative ones count from the end.

    Raises NoSuchStep for another form, and where there is none of them.
    """
    found = replay.lines.steps
    if steps is None:
        return found
    first, colon, last = steps.partition(":")
    try:
        begin = _step(first or "1", len(found))
        end = _step(last or "-1", len(found)) if colon else begin
    except ValueError:
        raise NoSuchStep(f"--steps {steps}: give N, A:B, A: or :B") from None
    picked = found[max(begin, 1) - 1 : max(end, 0)]
    if not picked:
        raise NoSuchStep(f"no step {steps}: {replay.run.name} has {len(found)}")
    return picked


def _own_report(run: Path, own: Path, report: Mapping[str, Any], attempt: int) -> dict[str, Any]:
    if own == run:
        return {}
    told = report.get("attempts")
    if isinstance(told, list) and attempt <= len(told) and isinstance(told[attempt - 1], dict):
        return told[attempt - 1]
    return read_object(own / REPORT) or {}


def _step(word: str, count: int) -> int:
    at = int(word)
    return at if at > 0 else count + 1 + at


def _count(attempts: int) -> str:
    return "one attempt" if attempts == 1 else f"{attempts} attempts"
