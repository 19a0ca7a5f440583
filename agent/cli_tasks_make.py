"""`agent tasks make`: an instance of your own, from two releases or from two commits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from agent.cli_errors import fail

if TYPE_CHECKING:
    from tasks.make import Made

_PACKAGE, _REPO = "From two releases of a package", "From two commits of a repository"
_WHAT, _HOW = "The instance", "How it is tried"


def make(
    out: Annotated[
        Path,
        typer.Option(
            metavar="FILE|DIR",
            help="Where the instance is added. With --package a FILE.jsonl of rows; with --repo a "
            "folder, which gets instances.jsonl and a folder of files for each instance.",
            rich_help_panel=_WHAT,
        ),
    ],
    package: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Its name on the index.", rich_help_panel=_PACKAGE),
    ] = None,
    old: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="V1", help="The release to be mended.", rich_help_panel=_PACKAGE
        ),
    ] = None,
    new: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="V2", help="The release whose tests decide.", rich_help_panel=_PACKAGE
        ),
    ] = None,
    repo: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="A clone. It is read only.", rich_help_panel=_REPO),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(metavar="SHA", help="The commit to be mended.", rich_help_panel=_REPO),
    ] = None,
    fix: Annotated[
        str | None,
        typer.Option(metavar="SHA", help="The commit whose tests decide.", rich_help_panel=_REPO),
    ] = None,
    issue: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT|FILE",
            help="What is wrong. Without it: the names of the failing tests and the notes on the "
            "release; with --repo the message of the fix, which may give it away.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    instance_id: Annotated[
        str | None,
        typer.Option(
            "--id", metavar="ID", help="Default: NAME-V2, NAME-SHA.", rich_help_panel=_WHAT
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an instance of that id.", rich_help_panel=_WHAT)
    ] = False,
    tests: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="Files or folders of tests, if they are not found. May be repeated.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    test_cmd: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="How they are run: a pytest command line (only pytest can be graded so far).",
            rich_help_panel=_HOW,
        ),
    ] = None,
    requires: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REQ",
            help="What the tests need beside what the metadata says. May be repeated.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    extra: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Extras or dependency groups to install. Default: test, tests, testing, those "
            "that there are.",
            rich_help_panel=_HOW,
        ),
    ] = None,
    pythonpath: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Folder of the modules, if not found.", rich_help_panel=_HOW
        ),
    ] = None,
    runs: Annotated[
        int, typer.Option(min=2, max=20, help="Runs of each source.", rich_help_panel=_HOW)
    ] = 2,
    timeout: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="For one run.", rich_help_panel=_HOW)
    ] = 900.0,
    sandbox: Annotated[
        str, typer.Option(help="auto, docker or bubblewrap.", rich_help_panel=_HOW)
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the row as JSON.")] = False,
) -> None:
    """Make an instance: run the new tests on the old and the new source, keep what is stable.

    The tests run in sandboxes, each source at least twice. Tests that fail before and pass after
    are to be fixed; those that do not come out the same every time are dropped and named. Where
    nothing is left to grade by, the reason is told and nothing is written. Only pure Python is
    tried: nothing is built, and what the tests need is taken from wheels.

    Ends with 0 if the instance was written, 1 if it was refused or something failed, 2 for options
    that do not fit.
    """
    errors = Console(stderr=True)
    if package and out.suffix != ".jsonl":
        raise typer.BadParameter(
            f"with --package it is a FILE.jsonl, not {out}", param_hint="--out"
        )
    _check_options(package, old, new, repo, base, fix)
    with errors.status("loading"):
        from environments import SandboxError, choose, open_sandbox
        from tasks import TaskError
        from tasks.made import MadeRow
        from tasks.make import (
            ROWS,
            Wishes,
            Workbench,
            from_commits,
            from_releases,
            refuse_taken,
            write,
        )
        from tasks.release_pair import ReleasePair
    wishes = Wishes(
        issue=issue,
        requires=tuple(requires or ()),
        extras=tuple(extra) if extra else None,
        tests=tuple(tests or ()),
        test_command=test_cmd,
        pythonpath=pythonpath,
        instance_id=instance_id,
        runs=runs,
        seconds=timeout,
    )
    file = out if package or out.suffix == ".jsonl" else out / ROWS

    def check_id(name: str) -> None:
        refuse_taken(file, name, ReleasePair if package else MadeRow, force=force)

    try:
        box = choose(sandbox).kind
        with errors.status("starting") as status:

            def say(text: str) -> None:
                status.update(Text(text.strip()))
                errors.print(Text(text, "dim"), highlight=False, soft_wrap=True)

            bench = Workbench(
                lambda spec: open_sandbox(spec, box, progress=say), say=say, check_id=check_id
            )
            if package:
                made = from_releases(package, str(old), str(new), wishes, bench)
            else:
                made = from_commits(Path(str(repo)), str(base), str(fix), wishes, bench)
            write(made, file, force=force)
    except (TaskError, SandboxError) as error:
        fail(str(error), 1, errors)
    except KeyboardInterrupt:
        fail("interrupted; nothing was written", 130, errors)
    if as_json:
        typer.echo(json.dumps(made.row.model_dump(mode="json") | dict(made.about), indent=2))
    else:
        _show(made, file)


def _check_options(package: str | None, old: str | None, new: str | None, *commits: object) -> None:
    """BadParameter unless the options of exactly one of the two ways are given."""
    releases = (package, old, new)
    if any(map(bool, releases)) and any(map(bool, commits)):
        raise typer.BadParameter("give --package, --from, --to or --repo, --base, --fix, not both")
    if not any(map(bool, (*releases, *commits))):
        raise typer.BadParameter("give --package, --from and --to, or --repo, --base and --fix")
    for names, values in (
        (("--package", "--from", "--to"), releases),
        (("--repo", "--base", "--fix"), commits),
    ):
        missing = [name for name, value in zip(names, values, strict=True) if not value]
        if any(map(bool, values)) and missing:
            raise typer.BadParameter(f"{' and '.join(missing)} must be given as well")


def _show(made: Made, file: Path) -> None:
    """What was made, what was dropped and why, and how to use it."""
    console, row, found = Console(), made.row, made.split

    def line(text: str, style: str = "") -> None:
        console.print(Text(text, style), highlight=False, soft_wrap=True)

    line(f"{row.instance_id}: {made.issue.title}", "bold")
    line(f"  issue: {made.issue.source}")
    line(f"  to be fixed: {_some(found.fail_to_pass)}")
    line(f"  to be kept: {len(found.pass_to_pass)} tests")
    if found.failing:
        line(f"  failing with both, left out: {_some(found.failing)}")
    for test, why in found.dropped.items():
        line(f"  dropped: {test}: {why}", "yellow")
    for note in made.notes:
        line(f"  note: {note}", "yellow")
    if not found.pass_to_pass:
        line("  note: no test passes with both, so nothing shows what a patch breaks", "yellow")
    line(f"written to {file}")
    line(f"  try it: agent run --instance {row.instance_id}@{file}")


def _some(items: Any, most: int = 10) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more
