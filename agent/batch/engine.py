"""Who does the work of a batch: the small interface, and the engine that works on this machine.

An engine is given items and the name of a work function, and yields each item with its result once
that is kept in the store. Another engine (of a cluster, say) has to do no more than that.
"""

from __future__ import annotations

import os
import selectors
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from agent.batch.item import Item
from agent.batch.local_worker import Job, LocalWorker
from agent.batch.store import ERROR, INTERRUPTED, Result, Store
from agent.batch.worker_state import WorkerState
from agent.timestamps import utc

OnEvent = Callable[[Item, Mapping[str, Any]], None]
_TICK = 0.5  # seconds between looks at workers that say nothing
_START_DEATHS = 3  # in a row: then none would start


class EngineError(Exception):
    """No work can be done at all; the text says why."""


class Work(Protocol):
    """A work function: one item, in its own empty folder; where `state.sessions` is above 1, in a
    thread, with others beside it.

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

        Items are begun in their order. An error is tried again, after the others, before it is
        yielded. When the generator is closed, runs that go on are asked to end, and stay open.

        on_event is told, beside what the work function tells: {"event": "start", "try": n},
        {"event": "retry", "error": ...} and {"event": "end", "result": ...}.
        """
        ...


def _ignore(item: Item, event: Mapping[str, Any]) -> None:
    pass


class LocalEngine:
    """Processes on this machine, each with one item at a time, or with several `sessions`.

    They end with this process, however that ends. Use it from one thread: Linux ends a process's
    child when the thread that started it is gone.

    What failed beside other sessions is tried again alone: the fault may have been another's. For
    the same reason the death of a worker with several of them is no try of any.
    """

    def __init__(
        self,
        store: Store,
        *,
        workers: int = 1,
        sessions: int = 1,
        retries: int = 1,
        grace: float = 30.0,
        silence: float | None = None,
        devices: Sequence[str] = (),
        stamp: Mapping[str, Any] | None = None,
    ) -> None:
        """sessions: items that a worker has at once, at most; the work function is told.

        retries: further tries of an error in one go. grace: seconds a run has to end in order when
        all is to stop. silence: seconds without a sign of life after which a run is given up.
        devices: values of CUDA_VISIBLE_DEVICES, dealt to the workers in turn. stamp: fields put
        into every result, such as versions."""
        if workers < 1 or retries < 0 or sessions < 1:
            raise ValueError(
                f"{workers} workers, {sessions} sessions and {retries} retries: at least 1, 1 and "
                "0 are needed"
            )
        self.store, self.workers, self.retries = store, workers, retries
        self.sessions = sessions
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
            while waiting or any(worker.jobs for worker in self._pool):
                busy = sum(len(worker.jobs) for worker in self._pool)
                while len(self._pool) < min(self.workers, len(waiting) + busy):
                    self._start(work, selector)
                self._give(waiting, on_event)
                for key, _ in selector.select(_TICK):
                    key.data.read()
                for worker in list(self._pool):
                    over = list(self._hear(worker, on_event))
                    if worker.ended:
                        selector.unregister(worker.events)
                        self._remove(worker)
                    for job, result in over:
                        if result is None:
                            waiting.append(job)
                        elif result["state"] != "finished" and job.tries <= self.retries:
                            on_event(job.item, {"event": "retry", "error": result["error"]})
                            job.alone = job.crowded
                            waiting.append(job)
                        else:
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
        worker = LocalWorker(number, work, self.store, env, self.stamp, sessions=self.sessions)
        self._pool.append(worker)
        selector.register(worker.events, selectors.EVENT_READ, worker)

    def _give(self, waiting: deque[Job], on_event: OnEvent) -> None:
        """Give jobs in their order, each to the worker that has least to do."""
        busy = sum(len(worker.jobs) for worker in self._pool)
        share = -(-(busy + len(waiting)) // self.workers)  # what starts first does not take all
        for job in list(waiting):
            if not any(worker.has_room for worker in self._pool):
                return
            takers = [w for w in self._pool if len(w.jobs) < share and w.takes(job)]
            if not takers:
                continue
            waiting.remove(job)
            worker = min(takers, key=lambda each: len(each.jobs))
            job.tries += 1
            on_event(job.item, {"event": "start", "try": job.tries, "worker": worker.number})
            worker.give(job)

    def _hear(self, worker: LocalWorker, on_event: OnEvent) -> Iterator[tuple[Job, Result | None]]:
        """What a worker said since: jobs that are over with their results. None: it may be none of
        the job's doing, and this was no try of it."""
        for message in worker.messages():
            kind, job = message.get("event"), worker.jobs.get(message.get("key", ""))
            if kind == "ready":
                self._deaths = 0
            elif kind == "broken":
                raise EngineError(message["error"])
            elif kind == "tell" and job is not None:
                on_event(job.item, message["data"])
            elif kind == "done" and job is not None:
                yield job, self._done(worker, job, message)
        if worker.ended:
            if not worker.jobs:
                self._deaths += not worker.ready
                if self._deaths >= _START_DEATHS:
                    raise EngineError(f"workers end before they begin: {worker.last_words()}")
            why = f"WorkerDied: {worker.last_words()}" if worker.jobs else ""
            for job in list(worker.jobs.values()):
                if job.crowded:
                    yield job, self._spared(worker, job, why, on_event)
                else:
                    yield job, self._lost(worker, job, why)
        elif self.silence and (silent := worker.silent_for(self.silence)):
            worker.kill()
            why = f"Silence: nothing was heard for {self.silence:g} s; the worker was ended"
            for job in list(worker.jobs.values()):
                if job in silent:
                    yield job, self._lost(worker, job, why)
                else:
                    yield job, self._spared(worker, job, "another run fell silent", on_event)

    def _done(self, worker: LocalWorker, job: Job, message: Mapping[str, Any]) -> Result:
        if message["last"]:
            worker.leave()
        if message["state"] == INTERRUPTED:  # by somebody else than this process
            return self._lost(worker, job, "Interrupted: the worker got a signal to end")
        return self._lost(worker, job, "ResultLost: the worker kept no result")

    def _spared(self, worker: LocalWorker, job: Job, why: str, on_event: OnEvent) -> Result | None:
        """The result that the worker kept; where there is none, this was no try of the job, and the
        next one is made alone."""
        worker.drop(job)
        if (found := self._kept(job)) is not None:
            return found
        job.tries -= 1
        job.alone = True
        on_event(job.item, {"event": "retry", "error": why})
        return None

    def _kept(self, job: Job) -> Result | None:
        """The result of this very try, not one that an earlier batch left."""
        found = self.store.result(job.item)
        if found is None or found["tries"] != job.tries or found["started"] < job.started:
            return None
        return found

    def _lost(self, worker: LocalWorker, job: Job, why: str) -> Result:
        """The result that the worker kept; where there is none, an error is kept in its place."""
        worker.drop(job)
        if (found := self._kept(job)) is not None:
            return found
        data = {**blank(), "state": ERROR, "error": why, "started": job.started, **self.stamp}
        return self.store.write(job.item, {**data, "tries": job.tries, "ended": utc()})

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


def _threads(workers: int) -> int:
    """Threads for each worker: its share of the cores, or fewer where the user says so."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    share = max(1, (cores or 1) // workers)
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return min(share, int(asked)) if asked.isdigit() and int(asked) > 0 else share
