"""Who does the work of a batch: the small interface, and the engine that works on this machine.

An engine is given items and the name of a work function, and yields each item with its result once
that is kept in the store. Another engine (of a cluster, say) has to do no more than that.
"""

from __future__ import annotations

import os
import selectors
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from agent.batch.item import Item
from agent.batch.local_worker import Job, LocalWorker
from agent.batch.store import ERROR, INTERRUPTED, Result, Store

T = TypeVar("T")
OnEvent = Callable[[Item, Mapping[str, Any]], None]
_TICK = 0.5  # seconds between looks at workers that say nothing
_START_DEATHS = 3  # in a row: then none would start


class EngineError(Exception):
    """No work can be done at all; the text says why."""


class WorkerState:
    """What a worker keeps from one item to the next: models, above all."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Hashable, Any]] = {}

    def keep(self, what: str, key: Hashable, make: Callable[[], T]) -> T:
        """The thing of this name that was made for `key`; another one is dropped before the new
        one is made, so that both never take memory at once."""
        kept = self._kept.get(what)
        if kept is not None and kept[0] == key:
            found: T = kept[1]
            return found
        del kept
        self._kept.pop(what, None)
        value = make()
        self._kept[what] = (key, value)
        return value


class Work(Protocol):
    """A work function: one item, in its own empty folder.

    `tell` shows how far it is (keys: phase, step, resident, budget). The result has

        verdict   agent.report.verdict_data, or None
        exit      of the run, or None
        totals    as `agent run` reports them      turns    likewise
        seconds   {"run": ..., "grade": ...}
        state     "error" where something failed that says nothing of the patch; else left out
        error     what failed, as "Kind: text"

    A sandbox that was lost, and a verdict of status "error", are errors without being called so;
    an exit of "interrupted" leaves the item open. What is raised is an error, and the worker,
    whose state may be damaged, is replaced.
    """

    def __call__(
        self,
        item: Item,
        folder: Path,
        tell: Callable[[Mapping[str, Any]], None],
        state: WorkerState,
    ) -> Mapping[str, Any]: ...


class Engine(Protocol):
    """Runs items."""

    def run(
        self, items: Iterable[Item], work: str, *, on_event: OnEvent = ...
    ) -> Generator[tuple[Item, Result], None, None]:
        """Yields every item with its result, which is in the store by then, as each is done.

        Items are begun in their order. An error is tried again before it is yielded. When the
        generator is closed, runs that go on are asked to end, and stay open.

        on_event is told, beside what the work function tells: {"event": "start", "try": n},
        {"event": "retry", "error": ...} and {"event": "end", "result": ...}.
        """
        ...


def _ignore(item: Item, event: Mapping[str, Any]) -> None:
    pass


class LocalEngine:
    """Processes on this machine, each with one item at a time.

    They end with this process, however that ends. Use it from one thread: Linux ends a process's
    child when the thread that started it is gone.
    """

    def __init__(
        self,
        store: Store,
        *,
        workers: int = 1,
        retries: int = 1,
        grace: float = 30.0,
        silence: float | None = None,
        devices: Sequence[str] = (),
        stamp: Mapping[str, Any] | None = None,
    ) -> None:
        """retries: further tries of an error in one go. grace: seconds a run has to end in order
        when all is to stop. silence: seconds without a sign of life after which a run is given up.
        devices: values of CUDA_VISIBLE_DEVICES, dealt to the workers in turn. stamp: fields put
        into every result, such as versions."""
        if workers < 1 or retries < 0:
            raise ValueError(
                f"{workers} workers and {retries} retries: at least 1 and 0 are needed"
            )
        self.store, self.workers, self.retries = store, workers, retries
        self.grace, self.silence, self.devices = grace, silence, tuple(devices)
        self.stamp = dict(stamp or {})
        self.threads = _threads(workers)
        self._pool: list[LocalWorker] = []
        self._deaths = 0  # of workers that had not begun, in a row

    def run(
        self, items: Iterable[Item], work: str, *, on_event: OnEvent = _ignore
    ) -> Generator[tuple[Item, Result], None, None]:
        waiting = deque(Job(item) for item in items)
        selector = selectors.DefaultSelector()
        try:
            while waiting or any(worker.job for worker in self._pool):
                busy = sum(worker.job is not None for worker in self._pool)
                while len(self._pool) < min(self.workers, len(waiting) + busy):
                    self._start(work, selector)
                for worker in self._pool:
                    if waiting and worker.free:
                        self._give(worker, waiting, on_event)
                for key, _ in selector.select(_TICK):
                    key.data.read()
                for worker in list(self._pool):
                    job, result = self._hear(worker, on_event)
                    if worker.ended:
                        selector.unregister(worker.events)
                        self._remove(worker)
                    if job is None or result is None:
                        continue
                    if result["state"] != "finished" and job.tries <= self.retries:
                        on_event(job.item, {"event": "retry", "error": result["error"]})
                        waiting.append(job)
                        continue
                    on_event(job.item, {"event": "end", "result": result})
                    yield job.item, result
        finally:
            self._stop(selector)
            selector.close()

    def _start(self, work: str, selector: selectors.BaseSelector) -> None:
        taken = {worker.number for worker in self._pool}
        number = next(n for n in range(self.workers) if n not in taken)
        env = {"OMP_NUM_THREADS": str(self.threads), "MKL_NUM_THREADS": str(self.threads)}
        if self.devices:
            env["CUDA_VISIBLE_DEVICES"] = self.devices[number % len(self.devices)]
        worker = LocalWorker(number, work, self.store, env, self.stamp)
        self._pool.append(worker)
        selector.register(worker.events, selectors.EVENT_READ, worker)

    def _give(self, worker: LocalWorker, waiting: deque[Job], on_event: OnEvent) -> None:
        job = waiting.popleft()
        job.tries += 1
        on_event(job.item, {"event": "start", "try": job.tries, "worker": worker.number})
        worker.give(job)

    def _hear(self, worker: LocalWorker, on_event: OnEvent) -> tuple[Job | None, Result | None]:
        """What a worker said since: its job and that job's result, where it is over."""
        job = worker.job
        for message in worker.messages():
            kind = message.get("event")
            if kind == "ready":
                self._deaths = 0
            elif kind == "broken":
                raise EngineError(message["error"])
            elif kind == "tell" and job is not None:
                on_event(job.item, message["data"])
            elif kind == "done" and job is not None:
                return job, self._done(worker, job, message)
        if worker.ended:
            if job is None:
                self._deaths += not worker.ready
                if self._deaths >= _START_DEATHS:
                    raise EngineError(f"workers end before they begin: {worker.last_words()}")
                return None, None
            return job, self._lost(worker, job, f"WorkerDied: {worker.last_words()}")
        if job is not None and self.silence and worker.silent_for() > self.silence:
            worker.kill()
            why = f"Silence: nothing was heard for {self.silence:g} s; the worker was ended"
            return job, self._lost(worker, job, why)
        return None, None

    def _done(self, worker: LocalWorker, job: Job, message: Mapping[str, Any]) -> Result:
        worker.leaving = bool(message["last"])
        if message["state"] == INTERRUPTED:  # by somebody else than this process
            return self._lost(worker, job, "Interrupted: the worker got a signal to end")
        return self._lost(worker, job, "ResultLost: the worker kept no result")

    def _lost(self, worker: LocalWorker, job: Job, why: str) -> Result:
        """The result that the worker kept; where there is none, an error is kept in its place."""
        worker.job = None
        found = self.store.result(job.item)
        if found is not None:
            return found
        data = {**blank(), "state": ERROR, "error": why, "started": job.started, **self.stamp}
        return self.store.write(job.item, {**data, "tries": job.tries, "ended": now()})

    def _remove(self, worker: LocalWorker) -> None:
        worker.close()
        self._pool.remove(worker)

    def _stop(self, selector: selectors.BaseSelector) -> None:
        """Idle workers end, busy ones are asked to, and killed when the time is up."""
        end = time.monotonic() + self.grace
        try:
            for worker in self._pool:
                if worker.ready:
                    worker.stop()
                else:
                    worker.kill()
            while time.monotonic() < end:
                for worker in self._pool:
                    list(worker.messages())
                if all(worker.ended for worker in self._pool):
                    break
                for key, _ in selector.select(0.05):
                    key.data.read()
                    if key.data.ended:
                        selector.unregister(key.fileobj)
        except KeyboardInterrupt:
            pass  # asked for a second time: no more grace
        for worker in self._pool:
            worker.kill()
            worker.close()
        self._pool.clear()


def blank() -> Result:
    """The fields of a result of which nothing is known."""
    return {
        "state": ERROR,
        "verdict": None,
        "exit": None,
        "totals": {},
        "turns": [],
        "seconds": {},
        "error": None,
    }


def now() -> str:
    """This moment, as results have it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _threads(workers: int) -> int:
    """Threads for each worker: its share of the cores, or fewer where the user says so."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    share = max(1, (cores or 1) // workers)
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return min(share, int(asked)) if asked.isdigit() and int(asked) > 0 else share
