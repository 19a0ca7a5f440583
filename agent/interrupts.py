"""Ctrl-C and SIGTERM as an exception, so that a run ends in order with the patch so far."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_Handler = Callable[[int, FrameType | None], object] | signal.Handlers
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """The run was asked to end. Its text is the signal's name."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Within this, the signals raise Interrupted in the main thread.

    A SIGHUP that is ignored, as `nohup` has it, stays ignored.
    """

    def raise_interrupted(number: int, frame: FrameType | None) -> None:
        raise Interrupted(signal.Signals(number).name)

    with _handled(raise_interrupted):
        yield


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Within this, the signals are ignored: what has to be finished is finished."""

    with _handled(signal.SIG_IGN):
        yield


@contextmanager
def _handled(handler: _Handler) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        for number in _SIGNALS:
            if number is not signal.SIGHUP or before[number] is not signal.SIG_IGN:
                signal.signal(number, handler)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old if old is not None else signal.SIG_DFL)
