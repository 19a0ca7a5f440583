"""`agent tasks`: what there is to work on, and whether it can be graded here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from agent.cli_errors import fail
from agent.cli_tasks_make import make

if TYPE_CHECKING:
    from tasks.source import Entry, TaskSource
    from tasks.validate import Validation

tasks_app = typer.Typer(
    help="List, validate and make tasks that have hidden tests.", no_args_is_help=True
)
tasks_app.command("make")(make)


Source = Annotated[
    str,
    typer.Option(
        "--tasks",
        metavar="SRC",
        help="pairs (13 real bugs that come with the package), a .jsonl, .json or .parquet file, "
        "a folder of such files, or a data set of the hub: owner/name, owner/name:split.",
    ),
]
Ids = Annotated[
    list[str] | None,
    typer.Option(metavar="ID[,ID...]", help="Only these. Can be given several times."),
]
Slice = Annotated[
    str, typer.Option(metavar="START:STOP", help="Only these by position: 0:10 takes ten.")
]
Filter = Annotated[
    str, typer.Option(metavar="REGEX", help="Only those in whose id the pattern is found.")
]
Shuffle = Annotated[bool, typer.Option("--shuffle", help="In an order drawn by --seed.")]
Seed = Annotated[int, typer.Option(help="Of the order that --shuffle draws.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@tasks_app.command("list")
def list_command(
    tasks: Source = "pairs",
    ids: Ids = None,
    filter: Filter = "",
    slice: Slice = "",
    shuffle: Shuffle = False,
    seed: Seed = 0,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print ids only.")] = False,
) -> None:
    """Show instances, one a line: id, kind, repository, title."""
    with _told():
        source = _source(tasks)
        chosen = _select(source, ids, filter, slice, shuffle, seed)
    if as_json:
        keys = ("kind", "repo", "title", "digest")
        rows = [
            {"id": entry.instance_id, **{key: getattr(entry, key) for key in keys}}
            for entry in chosen
        ]
        typer.echo(json.dumps(rows, indent=2))
    elif quiet:
        typer.echo("\n".join(entry.instance_id for entry in chosen))
    elif Console().is_terminal:
        table = Table(box=None, pad_edge=False)
        for title in ("id", "kind", "repo", "title"):
            table.add_column(title, no_wrap=True, overflow="ellipsis")
        for entry in chosen:
            table.add_row(*(Text(column) for column in _columns(entry)))
        Console().print(table)
    else:  # for programs: whole, whatever the width of a terminal
        typer.echo("\n".join("\t".join(_columns(entry)) for entry in chosen))
    _notes(source)


@tasks_app.command("validate")
def validate_command(
    tasks: Source = "pairs",
    ids: Ids = None,
    filter: Filter = "",
    slice: Slice = "",
    workers: Annotated[
        int, typer.Option("--workers", "-w", min=1, help="Sandboxes at a time.")
    ] = 1,
    sandbox: Annotated[
        str, typer.Option(help="docker, bubblewrap, or auto: Docker where an engine answers.")
    ] = "auto",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keep results there, one a line; called again, only what is missing is done.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Grade the reference patch, and one that changes nothing, of every instance.

    An instance is valid if the first resolves it and the second does not. Those that are not are
    named; ends with 1 if there are any.
    """
    from environments import choose, open_sandbox
    from environments.base import Sandbox, SandboxSpec

    errors = Console(stderr=True)
    with _told():
        source = _source(tasks)
        chosen = _select(source, ids, filter, slice)
        kind = choose(sandbox).kind

    def opened(spec: SandboxSpec) -> Sandbox:
        return open_sandbox(spec, kind)

    try:
        with _told():
            done = _validated(chosen, opened, kind, workers, out, errors)
    except KeyboardInterrupt:
        kept = f"; what was done is kept in {out}" if out else ""
        fail(f"interrupted{kept}", 130)
    if as_json:
        typer.echo(json.dumps([asdict(item) for item in done], indent=2))
    else:
        _show(done)
    _notes(source)
    raise typer.Exit(0 if all(item.valid for item in done) else 1)


