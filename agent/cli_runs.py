"""`agent runs` and `agent show`: how runs stand, and what happened in one."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from agent.display import safe
from agent.run_index import (
    DAMAGED,
    DIED,
    FAILED,
    FINISHED,
    INTERRUPTED,
    RUNNING,
    UNCLEAR,
    NoSuchRun,
    RunEntry,
    find_run,
    read_run,
    read_runs,
)
from agent.run_lines import Lines
from agent.show import NoSuchStep, Replay, Show, chosen, duration, load

_RUNS = Path("runs")
_SHOWN, _GAP = 30, "  "
_PIPED_WIDTH = 240  # where no terminal says how wide it is
_LOOK = 0.5  # seconds between two looks at a run that goes on
_COLOURS = {
    RUNNING: "bold cyan",
    FINISHED: "default",
    INTERRUPTED: "yellow",
    FAILED: "red",
    DIED: "yellow",
    UNCLEAR: "yellow",
    DAMAGED: "red",
}


def list_runs(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR",
            help="Where runs are: runs, unless named; also a folder of `agent eval` or `compare`, "
            "or one that holds several such.",
            show_default=False,
        ),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help=f"All runs, not the newest {_SHOWN}; also tries that a batch set aside."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all runs as JSON, with all that is known.")
    ] = False,
) -> None:
    """List runs, the newest first, and how each stands.

    running: its process lives. finished: it ended by itself; exit and verdict say how.
    interrupted: it was asked to end. failed: an error of ours, not of the model. died: it said
    that it runs, but its process is gone. damaged: its files cannot be read. What is marked with
    a + can go on: `agent run --resume RUN`.
    """
    place = folder or _RUNS
    if folder is not None and not folder.is_dir():
        _fail(f"there is no folder {folder}", 2)
    entries = [run for run in read_runs(place) if everything or not run.aside]
    if as_json:
        now = time.time()
        rows = [{**run.data(), "age_seconds": round(now - run.started, 3)} for run in entries]
        typer.echo(json.dumps(rows, indent=2))
        return
    if not entries:
        typer.echo(
            f"There are no runs in {place}. `agent run` makes one, in the folder runs of where it "
            "is called; name another folder with `agent runs DIR`."
        )
        return
    console = _console()
    shown = entries if everything else entries[:_SHOWN]
    table, left_out = _table(shown, console)
    for line in table:
        console.print(line, highlight=False)
    states = Counter(run.state for run in entries)
    words = [", ".join(f"{count:,} {state}" for state, count in states.most_common())]
    if len(shown) < len(entries):
        words.append(f"{len(entries) - len(shown):,} older ones with --all")
    if left_out:
        words.append(f"a wider terminal shows {', '.join(left_out)}")
    console.print(Text("; ".join(words), "dim"), highlight=False)


def show(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A folder, the name of a run or a part of it that no other has, or last.",
        ),
    ],
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Where names are looked for.")
    ] = _RUNS,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Only this step; -1 is the last.")
    ] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="A:B", help="Only steps A to B; A: and :B do as well.")
    ] = None,
    attempt: Annotated[
        int | None, typer.Option(metavar="K", help="Only attempt K of a run that has several.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Shorten nothing; show the first prompt too.")
    ] = False,
    by_step: Annotated[
        bool,
        typer.Option(
            "--step-by-step",
            "-i",
            help="One at a time: n next, p back, g first, e last, f in full, q quit.",
        ),
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on showing what comes until the run ends.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Replay a run: each step's thought, call and result, and what it did to the cache.

    Below each step: how full the cache is, what was fed, written and evicted in this turn and how
    long each took, and, where the run kept it, which parts of the conversation the cache still
    holds, from the oldest on the left to the newest.
    """
    if step is not None and steps is not None:
        _fail("--step and --steps are two ways to say which steps; give one of them", 2)
    if sum((by_step, follow, as_json)) > 1:
        _fail("--step-by-step, --follow and --json exclude each other", 2)
    wanted = str(step) if step is not None else steps
    if follow and wanted is not None:
        _fail("--follow shows all steps; give no --step", 2)
    try:
        path = find_run(run, folder)
        if path.name.startswith("attempt-") and attempt is None and _is_attempt(path):
            path, attempt = path.parent, int(path.name.removeprefix("attempt-"))
        replays = load(path, attempt)
        picked = [(replay, chosen(replay, wanted)) for replay in replays]
    except (NoSuchRun, NoSuchStep) as error:
        _fail(str(error), 2)
    if as_json:
        data = {
            "run": replays[0].run.data(),
            "report": replays[0].report,
            "attempts": [replay.data(chosen_steps) for replay, chosen_steps in picked],
        }
        typer.echo(json.dumps(data, indent=2))
        return
    console = _console()
    shown = Show(console, full=full)
    if by_step:
        if not _at_a_terminal(console):
            _fail("--step-by-step needs a terminal", 2)
        pages = [_page(shown.step, replay, each) for replay, found in picked for each in found]
        if wanted is None:
            pages = [page for replay in replays for page in _pages(shown, replay)]
        _turn_pages(pages, shown)
        return
    if follow:
        raise typer.Exit(_follow(path, attempt, shown))
    for replay, found in picked:
        if wanted is None:
            shown.all(replay)
        for each in found if wanted is not None else ():
            shown.step(replay, each)


