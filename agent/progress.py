"""How long work tells the person at the terminal how far it is."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichBar


class Progress(Protocol):
    """Told what is being done; free to show it or not."""

    def say(self, text: str) -> None:
        """One line that the person should read."""
        ...

    def begin(self, what: str, total: int) -> None:
        """A piece of work of `total` bytes starts; it replaces the one before."""
        ...

    def at(self, done: int) -> None:
        """`done` bytes of it are there."""
        ...


class Silent:
    """Shows nothing."""

    def say(self, text: str) -> None: ...

    def begin(self, what: str, total: int) -> None: ...

    def at(self, done: int) -> None: ...


class TerminalProgress:
    """A bar on stderr, so that stdout holds results only. A context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self._bar = RichBar(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=console or Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task("", visible=False, total=None)

    def say(self, text: str) -> None:
        self._bar.console.print(text, highlight=False, markup=False)

    def begin(self, what: str, total: int) -> None:
        self._bar.reset(self._task, description=what, total=total, completed=0, visible=True)

    def at(self, done: int) -> None:
        self._bar.update(self._task, completed=done)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
