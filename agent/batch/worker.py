"""The program of a worker process: `python -m agent.batch.worker`, started by the local engine.

Reads lines of JSON from stdin: a greeting, then items, then {"stop": true}. Says what happens on a
pipe of its own; what is printed goes into a log. It never outlives its engine: a stdin that ends
without a stop means that the engine was killed.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import queue
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from agent.batch.engine import Work, blank
from agent.batch.item import Item
from agent.batch.store import ERROR, FINISHED, INTERRUPTED, Store
from agent.batch.worker_state import WorkerState
from agent.interrupts import Interrupted
from agent.timestamps import utc

_PR_SET_PDEATHSIG = 1
_ORPHANED = 3


class Worker:
    """Takes items until it is told to stop."""

    def __init__(self, commands: int, greeting: Mapping[str, Any]) -> None:
        self._events = int(greeting["events"])
        self._stamp = dict(greeting["stamp"])
        self._store = Store(Path(greeting["folder"]))
        self._state = WorkerState(int(greeting.get("sessions", 1)))
        self._lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._at_work = False
        self._stopped_by = ""  # the signal's name
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        threading.Thread(target=self._listen, args=(commands,), daemon=True).start()

    def broken(self, why: str) -> None:
        """Say that no work can be done."""
        self._say({"event": "broken", "error": why[:1000]})

    def run(self, work: Work) -> None:
        """The loop. Several items at a time are each in a thread of their own."""
        self._say({"event": "ready"})
        threads: list[threading.Thread] = []
        while (line := self._next()) is not None:
            item, tries = Item.model_validate(line["item"]), int(line["try"])
            if self._state.sessions == 1:
                self._do(item, tries, work)
                continue
            threads = [thread for thread in threads if thread.is_alive()]
            name = f"session-{item.instance_id}"
            threads.append(
                threading.Thread(
                    target=self._session, args=(item, tries, work), name=name, daemon=True
                )
            )
            threads[-1].start()
        told = False
        while any(thread.is_alive() for thread in threads):
            if self._stopped_by and not told:
                self._state.stop(self._stopped_by)
                told = True
            time.sleep(0.05)  # a signal is acted on in between
        self._state.close()

    def _next(self) -> dict[str, Any] | None:
        while not self._stopped_by:
            try:  # a signal is acted on within the time
                return self._lines.get(timeout=0.5)
            except queue.Empty:
                continue
        return None

    def _session(self, item: Item, tries: int, work: Work) -> None:
        try:
            self._do(item, tries, work)
        except BaseException:  # its result could not be kept: nobody would hear of it otherwise
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)

    def _do(self, item: Item, tries: int, work: Work) -> None:
        """Make the run, keep its result, and say so."""
        started, began = utc(), time.monotonic()
        spent = False
        try:
            self._at_work = True
            folder = self._store.fresh(item)
            result = self._settled(work(item, folder, _Told(self._say, item.key), self._state))
        except KeyboardInterrupt:
            result = {"state": INTERRUPTED}
        except BaseException as error:  # whatever it was, the batch goes on
            text = f"{type(error).__name__}: {error}".strip(": ")
            result = {"state": ERROR, "error": text, "trace": traceback.format_exc()}
            traceback.print_exc()
            spent = not _harmless(error)
        finally:
            self._at_work = False
        state = str(result["state"])
        if state != INTERRUPTED:
            data = {**blank(), **result, "tries": tries, "started": started, "ended": utc()}
            total = round(time.monotonic() - began, 3)
            data["seconds"] = {**data["seconds"], "total": total}
            state = str(self._store.write(item, {**data, **self._stamp})["state"])
            spent = spent or (state == ERROR and _uses_cuda())
        last = spent or state == INTERRUPTED or bool(self._stopped_by)
        self._say({"event": "done", "key": item.key, "state": state, "last": last})

    def _settled(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """The result with its state, which follows from how the run ended and was graded."""
        result = dict(found)
        verdict = result.get("verdict") or {}
        if result.get("state") == INTERRUPTED or result.get("exit") == INTERRUPTED:
            result["state"] = INTERRUPTED
        elif result.get("state") == ERROR or result.get("exit") == "sandbox_lost":
            result["state"] = ERROR
            result["error"] = result.get("error") or "SandboxLost: the sandbox was lost"
        elif verdict.get("status") == "error":
            result["state"] = ERROR
            result["error"] = f"Grading: {verdict.get('detail', '')}"[:2000]
        else:
            result["state"] = FINISHED
        json.dumps(result)  # what cannot be kept is an error of the work
        return result

    def _say(self, message: Mapping[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        if len(line) > select.PIPE_BUF:
            return  # shorter ones are written whole, from any thread
        try:
            os.write(self._events, line)
        except BrokenPipeError:
            os._exit(_ORPHANED)

    def _listen(self, commands: int) -> None:
        """In a thread: lines from the engine, and its end."""
        with os.fdopen(commands, "rb") as lines:
            for line in lines:
                message = json.loads(line)
                if message.get("stop"):
                    self._lines.put(None)
                    return
                self._lines.put(message)
        os._exit(_ORPHANED)  # without a word: the engine was killed, and sandboxes end with us

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stopped_by = signal.Signals(number).name
        if self._at_work and self._state.sessions == 1:
            raise Interrupted(self._stopped_by)


class _Told:
    """What the work function tells of one item, on its way to the engine."""

    def __init__(self, say: Callable[[Mapping[str, Any]], None], key: str) -> None:
        self._say, self._key = say, key
        self._last: Mapping[str, Any] = {}
        self._at = 0.0

    def __call__(self, data: Mapping[str, Any]) -> None:
        told = {**data, "event": "tell"}
        if told == self._last and time.monotonic() - self._at < 1:
            return  # the same for every token
        self._last, self._at = told, time.monotonic()
        self._say({"event": "tell", "key": self._key, "data": told})


def main() -> int:
    """Entry point."""
    commands = os.dup(0)  # no child of ours may hold what the engine watches
    os.set_inheritable(commands, False)
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    greeting = json.loads(_line(commands))
    for handle in (greeting["events"], greeting["lock"]):
        if handle is not None:
            os.set_inheritable(handle, False)
    _end_with(int(greeting["parent"]))
    # The engine's module path served to start this; programs started from here have their own.
    os.environ.pop("PYTHONPATH", None)
    if greeting["pythonpath"] is not None:
        os.environ["PYTHONPATH"] = greeting["pythonpath"]
    worker = Worker(commands, greeting)
    try:
        work = resolve(greeting["work"])
    except Exception as error:  # a module of the user's may raise anything on import
        traceback.print_exc()
        worker.broken(f"{greeting['work']} cannot be used: {error}")
        return 1
    worker.run(work)
    return 0


def resolve(name: str) -> Work:
    """The function `module:function`."""
    module, _, function = name.partition(":")
    found: Work = getattr(importlib.import_module(module), function)
    return found


def _line(handle: int) -> bytes:
    """One line, byte by byte: what follows it belongs to the reader thread."""
    line = b""
    while not line.endswith(b"\n"):
        char = os.read(handle, 1)
        if not char:
            sys.exit(_ORPHANED)
        line += char
    return line


def _end_with(parent: int) -> None:
    """Have the kernel end this process with its engine, where it can do so."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):
        return  # another system: the end of the pipe has to do
    if os.getppid() != parent:
        sys.exit(_ORPHANED)


def _harmless(error: BaseException) -> bool:
    """Whether it leaves nothing behind in this process: a sandbox, or a task's files, could not be
    had. (Both packages are loaded where one of them raised it.)"""
    kinds = (("environments", "SandboxError"), ("tasks", "TaskError"))
    found = (getattr(sys.modules.get(module), name, None) for module, name in kinds)
    return isinstance(error, tuple(kind for kind in found if kind is not None))


def _uses_cuda() -> bool:
    """Whether a CUDA context lives here: after an error it may answer nothing but errors."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


if __name__ == "__main__":
    sys.exit(main())
