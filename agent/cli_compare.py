"""`agent compare`: the same tasks under many configurations of the cache, and what differs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.console import Console
from rich.text import Text

from agent import flags
from agent.cli_errors import fail
from agent.cli_tasks import Filter, Ids, Slice

if TYPE_CHECKING:
    from agent.batch.item import Item
    from agent.compare.folder import Asked

_GRID, _BATCH = "The grid", "The batch"


def _as(flag: Any) -> Any:
    """The option of a shared flag; here what is not given leaves the grid's own value."""
    return get_args(flag)[1]


def _list(help: str) -> Any:
    return typer.Option(metavar="A[,B...]", help=help, rich_help_panel=_GRID)


def compare(
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where results are kept. With the same DIR, what is finished stays, and what no "
            "flag says is as it was.",
            rich_help_panel=_BATCH,
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Run nothing: tables and plots of what is in DIR, also if `agent eval` made it.",
            rich_help_panel=_BATCH,
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show cells and numbers of runs.", rich_help_panel=_BATCH),
    ] = False,
    grid: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="YAML with methods, protocols, scopes, densities, budgets, seeds, parts, tasks, "
            "ids, options, cache. Flags win.",
            rich_help_panel=_GRID,
        ),
    ] = None,
    methods: Annotated[str | None, _list("What evicts; dense is the reference.")] = None,
    protocols: Annotated[str | None, _list("true_eviction, full_context.")] = None,
    scopes: Annotated[str | None, _list("prefill, prefill+decode.")] = None,
    densities: Annotated[str | None, _list("Shares of the tokens seen that stay.")] = None,
    budgets: Annotated[str | None, _list("Tokens that the cache holds.")] = None,
    seeds: Annotated[str | None, _list("One run of every instance for each.")] = None,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="SRC", help="As for `agent eval`.", rich_help_panel=_GRID),
    ] = None,
    ids: Ids = None,
    filter: Filter = "",
    slice: Slice = "",
    model: Annotated[str | None, _as(flags.Model)] = None,
    dtype: Annotated[str | None, _as(flags.Dtype)] = None,
    device: Annotated[str | None, _as(flags.Device)] = None,
    device_map: flags.DeviceMap = None,
    quantize: flags.Quantize = None,
    prefill_eviction: Annotated[str | None, _as(flags.PrefillEviction)] = None,
    chunk: Annotated[int | None, _as(flags.Chunk)] = None,
    steps: flags.Steps = None,
    max_new_tokens: flags.NewTokens = None,
    max_tokens: flags.TotalTokens = None,
    wall_time: flags.WallTime = None,
    temperature: Annotated[float | None, _as(flags.Temperature)] = None,
    top_p: Annotated[float | None, _as(flags.TopP)] = None,
    sandbox: Annotated[str | None, _as(flags.SandboxKind)] = None,
    tools: Annotated[str | None, _as(flags.ToolSet)] = None,
    set_: flags.Overrides = None,
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            "-w",
            min=1,
            metavar="N",
            help="Runs at a time. Times per turn are those of N at a time.",
            rich_help_panel=_BATCH,
        ),
    ] = 1,
    retries: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="R",
            help="Further tries of a run that ended in an error, in one go.",
            rich_help_panel=_BATCH,
        ),
    ] = 1,
    silence: Annotated[
        float,
        typer.Option(
            min=1,
            metavar="SECONDS",
            help="After so long without a sign of life a run is ended as an error.",
            rich_help_panel=_BATCH,
        ),
    ] = 3600.0,
    engine: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Who makes the runs: local, or package.module:Factory.",
            rich_help_panel=_BATCH,
        ),
    ] = "local",
    work: Annotated[str, typer.Option(hidden=True)] = "",
    plots: Annotated[
        bool, typer.Option(help="Draw PNG files.", rich_help_panel=flags.OUTPUT)
    ] = True,
    as_json: flags.AsJson = False,
    quiet: flags.Quiet = False,
) -> None:
    """Run the same tasks under methods x protocols x scopes x sizes x seeds, and compare.

    Says what each resolved with 95 % intervals, whether that differs from dense and from Nexus
    (exact McNemar test), what it cost in tokens, bytes and seconds, and how time per turn grows.
    Writes report.json, comparison.csv, comparison.md and plots into DIR. dense has no scope and
    no size: it runs once for each protocol and seed. Ends like `agent eval`.
    """
    errors = Console(stderr=True)
    console = errors if as_json else Console()
    with _told(errors):
        if report is not None:
            if out is not None or dry_run or grid is not None:
                raise typer.BadParameter("--report runs nothing; give it alone", param_hint="")
            raise typer.Exit(_end(report, console, plots, as_json, quiet))
        overrides = flags.overrides(
            steps=steps,
            new_tokens=max_new_tokens,
            total_tokens=max_tokens,
            wall_time=wall_time,
            set_=set_,
        )
        options = {
            "model": model,
            "dtype": dtype,
            "device": device,
            "device_map": device_map,
            "quantize": quantize,
            "prefill_eviction": prefill_eviction,
            "chunk": chunk,
            "temperature": temperature,
            "top_p": top_p,
            "sandbox": sandbox,
            "tools": tools,
            "overrides": overrides or None,
        }
        changes = {
            "methods": _words(methods),
            "protocols": _words(protocols),
            "scopes": _words(scopes),
            "densities": _words(densities),
            "budgets": _words(budgets),
            "seeds": _words(seeds),
            "tasks": tasks,
            "ids": _words(",".join(ids)) if ids else None,
            "options": {name: value for name, value in options.items() if value is not None},
        }
        given = {name: value for name, value in changes.items() if value is not None}
        asked, items = _planned(grid, given, filter, slice, out)
        if dry_run:
            _show_plan(asked, items, out)
            raise typer.Exit(0)
        if out is None:
            raise typer.BadParameter("give --out DIR, or --dry-run", param_hint="--out")
        code = _made(
            asked,
            items,
            out,
            console=console,
            quiet=quiet,
            workers=workers,
            retries=retries,
            silence=silence,
            engine=engine,
            work=work,
        )
        if code:
            told = "interrupted; what is finished stays. The same command goes on from here."
            errors.print(Text(told, "yellow"), highlight=False, soft_wrap=True)
        failed = 0 if code and not _begun(out) else _end(out, console, plots, as_json, quiet)
        raise typer.Exit(code or failed)


