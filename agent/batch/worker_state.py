"""What a worker keeps from one item to the next: models, above all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from agent.interrupts import Interrupted

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Kept:
    key: Hashable
    stop: Callable[[Any, str], None] | None
    end: Callable[[Any], None] | None
    value: Any = None
    error: BaseException | None = None  # making it failed
    made: bool = False
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
        end, in another thread and for the reason given. Raises Interrupted for who waits then, and
        what `make` raised for all who wanted it.
        """
        kept = self._taken(what, key, _Kept(key, stop, end), make)
        try:
            value: T = kept.value
            yield value
        finally:
            with self._change:
                kept.users -= 1
                self._change.notify_all()

    def _taken(self, what: str, key: Hashable, fresh: _Kept, make: Callable[[], Any]) -> _Kept:
        """What is kept, with one user more: `fresh`, if it is not there yet."""
        with self._change:
            while self._stopped is None:
                kept = self._kept.get(what)
                if kept is None or (kept.key != key and not kept.users):
                    del kept
                    self._drop(what)
                    self._kept[what] = fresh
                    fresh.users = 1
                    break
                if kept.key == key and kept.made:
                    if kept.error is not None:
                        raise kept.error
                    kept.users += 1
                    return kept
                del kept
                self._change.wait()
            else:
                raise Interrupted(self._stopped)
        try:
            fresh.value = make()  # not under the lock: `stop` is not to wait for it
        except BaseException as error:
            fresh.error = error
            fresh.users = 0
            raise
        finally:
            with self._change:
                fresh.made = True
                if isinstance(fresh.error, KeyboardInterrupt):
                    del self._kept[what]
                self._change.notify_all()
        if self._stopped is not None and fresh.stop is not None:
            fresh.stop(fresh.value, self._stopped)  # it came too late for `stop`
        return fresh

    def stop(self, why: str) -> None:
        """Make all sessions end."""
        with self._change:
            self._stopped = why
            for kept in self._kept.values():
                if kept.stop is not None and kept.made and kept.error is None:
                    kept.stop(kept.value, why)
            self._change.notify_all()

    def close(self) -> None:
        """Drop everything, which nobody uses any more."""
        with self._change:
            for what in list(self._kept):
                self._drop(what)

    def _drop(self, what: str) -> None:
        kept = self._kept.pop(what, None)
        if kept is not None and kept.end is not None and kept.made and kept.error is None:
            kept.end(kept.value)
