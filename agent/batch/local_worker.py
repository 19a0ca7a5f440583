"""A worker process, as the engine that started it sees it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.batch.item import Item
from agent.batch.store import Store
from agent.timestamps import utc


@dataclass(slots=True, eq=False)
class Job:
    """An item on its way through an engine."""

    item: Item
    tries: int = 0
    started: str = ""
    heard: float = 0.0  # when its worker last said something of it
    crowded: bool = False  # in this try something else was done beside it
    alone: bool = False  # nothing else may be


class LocalWorker:
    """A process of `agent.batch.worker`: items go in by its stdin, events come by a pipe. It has up
    to `sessions` items at a time.

    It is started as a program of its own, not forked: torch and its threads do not survive a fork,
    and the number of threads has to be set before torch is imported.
    """

    def __init__(
        self,
        number: int,
        work: str,
        store: Store,
        env: Mapping[str, str],
        stamp: Mapping[str, Any],
        *,
        sessions: int = 1,
    ) -> None:
        self.number = number
        self.sessions = sessions
        self.jobs: dict[str, Job] = {}  # by the item's key
        self.ready = False
        self._leaving = False  # it takes no further job
        self._rest = b""
        self._messages: list[dict[str, Any]] = []
        self._eof = False
        self._log = store.folder / "logs" / f"worker-{number}.log"
        self._log.parent.mkdir(exist_ok=True)
        self.events, theirs = os.pipe()
        os.set_blocking(self.events, False)
        passed = [theirs, *([store.lock_fd] if store.lock_fd is not None else [])]
        start = {
            "work": work,
            "folder": str(store.folder.resolve()),
            "events": theirs,
            "lock": store.lock_fd,
            "parent": os.getpid(),
            "pythonpath": os.environ.get("PYTHONPATH"),
            "stamp": dict(stamp),
            "sessions": sessions,
        }
        # This package first, wherever it was found, then all else that can be imported here.
        places = [str(Path(__file__).resolve().parents[2]), *map(os.path.abspath, sys.path)]
        paths = os.pathsep.join(dict.fromkeys(places))
        try:
            with self._log.open("ab") as log:
                self._log_start = log.tell()
                self._process = subprocess.Popen(
                    # -P: a folder `agent` where the user stands is not this package
                    [sys.executable, "-P", "-m", "agent.batch.worker"],
                    env={**os.environ, **env, "PYTHONPATH": paths},
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    pass_fds=passed,
                    start_new_session=True,  # a Ctrl-C reaches workers through their engine only
                )
        except BaseException:
            os.close(self.events)
            raise
        finally:
            os.close(theirs)
        self._say(start)

    @property
    def has_room(self) -> bool:
        """Whether it can be given any job at all."""
        return self.ready and not self._leaving and len(self.jobs) < self.sessions

    def takes(self, job: Job) -> bool:
        """Whether it can be given this job."""
        if not self.has_room:
            return False
        return not self.jobs or not (job.alone or any(each.alone for each in self.jobs.values()))

    @property
    def ended(self) -> bool:
        """Whether the process is gone and all it said was read."""
        return self._eof and not self._messages

    def give(self, job: Job) -> None:
        """Start it on a job."""
        job.started = utc()
        job.heard = time.monotonic()
        job.crowded = False
        self.jobs[job.item.key] = job
        if len(self.jobs) > 1:
            for each in self.jobs.values():
                each.crowded = True
        self._say({"item": job.item.model_dump(mode="json"), "try": job.tries})

    def drop(self, job: Job) -> None:
        """It is not at this job any more."""
        del self.jobs[job.item.key]
        self._end_if_idle()

    def leave(self) -> None:
        """Have it end when it has done what it was given."""
        self._leaving = True
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._leaving and not self.jobs:
            self._say({"stop": True})

    def read(self) -> None:
        """Take what it said. Never waits."""
        while True:
            try:
                data = os.read(self.events, 1 << 16)
            except BlockingIOError:
                return
            if not data:
                self._eof = True
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                try:
                    self._messages.append(json.loads(line))
                except ValueError:
                    continue  # torn by a signal in mid-write; the worker ends next

    def messages(self) -> Iterator[dict[str, Any]]:
        """What it said and was not heard so far."""
        while self._messages:
            message = self._messages.pop(0)
            self.ready = self.ready or message.get("event") == "ready"
            if (job := self.jobs.get(message.get("key", ""))) is not None:
                job.heard = time.monotonic()
            yield message

    def silent_for(self, seconds: float) -> list[Job]:
        """Jobs of which nothing was heard for so long."""
        now = time.monotonic()
        return [job for job in self.jobs.values() if now - job.heard > seconds]

    def stop(self) -> None:
        """Ask it to end: at once if idle, in order and with its patch if at work."""
        self._say({"stop": True})
        if self.jobs:
            self._signal(signal.SIGINT)

    def kill(self) -> None:
        """End it now; what it wrote is then at rest."""
        self._leaving = True
        self._signal(signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)

    def close(self) -> None:
        """Wait for its end, which has to be near, and let go of the pipes."""
        try:
            if self._process.stdin is not None:
                self._process.stdin.close()
        except OSError:
            pass  # what it did not read is of no use any more
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self.events)

    def last_words(self) -> str:
        """How the process ended, and the last line it printed."""
        try:
            code: int | None = self._process.wait(5)
        except subprocess.TimeoutExpired:
            code = None
        how = "goes on without its pipe" if code is None else f"ended with {code}"
        if code is not None and code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                how += " (by hand, or for lack of memory)"
        with self._log.open("rb") as log:
            log.seek(max(self._log_start, self._log.stat().st_size - 4096))
            lines = log.read().decode(errors="replace").strip().splitlines()[-1:]
        said = f"; {self._log.name} ends with: {lines[0][:300]}" if lines else ""
        return f"worker {self.number} (process {self._process.pid}) {how}{said}"

    def _say(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            pass  # it died: reading from it shows that

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)
