"""Carries out a batch: what is finished stays, all else is given to an engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import Any, Protocol

from agent.batch.engine import Engine
from agent.batch.item import Item
from agent.batch.store import Result, Store
from agent.interrupts import interruptible

DEFAULT_WORK = "agent.batch.work:run_item"


class Watcher(Protocol):
    """Told what happens, for display."""

    def event(self, item: Item, event: Mapping[str, Any]) -> None: ...


def carry_out(
    items: Iterable[Item],
    store: Store,
    engine: Engine,
    work: str = DEFAULT_WORK,
    watcher: Watcher | None = None,
) -> dict[str, Result]:
    """Run what is not finished in the store; returns the result of every item, by key.

    Ctrl-C, SIGTERM and SIGHUP end it in order, as KeyboardInterrupt; called again, it goes on.
    Raises EngineError where no work can be done.
    """
    items = list(items)
    done = store.finished(items)
    left = [item for item in items if item.key not in done]

    def tell(item: Item, event: Mapping[str, Any]) -> None:
        if watcher is not None:
            watcher.event(item, event)

    with interruptible(), closing(engine.run(left, work, on_event=tell)) as running:
        for item, result in running:
            done[item.key] = result
    return {item.key: done[item.key] for item in items}
