"""How a command says that it failed."""

from __future__ import annotations

from typing import NoReturn

import typer
from rich.console import Console
from rich.text import Text

from agent.display import safe


def fail(message: str, code: int, console: Console | None = None) -> NoReturn:
    """Say `message` on `console`, by default stderr, and end the command with `code`.

    What a message quotes may come from a file or a model: it is printed as plain text.
    """
    console = console or Console(stderr=True)
    console.print(Text(f"error: {safe(message)}", "red"), highlight=False, soft_wrap=True)
    raise typer.Exit(code)
