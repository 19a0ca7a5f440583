"""A comparison in a batch's folder: what was asked, the runs that are missing, the analysis."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from agent.batch.carry_out import carry_out
from agent.batch.item import Item
from agent.batch.store import Store
from agent.batch.table import Board
from agent.compare.analysis import Analysis, Expected, analyse
from agent.compare.grid import Grid
from agent.compare.paper import paper
from agent.compare.plots import PlotsMissing, write_plots
from agent.compare.runs import ResultError, read_results
from agent.compare.tables import REPORT, report, write
from agent.eval_command import Request, make_engine, prepare_work
from agent.interrupts import interruptible, uninterrupted
from agent.report import git_commit, hardware, versions
from agent.timestamps import utc
from agent.trajectory import write_atomic

ASKED = "compare.json"  # beside the batch's own files
FORMAT = 1
# The report of a folder that `agent eval` made: that has a report.json of its own.
OTHER_REPORT = "comparison.json"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a folder's comparison is of."""

    grid: Grid
    source: str
    instances: tuple[str, ...]
    expected: tuple[Expected, ...]

    @classmethod
    def of(cls, grid: Grid, source: str, items: Sequence[Item]) -> Asked:
        return cls(
            grid,
            source,
            tuple(dict.fromkeys(item.instance_id for item in items)),
            tuple(Expected(item.key, item.instance_id, item.cell) for item in items),
        )

    def save(self, folder: Path) -> None:
        data = {
            "format": FORMAT,
            "source": self.source,
            "grid": self.grid.model_dump(mode="json"),
            "instances": list(self.instances),
            "runs": [[run.key, run.instance_id, run.cell] for run in self.expected],
        }
        write_atomic(folder / ASKED, (json.dumps(data, indent=1) + "\n").encode())


def read_asked(folder: Path) -> Asked | None:
    """What was asked in a folder; None if no comparison was made there. Raises ResultError."""
    try:
        text = (folder / ASKED).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}, this version reads {FORMAT}")
        return Asked(
            Grid.model_validate(data["grid"]),
            data["source"],
            tuple(data["instances"]),
            tuple(Expected(*run) for run in data["runs"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ResultError(f"{folder / ASKED} cannot be used: {error!r}") from error


def run(
    request: Request, asked: Asked, items: Sequence[Item], *, console: Console, quiet: bool
) -> None:
    """Make the runs that are missing. What is finished stays; errors are tried again.

    Raises OptionError and StoreError before anything is run, EngineError and KeyboardInterrupt,
    after which the folder can be used on.
    """
    with interruptible():
        store = Store(request.out)
        with store.lock():
            made = {"versions": versions(), "git_commit": git_commit()}
            engine = make_engine(request, store, request.options, made)
            threads = getattr(engine, "threads", None)
            store.note_session(
                {
                    "command": "compare",
                    "argv": list(request.argv),
                    "started": utc(),
                    "source": asked.source,
                    "grid": asked.grid.model_dump(mode="json"),
                    "options": items[0].options,
                    "tools_reason": asked.grid.run_options(asked.grid.cells()[0]).tools_reason,
                    "runs": len(items),
                    "workers": request.workers,
                    **made,
                    "hardware": {**hardware(), "torch_threads": threads},
                }
            )
            asked.save(store.folder)
            done = store.finished(items)
            try:
                if len(done) < len(items):
                    shown = None if quiet else console
                    prepare_work(request.work, items[0].run_options(), shown)
                workers = request.workers
                with Board(console, items, done, beside=workers, quiet=quiet) as board:
                    carry_out(items, store, engine, request.work, board)
            finally:
                with uninterrupted():
                    store.predictions(items)


@dataclass(frozen=True, slots=True)
class Compared:
    """An analysis, with what a report says around it and the files it was written to."""

    analysis: Analysis
    report: Mapping[str, Any]
    files: tuple[Path, ...]
    warning: str  # why there are no plots; empty if there are


def compared(folder: Path, *, plots: bool = True) -> Compared:
    """Analyse what is in a folder and write tables and plots into it.

    A folder of `agent eval` will do as well; its rows are the options its runs differ in. Raises
    ResultError.
    """
    asked = read_asked(folder)
    sessions = Store(folder).sessions()
    if not sessions:
        raise ResultError(f"{folder} is no folder of `agent compare` or `agent eval`")
    runs = read_results(folder)
    if not runs:
        raise ResultError(f"{folder} holds no result yet")
    analysis = analyse(runs, asked.expected if asked else None)
    made = _made(folder)
    if len(made["models"]) > 1:
        note = "runs were made with different models, files of a model, precisions or devices"
        analysis = replace(analysis, notes=(*analysis.notes, note))
    if len({_machine(session) for session in sessions}) > 1:
        note = "runs were made on several machines or with other numbers of threads or workers: "
        analysis = replace(analysis, notes=(*analysis.notes, note + "times differ for that too"))
    about = {**_about(asked, sessions), **made}
    files = write(folder, analysis, paper(), about, REPORT if asked else OTHER_REPORT)
    warning = ""
    if plots:
        try:
            files += write_plots(folder, analysis, paper())
        except PlotsMissing as error:
            warning = str(error)
    return Compared(analysis, report(analysis, paper(), about), tuple(files), warning)


def _about(asked: Asked | None, sessions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What was asked and on what: of the machine that ran it, not of the one that reads it."""
    about: dict[str, Any] = {}
    if asked is not None:
        cells = asked.grid.cells()
        about = {
            "tasks": asked.source,
            "grid": asked.grid.model_dump(mode="json"),
            "cells": [cell.name for cell in cells],
            "seeds": sorted({cell.seed for cell in cells}),
        }
    return {**about, "sessions": [dict(session) for session in sessions]}


def _made(folder: Path) -> dict[str, Any]:
    """What the runs' own reports say of model and cache: each model (with the sum of its file),
    and the full config of each cell."""
    store = Store(folder)
    models: list[Any] = []
    caches: dict[str, Any] = {}
    for result in store.results():
        item = Item.model_validate(result["item"])
        try:
            text = (store.folder_of(item) / "report.json").read_text(encoding="utf-8")
            report = json.loads(text)
        except (OSError, ValueError):
            continue  # an error that came before
        if report.get("model") and report["model"] not in models:
            models.append(report["model"])
        if report.get("cache"):
            aware = {"query_aware": report.get("query_aware")}
            caches.setdefault(item.cell or "run", {**report["cache"], **aware})
    return {"models": models, "caches": caches}


def _machine(session: Mapping[str, Any]) -> str:
    """What times depend on."""
    names = ("processor", "cores", "gpus", "torch_threads")
    told = session.get("hardware") or {}
    runs = (session.get("workers"), session.get("sessions_per_worker", 1))
    return json.dumps([[told.get(name) for name in names], *runs])
