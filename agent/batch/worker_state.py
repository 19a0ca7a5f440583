"""What a worker keeps from one item to the next: models, above all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from agent.interrupts import Interrupted

T = TypeVar("T")


@dataclass(slots=True)
class _Kept:
    key: Hashable
    value: Any
    stop: Callable[[Any, str], None] | None
    end: Callable[[Any], None] | None
    users: int = 0


class WorkerState:
    """Things that are costly to make, used by the sessions of a worker: items in threads.

    sessions: how many items there can be at once; with one, all is done in the main thread.
    """

    def __init__(self, sessions: int = 1) -> None:
        self.sessions = sessions
        self._kept: dict[str, _Kept] = {}
        self._change = threading.Condition()
        self._stopped: str | None = None

    @contextmanager
    def use(
        self,
        what: str,
        key: Hashable,
        make: Callable[[], T],
        *,
        stop: Callable[[T, str], None] | None = None,
        end: Callable[[T], None] | None = None,
    ) -> Iterator[T]:
        """The thing of this name that was made for `key`.

        Another one is dropped, by `end`, before this one is made, so that both never take memory at
        once; while somebody uses the other one, it is waited for. `stop` is to make all that use it
        end, in another thread and for the reason given. Raises Interrupted for who waits then.
        """
        with self._change:
            kept = self._of(what, key, make, stop, end)
            kept.users += 1
        try:
            value: T = kept.value
            yield value
        finally:
            with self._change:
                kept.users -= 1
                self._change.notify_all()

    def _of(
        self,
        what: str,
        key: Hashable,
        make: Callable[[], T],
        stop: Callable[[T, str], None] | None,
        end: Callable[[T], None] | None,
    ) -> _Kept:
        while self._stopped is None:
            kept = self._kept.get(what)
            if kept is not None and kept.key == key:
                return kept
            if kept is None or not kept.users:
                self._drop(what)
                del kept
                self._kept[what] = _Kept(key, make(), stop, end)
                return self._kept[what]
            del kept
            self._change.wait()
        raise Interrupted(self._stopped)

    def stop(self, why: str) -> None:
        """Make all sessions end."""
        with self._change:
            self._stopped = why
            for kept in self._kept.values():
                if kept.stop is not None:
                    kept.stop(kept.value, why)
            self._change.notify_all()

    def close(self) -> None:
        """Drop everything, which nobody uses any more."""
        with self._change:
            for what in list(self._kept):
                self._drop(what)

    def _drop(self, what: str) -> None:
        kept = self._kept.pop(what, None)
        if kept is not None and kept.end is not None:
            kept.end(kept.value)
