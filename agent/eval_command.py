"""One `agent eval`: tasks and options become runs, an engine makes them, a report says what came
out. Made again with the same folder, it goes on where it ended."""

from __future__ import annotations

import importlib
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from agent.batch.carry_out import DEFAULT_WORK, carry_out
from agent.batch.engine import Engine, LocalEngine
from agent.batch.item import Item, config_data, digest_of, make_items, settled
from agent.batch.store import ERROR, FINISHED, Result, Store
from agent.batch.summary import eviction_words, rows, summary
from agent.batch.table import Board, show_summary
from agent.interrupts import interruptible, uninterrupted
from agent.progress import Silent, TerminalProgress
from agent.report import git_commit, hardware, merged, versions
from agent.run_options import OptionError, RunOptions
from agent.timestamps import utc
from environments import choose
from tasks.source import open_source, select


@dataclass(frozen=True, slots=True)
class Selection:
    """Which instances of a source."""

    ids: tuple[str, ...] = ()
    filter: str = ""
    shuffle: bool = False
    seed: int = 0
    slice: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """What `agent eval` was asked to do."""

    source: str
    selection: Selection
    options: RunOptions
    out: Path
    workers: int = 1
    sessions: int = 1  # of a worker
    retries: int = 1
    silence: float = 3600.0
    engine: str = "local"
    work: str = DEFAULT_WORK
    argv: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """What to type to go on."""
        return shlex.join(["agent", *self.argv])


@dataclass(slots=True)
class _Batch:
    """What stays the same from the first run to the last."""

    request: Request
    items: list[Item]
    store: Store
    console: Console
    quiet: bool
    facts: dict[str, Any]
    began: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        if not self.quiet:
            self.console.print(Text(text), highlight=False, soft_wrap=True)

    def results(self) -> dict[str, Result]:
        found = {item.key: self.store.result(item) for item in self.items}
        return {key: result for key, result in found.items() if result is not None}

    def report(self, state: str, results: Mapping[str, Result]) -> dict[str, Any]:
        """The report as things stand, written."""
        cells = summary(self.items, results)
        places = {
            item.key: str(self.store.folder_of(item).relative_to(self.store.folder))
            for item in self.items
        }
        report = merged(
            {"state": state, "seconds": round(time.monotonic() - self.began, 3)},
            self.facts,
            {
                "summary": {
                    name: {**cell, "eviction_words": eviction_words(cell)}
                    for name, cell in cells.items()
                },
                "made_with": _made_with(results.values()),
                "runs": rows(self.items, results, places),
            },
        )
        self.store.report(report)
        return report


def execute(request: Request, *, console: Console, quiet: bool) -> tuple[dict[str, Any], int]:
    """Make what is not made yet. Returns the report and the exit code: 0 if all runs are finished,
    1 if some ended in errors, 130 if it was interrupted.

    Raises OptionError, TaskError, ModelError, SandboxError and StoreError before anything is run,
    and EngineError where no work can be done.
    """
    with interruptible():
        source = open_source(request.source)
        chosen = select(source.entries, **asdict(request.selection))
        choice = choose(request.options.sandbox)
        options = settled(request.options.model_copy(update={"sandbox": choice.kind}))
        config = config_data(options)
        attempts = options.attempts
        items = make_items(
            request.source, chosen, options, attempts=attempts, config=digest_of(config)
        )
        store = Store(request.out)
        with store.lock():
            made = {"versions": versions(), "git_commit": git_commit()}
            engine = make_engine(request, store, options, made)
            threads = getattr(engine, "threads", None)
            facts = {
                "started": utc(),
                "argv": list(request.argv),
                "source": {"name": source.name, "instances": len(source.entries)},
                "notes": list(source.notes),
                "selection": asdict(request.selection),
                "options": options.model_dump(mode="json"),
                **config,
                "seeds": sorted({item.seed for item in items}),
                "sandbox": {"kind": choice.kind, "reason": choice.reason},
                "workers": request.workers,
                "sessions_per_worker": request.sessions,
                "retries": request.retries,
                **made,
                "hardware": {**hardware(), "torch_threads": threads},
            }
            store.note_session(facts)
            batch = _Batch(request, items, store, console, quiet, facts)
            for note in source.notes:
                batch.say(note)
            return _made(batch, engine)


