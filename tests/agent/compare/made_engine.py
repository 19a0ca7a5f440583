"""An engine and a work function for `agent compare`: results made up, kept as a batch keeps them.

What is asked of it goes through the module: `calls` notes every item, `errors` and `stop_after`
say what goes wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from made_results import result, turn

from agent.batch.item import Item
from agent.batch.store import Store

calls: list[tuple[str, str]] = []
errors: set[str] = set()  # instances
stop_after: list[int] = []


def reset() -> None:
    calls.clear()
    errors.clear()
    stop_after.clear()


def work(*_: Any) -> None:
    """Stands for the real one, which loads models."""


class Engine:
    """dense resolves all, others what has a 7 in its name; one turn more for each seed."""

    def __init__(self, store: Store, **_: Any) -> None:
        self.store = store

    def run(
        self, items: Iterable[Item], work: str, *, on_event: Any = None
    ) -> Iterator[tuple[Item, dict[str, Any]]]:
        assert work == "made_engine:work"
        for item in items:
            if stop_after and stop_after[0] == 0:
                raise KeyboardInterrupt
            with suppress(IndexError):
                stop_after[0] -= 1
            calls.append((item.cell, item.instance_id))
            dense = item.options["method"] == "dense"
            made = result(
                item,
                dense or "7" in item.instance_id,
                turns=[turn(evictions=0 if dense else 2)] * (2 + item.seed),
                error="Sandbox: gone" if item.instance_id in errors else None,
            )
            kept = self.store.write(item, made)
            on_event(item, {"event": "start", "try": 1, "worker": 0})
            on_event(item, {"event": "end", "result": kept})
            yield item, kept
