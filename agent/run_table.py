"""The table of `agent runs`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from agent.display import one_line, safe
from agent.run_entry import (
    DAMAGED,
    DIED,
    FAILED,
    FINISHED,
    INTERRUPTED,
    RUNNING,
    UNCLEAR,
    RunEntry,
)
from agent.show import duration

_GAP = "  "
_COLOURS = {
    RUNNING: "bold cyan",
    FINISHED: "default",
    INTERRUPTED: "yellow",
    FAILED: "red",
    DIED: "yellow",
    UNCLEAR: "yellow",
    DAMAGED: "red",
}


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    cell: Callable[[RunEntry], Text | str]
    right: bool = False
    order: int = 0  # the highest is left out first where the terminal is narrow


def run_table(entries: list[RunEntry], console: Console) -> tuple[list[Text], list[str]]:
    """The lines of the table, and the columns for which there was no room."""
    clash = Counter(run.handle for run in entries)
    now = time.time()

    def handle(run: RunEntry) -> str:
        # A batch's name is long and has no more to tell it by than its key.
        alone = clash[run.handle] == 1 or run.name.endswith(run.handle)
        return safe(run.handle if alone else run.name)

    columns = [
        _Column("run", handle),
        _Column("state", _state),
        _Column("exit", lambda run: safe(run.exit), order=2),
        _Column("verdict or why", _verdict),
        _Column("task", lambda run: safe(run.task), order=1),
        _Column("steps", lambda run: f"{run.steps:,}", right=True),
        _Column("seen", lambda run: f"{run.seen:,}", right=True, order=5),
        _Column("evicted", lambda run: f"{run.evicted_tokens:,}", right=True, order=3),
        _Column("cache", _cache, right=True, order=4),
        _Column("age", lambda run: _age(now - run.started), right=True),
        _Column("model", lambda run: safe(run.model), order=6),
        _Column("method", lambda run: safe(run.method), order=7),
        _Column("protocol", lambda run: safe(run.protocol), order=8),
    ]
    cells = {c.title: [_as_text(c.cell(run)) for run in entries] for c in columns}
    widths = {
        c.title: max(cell_len(c.title), *(t.cell_len for t in cells[c.title])) for c in columns
    }
    left_out: list[_Column] = []
    while sum(widths[c.title] + len(_GAP) for c in columns) - len(_GAP) > console.width:
        last = max(columns, key=lambda column: column.order)
        if not last.order:
            break
        columns.remove(last)
        left_out.append(last)
    titles = [Text(column.title, "dim") for column in columns]
    rows = [titles, *([cells[c.title][number] for c in columns] for number in range(len(entries)))]
    lines = [
        Text(_GAP).join(
            _padded(cell, widths[column.title], column.right)
            for cell, column in zip(row, columns, strict=True)
        )
        for row in rows
    ]
    for line in lines:
        line.rstrip()
    return lines, [column.title for column in reversed(left_out)]


def _padded(cell: Text, width: int, right: bool) -> Text:
    cell = cell.copy()
    cell.pad_left(width - cell.cell_len) if right else cell.pad_right(width - cell.cell_len)
    return cell


def _state(run: RunEntry) -> Text:
    mark = "+" if run.resumable else ""
    return Text(run.state + mark, _COLOURS[run.state])


def _verdict(run: RunEntry) -> Text:
    if not run.verdict and run.why:
        return Text(one_line(safe(run.why), 24), "dim")
    return Text(safe(run.verdict), "green" if run.resolved else "default")


def _cache(run: RunEntry) -> str:
    if run.budget:
        return f"{run.resident:,}/{run.budget:,}"
    if run.density:
        return f"{run.resident:,} ({run.density:.0%})"
    return f"{run.resident:,}"


def _age(seconds: float) -> str:
    return " ".join(duration(seconds).split(" ")[:2])


def _as_text(words: Text | str) -> Text:
    return words if isinstance(words, Text) else Text(words)
