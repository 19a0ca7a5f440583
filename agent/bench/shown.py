"""What `agent bench` shows at a terminal: progress and tables."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rich.console import Console


def status(errors: Console, words: str, quiet: bool) -> AbstractContextManager[object]:
    """A line that stands there while something is done."""
    return nullcontext() if quiet else errors.status(words)


def bar(errors: Console, quiet: bool) -> Any:
    """A progress bar with the time that is left."""
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
        disable=quiet,
    )


def console() -> Console:
    """Of a terminal as wide as it is; what goes to a file needs no narrow tables."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def print_table(console: Console, title: str, header: list[str], rows: list[list[str]]) -> None:
    """Numbers stand on the right."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for number, name in enumerate(header):
        table.add_column(name, justify="left" if number == 0 else "right", no_wrap=number == 0)
    for row in rows:
        table.add_row(*row)
    console.print(table)