# The list


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    cell: Callable[[RunEntry], Text | str]
    right: bool = False
    order: int = 0  # the highest is left out first where the terminal is narrow


def _table(entries: list[RunEntry], console: Console) -> tuple[list[Text], list[str]]:
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
        return Text(_cut(safe(run.why), 24), "dim")
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


def _cut(words: str, width: int) -> str:
    return words if len(words) <= width else f"{words[: width - 1]}…"


# One run


_Page = Callable[[], None]


def _is_attempt(path: Path) -> bool:
    return path.name.removeprefix("attempt-").isdigit() and (path.parent / "report.json").exists()


def _page(what: Callable[..., None], *arguments: Any) -> _Page:
    return lambda: what(*arguments)


def _pages(shown: Show, replay: Replay) -> Iterator[_Page]:
    """What is shown one at a time: the beginning, each step, the end."""

    def beginning() -> None:
        shown.head(replay)
        if start := replay.lines.start:
            shown.entry(replay, start)

    yield beginning
    for entry in replay.lines.entries:
        if entry["kind"] in ("step", "resume"):
            yield _page(shown.entry, replay, entry)
    yield _page(shown.end, replay)


def _turn_pages(pages: list[_Page], shown: Show) -> None:
    at = 0
    while True:
        shown.console.clear()
        pages[at]()
        where = f"{at + 1} of {len(pages)} · n next, p back, g first, e last, f full, q quit"
        shown.console.print(Text(where, "reverse"), highlight=False)
        try:
            key = typer.getchar()
        except (EOFError, KeyboardInterrupt):
            return
        if key in ("q", "Q", "\x1b", "\x03", "\x04"):
            return
        if key in ("n", " ", "\r", "\n", "j", "\x1b[C", "\x1b[B", "\x1b[6~"):
            at = min(at + 1, len(pages) - 1)
        elif key in ("p", "b", "k", "\x7f", "\x1b[D", "\x1b[A", "\x1b[5~"):
            at = max(at - 1, 0)
        elif key in ("g", "\x1b[H"):
            at = 0
        elif key in ("e", "G", "\x1b[F"):
            at = len(pages) - 1
        elif key == "f":
            shown.full = not shown.full


class _Follower:
    """Shows what there is of a run, and what comes."""

    def __init__(self, path: Path, attempt: int | None, shown: Show) -> None:
        self._path, self._attempt, self._show = path, attempt, shown
        self._lines: dict[Path, Lines] = {}
        self._shown: dict[Path, list[dict[str, Any]]] = {}

    def look(self) -> RunEntry:
        """Show what is new; returns how the run stands."""
        # Looked at before its lines are: of a run that is over none is missed.
        run = read_run(self._path)
        for replay in load(self._path, self._attempt):
            folder = replay.folder
            if replay.attempts > 1 and folder == self._path:
                continue  # the first of its attempts is about to begin
            if folder not in self._lines:
                self._lines[folder], self._shown[folder] = Lines(folder), []
                self._show.head(replay)
            lines = replay.lines = self._lines[folder]
            lines.poll()
            # Of a run that goes on from an earlier turn, what was cut off was shown already.
            known = _in_common(self._shown[folder], lines.entries)
            for entry in lines.entries[known:]:
                self._show.entry(replay, entry)
            self._shown[folder] = list(lines.entries)
        return run

    def end(self) -> None:
        """Show how it ended."""
        for replay in load(self._path, self._attempt):
            self._show.end(replay)

    @property
    def step(self) -> int:
        """The last one that was shown."""
        return sum(entry["kind"] == "step" for entry in next(reversed(self._shown.values()), []))


def _follow(path: Path, attempt: int | None, shown: Show) -> int:
    """Returns 0 when the run ended, 1 when it died, 130 after Ctrl-C, which ends the watching."""
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


def _console() -> Console:
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=_PIPED_WIDTH)
    return console


def _at_a_terminal(console: Console) -> bool:
    return console.is_terminal and sys.stdin.isatty()


def _fail(message: str, code: int) -> NoReturn:
    Console(stderr=True).print(
        Text(f"error: {safe(message)}", "red"), highlight=False, soft_wrap=True
    )
    raise typer.Exit(code)
