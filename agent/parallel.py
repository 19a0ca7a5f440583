"""Attempts side by side, each in a thread of its own, with one model for all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.text import Text

from agent.display import fill, safe

if TYPE_CHECKING:
    from agent.loop import Step

T = TypeVar("T")


def side_by_side(
    works: Sequence[Callable[[], T]], *, stop: Callable[[str], None]
) -> list[T | BaseException]:
    """What each of `works` returned or raised, all done at once: none ends another.

    An interrupt of the caller is passed to `stop`, which is to make them end; they are waited for.
    A second one is raised at once.
    """
    found: list[T | BaseException] = [RuntimeError("it was not begun")] * len(works)
    # Not `join`: after an interrupted one, Python takes a thread that runs for one that is over.
    over = [threading.Event() for _ in works]

    def run(number: int) -> None:
        try:
            found[number] = works[number]()
        except BaseException as error:  # the caller finds it; others go on
            found[number] = error
        finally:
            over[number].set()

    threads = [
        threading.Thread(target=run, args=(number,), name=f"attempt-{number + 1}", daemon=True)
        for number in range(len(works))
    ]

    def wait() -> None:
        for thread, done in zip(threads, over, strict=True):
            # In between, signals are acted on; one of them may have come before all had begun.
            while not done.wait(0.5) and thread.ident is not None:
                pass

    try:
        for thread in threads:
            thread.start()
        wait()
    except KeyboardInterrupt as error:
        stop(str(error) or "SIGINT")
        wait()
    return found


class LineWatcher:
    """Shows a line for each step: what several attempts do at once would not fit otherwise."""

    def __init__(
        self, console: Console, name: str, *, budget: int | None, quiet: bool = False
    ) -> None:
        self._console, self._name, self._budget, self._quiet = console, name, budget, quiet

    def opened(self, system: str, user: str, tokens: int) -> None:
        self._say(f"{tokens:,} tokens of instructions, issue and code")

    def resumed(self, steps: int, tokens: int) -> None:
        self._say(f"going on after step {steps}, with {tokens:,} tokens in the log")

    def prefill(self, fed: int, total: int) -> None:
        pass

    def text(self, reply_so_far: str) -> None:
        pass

    def step(self, step: Step) -> None:
        what = step.call.name if step.call is not None else f"no call: {step.problem or ''}"
        what = safe(what).partition("\n")[0][:80]
        cost = f"tool {step.tool_seconds:.1f} s"
        self._say(f"step {step.number}: {what} · {fill(step.reply.stats, self._budget)} · {cost}")

    def _say(self, text: str) -> None:
        if not self._quiet:
            self._console.print(Text(f"{self._name}: {text}"), highlight=False)
