"""Signals as exceptions, and the one that `nohup` takes away."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from agent.interrupts import Interrupted, interruptible, uninterrupted


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_an_exception_that_names_it(number: signal.Signals) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match=number.name):
        with interruptible():
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before


def test_what_has_to_be_finished_is() -> None:
    with interruptible(), uninterrupted():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)


def test_what_nohup_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with interruptible():
        os.kill(os.getpid(), signal.SIGHUP)
        with interruptible():
            os.kill(os.getpid(), signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
