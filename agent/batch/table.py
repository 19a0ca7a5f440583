"""What the person at the terminal sees of a batch: while it goes on, and at its end."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from agent.batch.item import Item
from agent.batch.store import FINISHED, Result
from agent.batch.summary import error_kind, eviction_words
from agent.display import safe


@dataclass(slots=True)
class _Running:
    item: Item
    began: float
    tries: int
    said: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Cell:
    runs: int = 0
    finished: int = 0
    resolved: int = 0
    errors: int = 0
    seconds: list[float] = field(default_factory=list)


class Board:
    """Shows a batch. On a terminal a table that moves, below a line for each run that is over;
    elsewhere the lines alone. A context manager."""

    def __init__(
        self,
        console: Console,
        items: Sequence[Item],
        done: Mapping[str, Result],
        *,
        beside: int,
        quiet: bool = False,
    ) -> None:
        """`done`: results that are there already; they count, and say how long a run takes.
        beside: how many runs there are at a time."""
        self._console, self._beside, self._quiet = console, beside, quiet
        self._cells: dict[str, _Cell] = {}
        self._running: dict[str, _Running] = {}
        self._live: Live | None = None
        self._clock = time.monotonic
        for item in items:
            self._cells.setdefault(item.cell, _Cell()).runs += 1
            if item.key in done:
                self._count(item, done[item.key])

    def event(self, item: Item, event: Mapping[str, Any]) -> None:
        """What the engine tells."""
        kind = event.get("event")
        if kind == "start":
            self._running[item.key] = _Running(item, self._clock(), int(event["try"]))
        elif kind == "tell" and item.key in self._running:
            said = {key: value for key, value in event.items() if key != "event"}
            self._running[item.key].said.update(said)
        elif kind == "retry":
            self._running.pop(item.key, None)
            self._line(
                Text(f"{_name(item)}: {_short(event['error'])}; to be tried again", "yellow")
            )
        elif kind == "end":
            self._running.pop(item.key, None)
            self._count(item, event["result"])
            self._line(self._end(item, event["result"]))

    def left(self) -> float | None:
        """Seconds until all is over, by how long runs took so far; None before one is over.

        A cell that has finished none is taken to be like the others.
        """
        every = [second for cell in self._cells.values() for second in cell.seconds]
        if not every:
            return None
        mean = sum(every) / len(every)
        own = {name: _mean(cell.seconds, mean) for name, cell in self._cells.items()}
        need = 0.0
        for name, cell in self._cells.items():
            need += own[name] * (cell.runs - cell.finished - cell.errors)
        for run in self._running.values():
            need -= min(self._clock() - run.began, own[run.item.cell])
        return max(0.0, need) / self._beside

    def __enter__(self) -> Self:
        if not self._quiet and self._console.is_terminal:
            self._live = Live(
                console=self._console,
                get_renderable=self._table,
                refresh_per_second=2,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _count(self, item: Item, result: Result) -> None:
        cell = self._cells[item.cell]
        if result["state"] != FINISHED:
            cell.errors += 1
            return
        cell.finished += 1
        cell.resolved += bool((result["verdict"] or {}).get("resolved"))
        if (seconds := result["seconds"].get("total")) is not None:
            cell.seconds.append(float(seconds))

    def _line(self, text: Text) -> None:
        if not self._quiet:
            self._console.print(text, highlight=False, soft_wrap=True)

    def _end(self, item: Item, result: Result) -> Text:
        over = sum(cell.finished + cell.errors for cell in self._cells.values())
        runs = sum(cell.runs for cell in self._cells.values())
        text = Text(f"{over:>{len(str(runs))}}/{runs} {_name(item)}  ")
        if result["state"] != FINISHED:
            return text.append(f"ERROR {_short(result['error'])}", "red")
        verdict = result["verdict"] or {}
        if verdict.get("resolved"):
            text.append("RESOLVED", "bold green")
        else:
            text.append(str(verdict.get("status", "no verdict")).replace("_", " "), "yellow")
        return text.append(f"  {_costs(result)}", "dim")

    def _table(self) -> Group:
        cells = Table(box=None, pad_edge=False, header_style="dim")
        if len(self._cells) > 1:
            cells.add_column("cell")
        for title in ("runs over", "resolved", "errors"):
            cells.add_column(title, justify="right")
        for name, cell in self._cells.items():
            row: list[Text | str] = [
                f"{cell.finished + cell.errors} of {cell.runs}",
                str(cell.resolved),
                Text(str(cell.errors), "red" if cell.errors else ""),
            ]
            if len(self._cells) > 1:
                row.insert(0, Text(name))
            cells.add_row(*row)
        now = Table(box=None, pad_edge=False, show_header=False)
        for run in self._running.values():
            took = duration(self._clock() - run.began)
            again = f"try {run.tries}" if run.tries > 1 else ""
            now.add_row(Text(_name(run.item), "cyan"), took, Text(_said(run.said)), again)
        left = self.left()
        eta = "" if left is None else f"about {duration(left)} to go"
        return Group(cells, now, Text(eta, "dim"))


def show_summary(console: Console, cells: Mapping[str, Mapping[str, Any]]) -> None:
    """The table at the end of a batch."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    several = len(cells) > 1
    for title in (
        *(["cell"] if several else []),
        "resolved",
        "errors",
        "turns",
        "tokens",
        "minutes",
    ):
        table.add_column(title, justify="left" if title == "cell" else "right")
    for name, cell in cells.items():
        mean = cell["mean"]
        table.add_row(
            *([Text(name)] if several else []),
            f"{cell['resolved']} of {cell['runs']}",
            str(sum(cell["errors"].values())),
            _number(mean["steps"]),
            _number(mean["tokens"], 0),
            _number(mean["minutes"], 2),
        )
    console.print(table)
    for name, cell in cells.items():
        before = f"{name}: " if several else ""
        said = [eviction_words(cell)]
        if cell["attempts"] > 1:
            k = cell["attempts"]
            any_ = f"{cell['instances_resolved']} of {cell['instances']} instances"
            said.append(f"pass@{k}: {any_} resolved by any of {k} attempts")
        said += [f"{count} × {kind}" for kind, count in cell["errors"].items()]
        if cell["open"]:
            said.append(f"{cell['open']} not run")
        for line in said:
            console.print(Text(f"{before}{line}"), highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """Seconds as a person reads them."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def _name(item: Item) -> str:
    parts = [item.instance_id, item.cell, f"attempt {item.attempt}" if item.attempt > 1 else ""]
    return " ".join(part for part in parts if part)


def _said(said: Mapping[str, Any]) -> str:
    """Phase, step and the cache's fill, as far as they are known."""
    parts = [safe(str(said.get("phase", "starting")))]
    if "step" in said:
        parts.append(f"step {said['step']}")
    if "resident" in said:
        budget = said.get("budget")
        parts.append(f"cache {said['resident']:,}" + (f"/{budget:,}" if budget else ""))
    return " · ".join(parts)


def _costs(result: Result) -> str:
    totals, seconds = result["totals"], result["seconds"]
    parts = []
    if "steps" in totals:
        parts.append(f"{totals['steps']} steps")
    if "evictions" in totals:
        parts.append(f"{totals['evictions']} evictions")
    if "total" in seconds:
        parts.append(duration(seconds["total"]))
    return ", ".join(parts)


def _short(error: Any) -> str:
    lines = safe(str(error or "")).strip().splitlines()
    return lines[0][:200] if lines else "an error without a text"


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


__all__ = ["Board", "duration", "error_kind", "show_summary"]
