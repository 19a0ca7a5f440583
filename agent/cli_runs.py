"""`agent runs` and `agent show`: how runs stand, and what happened in one."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from agent.cli_errors import fail
from agent.follow import follow_run
from agent.paging import pages_of, turn_pages
from agent.replay import NoSuchStep, chosen, load
from agent.run_entry import ATTEMPT
from agent.run_index import NoSuchRun, find_run, read_runs
from agent.run_table import run_table
from agent.show import Show
from agent.trajectory import REPORT

_RUNS = Path("runs")
_SHOWN = 30
_PIPED_WIDTH = 240  # where no terminal says how wide it is


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
        fail(f"there is no folder {folder}", 2)
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
    table, left_out = run_table(shown, console)
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
        fail("--step and --steps are two ways to say which steps; give one of them", 2)
    if sum((by_step, follow, as_json)) > 1:
        fail("--step-by-step, --follow and --json exclude each other", 2)
    wanted = str(step) if step is not None else steps
    if follow and wanted is not None:
        fail("--follow shows all steps; give no --step", 2)
    try:
        path = find_run(run, folder)
        own = ATTEMPT.fullmatch(path.name)
        if own and attempt is None and (path.parent / REPORT).exists():
            path, attempt = path.parent, int(own[1])
        replays = load(path, attempt)
        picked = [(replay, chosen(replay, wanted)) for replay in replays]
    except (NoSuchRun, NoSuchStep) as error:
        fail(str(error), 2)
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
            fail("--step-by-step needs a terminal", 2)
        if wanted is None:
            pages = [page for replay in replays for page in pages_of(shown, replay)]
        else:
            pages = [
                partial(shown.step, replay, each) for replay, found in picked for each in found
            ]
        turn_pages(pages, shown)
    elif follow:
        raise typer.Exit(follow_run(path, attempt, shown))
    elif wanted is None:
        for replay in replays:
            shown.all(replay)
    else:
        for replay, found in picked:
            for each in found:
                shown.step(replay, each)


def _console() -> Console:
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=_PIPED_WIDTH)
    return console


def _at_a_terminal(console: Console) -> bool:
    return console.is_terminal and sys.stdin.isatty()
