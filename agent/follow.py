"""Watching a run that goes on: what there is of it, and what comes."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.text import Text

from agent.replay import load
from agent.run_entry import DIED, RUNNING, RunEntry
from agent.run_lines import Lines
from agent.show import Show

_LOOK = 0.5  # seconds between two looks


class _Follower:
    """Shows what there is of a run, and what comes."""

    def __init__(self, path: Path, attempt: int | None, shown: Show) -> None:
        self._path, self._attempt, self._show = path, attempt, shown
        self._lines: dict[Path, Lines] = {}
        self._shown: dict[Path, list[dict[str, Any]]] = {}

    def look(self) -> RunEntry:
        """Show what is new; returns how the run stands."""
        replays = load(self._path, self._attempt, self._read)
        for replay in replays:
            folder = replay.folder
            if replay.attempts > 1 and folder == self._path:
                continue  # the first of its attempts is about to begin
            if folder not in self._shown:
                self._shown[folder] = []
                self._show.head(replay)
            # Of a run that goes on from an earlier turn, what was cut off was shown already.
            known = _in_common(self._shown[folder], replay.lines.entries)
            for entry in replay.lines.entries[known:]:
                self._show.entry(replay, entry)
            self._shown[folder] = list(replay.lines.entries)
        return replays[0].run

    def end(self) -> None:
        """Show how it ended."""
        for replay in load(self._path, self._attempt, self._read):
            self._show.end(replay)

    def _read(self, folder: Path) -> Lines:
        """All lines so far, of which those that were read before are not read again."""
        lines = self._lines.setdefault(folder, Lines(folder))
        lines.poll()
        return lines

    @property
    def step(self) -> int:
        """The last one that was shown."""
        return sum(entry["kind"] == "step" for entry in next(reversed(self._shown.values()), []))


def follow_run(path: Path, attempt: int | None, shown: Show) -> int:
    """Show a run until it is over. Returns 0 when it ended, 1 when it died, 130 after Ctrl-C, which
    ends the watching."""
    console, follower = shown.console, _Follower(path, attempt, shown)
    try:
        with console.status("") if console.is_terminal else nullcontext() as moving:
            while (run := follower.look()).state == RUNNING:
                if moving is not None:
                    words = f"{run.state}, step {follower.step + 1} · Ctrl-C ends the watching only"
                    moving.update(Text(words))
                time.sleep(_LOOK)
            follower.end()
    except KeyboardInterrupt:
        return 130
    return 1 if run.state == DIED else 0


def _in_common(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count
