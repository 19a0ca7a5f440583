"""`agent images`: the Docker images that sandboxes use."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent.cli_errors import fail

if TYPE_CHECKING:
    import docker

images_app = typer.Typer(
    help="List, build, pull, check and prune images of sandboxes.", no_args_is_help=True
)
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def _engine() -> Iterator[docker.DockerClient]:
    """A client; every failure of sandboxes ends the command with its text."""
    from environments import SandboxError
    from environments.engine import connect

    try:
        client = connect(600.0)
        try:
            yield client
        finally:
            client.close()
    except SandboxError as error:
        fail(str(error), 1)


def _say(text: str) -> None:
    typer.echo(text, err=True)


@images_app.command("list")
def list_command(
    everything: Annotated[
        bool, typer.Option("--all", help="Also images that others made.")
    ] = False,
    as_json: _Json = False,
) -> None:
    """Show the images that are here."""
    from environments.image_store import list_images

    with _engine() as client:
        found = list_images(client, everything=everything)
    if as_json:
        typer.echo(json.dumps([asdict(item) for item in found], indent=2))
        return
    table = Table(box=None, pad_edge=False)
    for title in ("name", "id", "size", "kind"):
        table.add_column(title, no_wrap=True)
    for item in found:
        table.add_row(Text(item.name), item.identity, f"{item.size / 1e6:,.0f} MB", item.kind)
    Console().print(table)
    if not found:
        typer.echo("none yet; `agent images build` makes one, and so does the first run")


@images_app.command("build")
def build_command(
    base: Annotated[
        str | None,
        typer.Option(
            metavar="IMAGE", help="Build on this image (any with Python) by the Dockerfile."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the image built on --base.")
    ] = None,
) -> None:
    """Make the base image: from a registry if one answers, else from this machine's files."""
    from environments.images import REPOSITORY, base_image, build_from

    with _engine() as client:
        if base is None:
            made = base_image(client, _say)
        else:
            tag = "".join(c if c.isalnum() else "-" for c in base).strip("-").lower()
            made = build_from(client, base, name or f"{REPOSITORY}:on-{tag}", _say)
    typer.echo(made.name)


@images_app.command("pull")
def pull_command(names: Annotated[list[str], typer.Argument(metavar="NAME...")]) -> None:
    """Pull images, one after the other, again after what may pass (limits of the registry)."""
    from environments.images import pull_image

    with _engine() as client:
        for name in names:
            pull_image(client, name, _say)
            typer.echo(name)


@images_app.command("check")
def check_command(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME...]")] = None,
    pull: Annotated[str, typer.Option(help="missing: pull what is not here. never.")] = "never",
    as_json: _Json = False,
) -> None:
    """Open a sandbox of each image (default: the base) and verify what is inside.

    Ends with 1 if one cannot be used, or `python` in it is not the project's own.
    """
    from environments import SandboxError
    from environments.image_store import check_image

    if pull not in ("missing", "never"):
        raise typer.BadParameter(f"{pull!r}: it is missing or never", param_hint="--pull")
    rows: list[dict[str, Any]] = []
    wanted: Sequence[str | None] = names or (None,)  # None: our own base
    for name in wanted:
        try:
            rows.append({"ok": True, **asdict(check_image(name, pull=pull, progress=_say))})
        except SandboxError as error:
            rows.append({"ok": False, "image": name, "error": str(error)})
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        for row in rows:
            Console().print(
                Text(_sentence(row), "" if row["ok"] else "red"), highlight=False, soft_wrap=True
            )
    raise typer.Exit(0 if all(row["ok"] for row in rows) else 1)


def _sentence(row: dict[str, Any]) -> str:
    if not row["ok"]:
        return f"{row['image'] or 'base image'}: {row['error']}"
    python = f"{row['python']} ({row['python_version']})" if row["python"] else "no python"
    text = f"{row['image']}: {python}, {row['workdir']}, uid {row['user']}, {row['way']} commands"
    if row["project"]:
        text += f"; python is the project's own ({row['project']})"
    if row["missing"]:
        text += f"; missing: {', '.join(row['missing'])}"
    return text


@images_app.command("prune")
def prune_command(
    everything: Annotated[
        bool, typer.Option("--all", help="Also the base image of the present recipe.")
    ] = False,
) -> None:
    """Remove images that this project made and no longer uses."""
    from environments.image_store import prune_images

    with _engine() as client:
        done = prune_images(client, everything=everything)
    for name, what in done.items():
        typer.echo(f"{name}: {what}")
    if not done:
        typer.echo("nothing to remove")