def _made(batch: _Batch, engine: Engine) -> tuple[dict[str, Any], int]:
    request, items, store = batch.request, batch.items, batch.store
    done = store.finished(items)
    _greet(batch, len(done))
    batch.report("running", batch.results())
    state = "failed"
    try:
        if len(done) < len(items):
            prepare_work(
                request.work, items[0].run_options(), None if batch.quiet else batch.console
            )
        beside = request.workers * request.sessions
        board = Board(batch.console, items, done, beside=beside, quiet=batch.quiet)
        with board:
            carry_out(items, store, engine, request.work, board)
        state = "finished"
    except KeyboardInterrupt:
        state = "interrupted"
    finally:
        with uninterrupted():
            results = batch.results()
            report = batch.report(state, results)
            files = store.predictions(items)
    if not batch.quiet:
        show_summary(batch.console, report["summary"])
    batch.say(f"kept in {store.folder}{os.sep}: report.json, {files[0].name}, runs{os.sep}")
    if state == "interrupted":
        over = sum(result["state"] == FINISHED for result in results.values())
        console = Console(stderr=True)
        told = f"interrupted: {over} of {len(items)} runs are finished and stay. To go on:"
        console.print(Text(told, "yellow"), highlight=False, soft_wrap=True)
        console.print(Text(f"  {request.command}"), highlight=False, soft_wrap=True)
        return report, 130
    failed = [item for item in items if results[item.key]["state"] == ERROR]
    if failed:
        batch.say("the same command again tries those that ended in errors once more")
    return report, 1 if failed else 0


def _greet(batch: _Batch, done: int) -> None:
    options, items = batch.request.options, batch.items
    names = {item.instance_id for item in items}
    size = batch.facts["cache"].get("budget")
    batch.say(f"{len(names)} instances of {batch.facts['source']['name']}, {len(items)} runs")
    batch.say(f"model: {options.model}, {batch.facts['options']['dtype']}")
    batch.say(f"tools: {options.tools} ({options.tools_reason or 'as asked for'})")
    gib = "" if options.cache_gib is None else f" ({options.cache_gib:g} GiB)"
    batch.say(f"cache: {options.method}, {options.protocol}, {_size_words(size)}{gib}")
    batch.say(f"sandbox: {batch.facts['sandbox']['kind']} ({batch.facts['sandbox']['reason']})")
    if done:
        batch.say(f"{done} runs are finished already and stay")
    keys = {item.key for item in items}
    others = sum(result["key"] not in keys for result in batch.store.results())
    if others:
        batch.say(f"the folder holds {others} results of other options or rows; they do not count")


def _size_words(budget: Mapping[str, Any] | None) -> str:
    if budget is None:
        return "nothing is evicted"
    if budget["kind"] == "tokens":
        return f"a budget of {budget['tokens']:,} tokens"
    return f"{budget['density']:.0%} of the tokens seen"


def make_engine(
    request: Request, store: Store, options: RunOptions, stamp: Mapping[str, Any]
) -> Engine:
    """The engine asked for. Raises OptionError."""
    if request.engine == "local":
        return LocalEngine(
            store,
            workers=request.workers,
            sessions=request.sessions,
            retries=request.retries,
            # Sessions end at what they do with the model next; a test run of theirs goes before.
            grace=30.0 if request.sessions == 1 else 120.0,
            silence=request.silence,
            devices=() if options.device_map else _devices(options.device),
            stamp=stamp,
        )
    factory = _found(request.engine, "--engine")
    if request.sessions > 1:
        raise OptionError(f"--sessions-per-worker is for the local engine, not {request.engine}")
    engine: Engine = factory(store, workers=request.workers, retries=request.retries, stamp=stamp)
    return engine


def prepare_work(work: str, options: RunOptions, console: Console | None) -> None:
    """What workers would otherwise all do at once, such as fetching the model: the function
    `prepare(options, progress)` of the work's module, if it has one."""
    prepare = getattr(importlib.import_module(_found(work, "--work").__module__), "prepare", None)
    if prepare is None:
        return
    with TerminalProgress(console) if console else nullcontext(Silent()) as progress:
        prepare(options, progress)


def _found(name: str, flag: str) -> Any:
    """What `module:name` is. Raises OptionError."""
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise OptionError(f"{flag} {name!r} cannot be used: {error}") from error


def _devices(device: str) -> Sequence[str]:
    """Which GPU each worker sees: they take turns where there are several and none is named."""
    if device != "cuda":
        return ()
    import torch

    count = torch.cuda.device_count()
    named = [part for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part]
    return (named or [str(number) for number in range(count)]) if count > 1 else ()


def _made_with(results: Any) -> list[dict[str, Any]]:
    """Versions and commits under which results were made: more than one after an update."""
    found: list[dict[str, Any]] = []
    for result in results:
        made = {"versions": result.get("versions"), "git_commit": result.get("git_commit")}
        if made not in found:
            found.append(made)
    return found
