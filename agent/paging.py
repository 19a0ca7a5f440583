"""A run one page at a time, by keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import typer
from rich.text import Text

from agent.replay import Replay
from agent.show import Show

Page = Callable[[], None]


def pages_of(shown: Show, replay: Replay) -> Iterator[Page]:
    """What is shown one at a time: the beginning, each step, the end."""

    def beginning() -> None:
        shown.head(replay)
        if start := replay.lines.start:
            shown.entry(replay, start)

    yield beginning
    for entry in replay.lines.entries:
        if entry["kind"] in ("step", "resume"):
            yield partial(shown.entry, replay, entry)
    yield partial(shown.end, replay)


def turn_pages(pages: list[Page], shown: Show) -> None:
    """Show the first page, and others by the keys pressed, until one says that it is enough."""
    at = 0
    while True:
        shown.console.clear()
        pages[at]()
        where = f"{at + 1} of {len(pages)} · n next, p back, g first, e last, f full, q quit"
        shown.console.print(Text(where, "reverse"), highlight=False)
        try:
            key = typer.getchar()
        except (EOFError, KeyboardInterrupt):
            return
        if key in ("q", "Q", "\x1b", "\x03", "\x04"):
            return
        if key in ("n", " ", "\r", "\n", "j", "\x1b[C", "\x1b[B", "\x1b[6~"):
            at = min(at + 1, len(pages) - 1)
        elif key in ("p", "b", "k", "\x7f", "\x1b[D", "\x1b[A", "\x1b[5~"):
            at = max(at - 1, 0)
        elif key in ("g", "\x1b[H"):
            at = 0
        elif key in ("e", "G", "\x1b[F"):
            at = len(pages) - 1
        elif key == "f":
            shown.full = not shown.full