@tasks_app.command("build")
def build_command(
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="Where the rows go: .jsonl, or .json as a list.")
    ],
    tasks: Source = "SWE-bench/SWE-bench_Lite",
    ids: Ids = None,
) -> None:
    """Build images of SWE-bench instances here, from releases, where no registry has them.

    A few instances can be had in this way. Their rows name image and script, so that they can be
    graded by `agent eval --tasks FILE` and by the official harness.
    """
    console = Console(stderr=True)

    def say(text: str) -> None:
        console.print(Text(text, "dim"), highlight=False, soft_wrap=True)

    with _told():
        from tasks import TaskError
        from tasks.local_images import RECIPES, build
        from tasks.swe_bench_rows import SweRow

        source = _source(tasks)
        here = [entry.instance_id for entry in source.entries if entry.instance_id in RECIPES]
        if not ids and not here:
            raise TaskError(f"{tasks} has none of {', '.join(RECIPES)}")
        chosen = _select(source, ids or here)
        rows = [entry.row for entry in chosen if isinstance(entry.row, SweRow)]
        if len(rows) < len(chosen):
            raise TaskError(f"{tasks} holds no rows of SWE-bench")
        for record in build(rows, out, say):
            typer.echo(f"{record['instance_id']}  {record['image']}")
    typer.echo(f"written to {out}")


def _validated(
    entries: list[Entry],
    opened: Any,
    kind: str,
    workers: int,
    out: Path | None,
    console: Console,
) -> list[Validation]:
    """The results in the order of the entries, those of the file included."""
    from contextlib import nullcontext

    from tasks.validate import Results, validate

    found: dict[str, Validation] = {}
    with Results(out).open() if out is not None else nullcontext() as results:
        if results is not None:
            known = [results.usable(entry, kind) for entry in entries]
            found = {item.instance_id: item for item in known if item is not None}
        left = [entry for entry in entries if entry.instance_id not in found]
        if found:
            console.print(f"{len(found)} of {len(entries)} are in {out} already", highlight=False)
        with _bar(console) as bar:
            line = bar.add_task("", total=len(left), now="", bad="")
            bad = 0

            def began(entry: Entry) -> None:
                bar.update(line, now=entry.instance_id)

            for item in validate(left, opened, workers=workers, sandbox=kind, on_start=began):
                found[item.instance_id] = item
                if results is not None:
                    results.add(item)
                bad += not item.valid
                bar.update(line, advance=1, bad=f"{bad} not valid" if bad else "")
    return [found[entry.instance_id] for entry in entries]


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("validating"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[red]{task.fields[bad]}"),
        TextColumn("{task.fields[now]}", markup=False),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _show(done: list[Validation]) -> None:
    for item in done:
        if item.valid:
            said = Text.assemble(
                ("valid    ", "green"), f" {item.instance_id}  {item.seconds:.1f} s"
            )
        else:
            word = "no result" if item.error else "not valid"
            said = Text.assemble((word, "red"), f" {item.instance_id}  {item.why}")
        Console().print(said, highlight=False, soft_wrap=True)
        for note in item.notes:
            Console().print(Text(f"          {note}", "dim"), highlight=False, soft_wrap=True)
    bad = [item.instance_id for item in done if not item.valid]
    typer.echo(f"{len(done) - len(bad)} of {len(done)} valid")
    if bad:
        typer.echo(f"leave out: {','.join(bad)}")


def _source(tasks: str) -> TaskSource:
    from tasks.source import open_source

    return open_source(tasks)


def _select(
    source: TaskSource,
    ids: list[str] | None,
    filter: str = "",
    slice: str = "",
    shuffle: bool = False,
    seed: int = 0,
) -> list[Entry]:
    from tasks.source import select

    named = [name.strip() for part in ids or () for name in part.split(",") if name.strip()]
    return select(source.entries, ids=named, filter=filter, slice=slice, shuffle=shuffle, seed=seed)


def _columns(entry: Entry) -> tuple[str, str, str, str]:
    return entry.instance_id, entry.kind, entry.repo, entry.title


def _notes(source: TaskSource) -> None:
    for note in source.notes:
        Console(stderr=True).print(Text(note, "yellow"), highlight=False, soft_wrap=True)


@contextmanager
def _told() -> Iterator[None]:
    """What a user can cause ends the command with its text."""
    from environments import SandboxError
    from tasks import TaskError

    try:
        yield
    except (TaskError, SandboxError) as error:
        fail(str(error), 1)