def _planned(
    file: Path | None, changes: dict[str, Any], filter: str, slice: str, out: Path | None
) -> tuple[Asked, list[Item]]:
    """The grid over its tasks. Without a file, what no flag says is as the folder has it."""
    from agent.compare.folder import Asked, read_asked
    from agent.compare.grid import read_grid
    from tasks.source import open_source, select

    before = read_asked(out) if out is not None and file is None else None
    base = None
    if before is not None:
        base = before.grid.model_dump(mode="json")
        base |= {"tasks": before.source, "ids": before.instances}
        if "tasks" in changes:
            base["ids"] = ()
    grid = read_grid(file, changes, base)
    grid.check()
    source = open_source(grid.tasks)
    chosen = select(source.entries, ids=grid.ids, filter=filter, slice=slice)
    items = grid.items(chosen, grid.tasks)
    return Asked.of(grid, items[0].source, items), items


def _show_plan(asked: Asked, items: list[Item], out: Path | None) -> None:
    from agent.batch.store import Store

    cells = dict.fromkeys(item.cell for item in items)
    for name in cells:
        typer.echo(name)
    count = len(asked.instances)
    words = f"{len(cells)} cells x {count} instance{'s' * (count != 1)} = {len(items)} runs"
    if out is not None:
        words += f", {len(Store(out).finished(items))} of them finished in {out}"
    typer.echo(words)


def _made(
    asked: Asked,
    items: list[Item],
    out: Path,
    *,
    console: Console,
    quiet: bool,
    workers: int,
    retries: int,
    silence: float,
    engine: str,
    work: str,
) -> int:
    """Make the runs: 0, or 130 if that was interrupted."""
    from agent.batch.carry_out import DEFAULT_WORK
    from agent.compare.folder import run
    from agent.eval_command import Request, Selection

    request = Request(
        source=asked.source,
        selection=Selection(asked.instances),
        options=items[0].run_options(),
        out=out,
        workers=workers,
        retries=retries,
        silence=silence,
        engine=engine,
        work=work or DEFAULT_WORK,
        argv=tuple(sys.argv[1:]),
    )
    if not quiet:
        cells = len({item.cell for item in items})
        said = f"{cells} cells, {len(asked.instances)} instances, {len(items)} runs"
        console.print(Text(said), highlight=False)
    try:
        run(request, asked, items, console=console, quiet=quiet)
    except KeyboardInterrupt:
        return 130
    return 0


def _begun(folder: Path) -> bool:
    from agent.batch.store import Store

    return next(Store(folder).results(), None) is not None


def _end(folder: Path, console: Console, plots: bool, as_json: bool, quiet: bool) -> int:
    """Analyse, show and write what is there: 1 if something is missing or ended in an error."""
    from agent.compare.folder import compared
    from agent.compare.paper import paper
    from agent.compare.tables import show

    found = compared(folder, plots=plots)
    if not quiet:
        show(console, found.analysis, paper())
        names = ", ".join(path.name for path in found.files)
        console.print(Text(f"kept in {folder}: {names}"), highlight=False, soft_wrap=True)
    if found.warning:
        Console(stderr=True).print(Text(found.warning, "yellow"), highlight=False, soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(found.report, indent=2))
    return 1 if any(row.errors or row.missing for row in found.analysis.rows) else 0


def _words(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    return tuple(word.strip() for word in text.split(",") if word.strip())


@contextmanager
def _told(console: Console) -> Iterator[None]:
    """What a user can cause ends the command with its text: 2 where nothing was run."""
    from agent.batch.engine import EngineError
    from agent.batch.store import StoreError
    from agent.compare.grid import GridError
    from agent.compare.runs import ResultError
    from agent.run_failures import RUN_FAILURES
    from agent.run_options import OptionError

    own = (GridError, OptionError, ResultError, StoreError)
    failures: tuple[type[Exception], ...] = (*own, *RUN_FAILURES)
    try:
        yield
    except EngineError as error:
        fail(f"{error}\nThe same command goes on from here.", 1, console)
    except failures as error:
        fail(str(error) or type(error).__name__, 2, console)
    except KeyboardInterrupt:
        fail("interrupted before it began", 130, console)
