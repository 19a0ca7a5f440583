"""Reading and writing side by side: who is timed, at which lengths, in which order.

Every run opens its stream anew behind the same context. Runs of all contestants and lengths take
turns, repeat after repeat, so that what else the machine does falls on all of them alike.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from agent.bench.clock import seconds_of
from agent.bench.contestants import AGAIN, Contestant, NotHere, Plan, Stream
from agent.bench.contexts import Content
from agent.bench.readings import Point, Reading, Readings, order

_WARM = 2  # steps that do not count at the beginning of a run
# About how many prefilled tokens cost as much as a decoded one: only the progress bar asks.
_READ_PER_WRITTEN = 16
# What one point may fail of while the others go on. RuntimeError: NotHere, and what torch raises
# when memory is out, a kernel is missing or not implemented; ValueError: a config, length or batch
# that does not fit.
_FAILURES = (RuntimeError, ValueError)


@dataclass(frozen=True)
class Request:
    """What is to be measured.

    prefill: lengths read from nothing. seen: lengths behind which is written; contexts are filled
    with random content (`fill`) or read by the model itself (`read`). observation: tokens read
    behind a context before anything is written, which gives the time to the first token of a turn.
    new_tokens: written and timed; watched: written after these with a clock around every part of
    the cache's work, which slows it a little.
    """

    prefill: tuple[int, ...] = ()
    seen: tuple[int, ...] = ()
    batches: tuple[int, ...] = (1,)
    context: Literal["fill", "read"] = "fill"
    observation: int = 256
    new_tokens: int = 64
    watched: int = 32
    chunk: int = 512
    repeats: int = 3
    seed: int = 0

    @property
    def room(self) -> int:
        """Tokens that follow a context."""
        return self.observation + _WARM + self.new_tokens + self.watched


@dataclass
class Job:
    """One point with its contestant and, for `decode`, its context."""

    point: Point
    contestant: Contestant
    context: Any = None


@dataclass
class Bench:
    """A request under way: `readings` and `failed` grow, and are whole whenever it breaks off."""

    model: PreTrainedModel
    contestants: Sequence[Contestant]
    request: Request
    readings: Readings = field(default_factory=Readings)
    failed: dict[Point, str] = field(default_factory=dict)
    finished: bool = False
    on_begin: Callable[[Point, int], None] = lambda point, repeat: None
    on_work: Callable[[float], None] = lambda amount: None
    on_reading: Callable[[], None] = lambda: None

    def work(self) -> float:
        """All there is to do, in the units of `on_work`."""
        return self.request.repeats * sum(self._cost(job.point) for job in self._jobs())

    def run(self) -> None:
        """Measure everything; what cannot be is noted in `failed`, and the rest goes on."""
        jobs = self._jobs()
        for each in self.contestants:
            self._warm(each)
        content: Content | None = None
        if self.request.context == "fill" and (longest := max(self.request.seen, default=0)):
            content = Content(self.model, longest, seed=self.request.seed)
        for job in jobs:
            self._guarded(job, functools.partial(self._prepare, content=content))
        for repeat in range(self.request.repeats):
            for job in order(jobs, repeat):
                if job.point in self.failed:
                    self.on_work(self._cost(job.point))
                    continue
                self.on_begin(job.point, repeat)
                self._guarded(job, functools.partial(self._measure, repeat=repeat))
                self.on_work(self._cost(job.point))
                self.on_reading()
        self.finished = True

    # -- parts of a run --------------------------------------------------------------------------

    def _jobs(self) -> list[Job]:
        ask = self.request
        jobs = [
            Job(Point("prefill", each.name, tokens), each)
            for tokens in ask.prefill
            for each in self.contestants
            if each.name != AGAIN
        ]
        return jobs + [
            Job(Point("decode", each.name, tokens, batch), each)
            for batch in ask.batches
            for tokens in ask.seen
            for each in self.contestants
        ]

    def _cost(self, point: Point) -> float:
        if point.kind == "prefill":
            return point.tokens / _READ_PER_WRITTEN
        read = self.request.observation + (point.tokens if point.who == AGAIN else 0)
        written = self.request.new_tokens + self.request.watched
        return read / _READ_PER_WRITTEN + written

    def _plan(self, point: Point) -> Plan:
        if point.kind == "prefill":
            return Plan(0, point.tokens, self.request.chunk)
        return Plan(point.tokens, self.request.room, self.request.chunk, point.batch)

    def _ids(self, count: int) -> list[int]:
        vocabulary = self.model.config.get_text_config().vocab_size
        random = torch.Generator().manual_seed(self.request.seed)
        return torch.randint(vocabulary, (count,), generator=random).tolist()

    def _guarded(self, job: Job, do: Callable[[Job], None]) -> None:
        try:
            do(job)
        except _FAILURES as error:
            self.failed[job.point] = str(error).splitlines()[0] if str(error) else repr(error)

    def _warm(self, contestant: Contestant) -> None:
        """The first calls set up kernels and threads."""
        with contextlib.suppress(*_FAILURES):  # the runs will say it
            stream = contestant.open(Plan(0, 64, self.request.chunk), None)
            stream.feed(self._ids(8))
            for _ in range(_WARM):
                stream.step()
            stream.close()

    def _prepare(self, job: Job, content: Content | None) -> None:
        plan = self._plan(job.point)
        if why := job.contestant.reaches(plan):
            raise NotHere(why)
        if job.point.kind == "prefill" or not plan.seen:
            return
        if content is not None:
            job.context = job.contestant.fill(plan, content)
            return
        stream = job.contestant.open(Plan(0, plan.seen + plan.room, plan.chunk), None)
        if job.contestant.name != AGAIN:
            stream.feed(self._ids(plan.seen))
        job.context = job.contestant.keep(stream)
        stream.close()

    def _measure(self, job: Job, repeat: int) -> None:
        device, plan = self.model.device, self._plan(job.point)
        before = 0
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        stream = job.contestant.open(plan, job.context)
        measure = self._read if job.point.kind == "prefill" else self._write
        values = measure(stream, job.point)
        values["bytes"], values["resident"] = stream.nbytes, stream.resident
        if (peak := stream.peak_bytes) is not None:
            values["peak_bytes"] = peak
        if device.type == "cuda":
            values["device_peak_bytes"] = torch.cuda.max_memory_allocated(device) - before
        stream.close()
        self.readings.add(Reading(job.point, repeat, values))

    def _read(self, stream: Stream, point: Point) -> dict[str, float]:
        """A prompt from nothing."""
        ids, parts = self._ids(point.tokens), stream.watch(evicting_only=True)
        seconds = self._seconds(lambda: stream.feed(ids))
        values: dict[str, float] = {"seconds": seconds, "tokens_per_s": point.tokens / seconds}
        if parts is not None:
            values["evictions"] = stream.evictions
            values["evicting_share"] = parts.evicting / seconds
            if stream.evictions:
                values["eviction_ms"] = parts.evicting / stream.evictions * 1e3
        return values

    def _write(self, stream: Stream, point: Point) -> dict[str, float]:
        """A turn behind a context: an observation is read, then tokens are written."""
        ask, values = self.request, dict[str, float]()
        if ask.observation and point.batch == 1:
            ids = self._ids(ask.observation)
            values["first_token_s"] = self._seconds(lambda: stream.feed(ids))
        if point.who == AGAIN:  # from here on it is as any dense cache
            return values
        for _ in range(_WARM):
            stream.step()
        before = stream.evictions
        steps = [self._seconds(stream.step) for _ in range(ask.new_tokens)]
        if steps:
            values["tokens_per_s"] = point.batch * len(steps) / sum(steps)
            values["step_ms"] = statistics.median(steps) * 1e3
            values["evictions"] = stream.evictions - before
        parts, before = stream.watch(), stream.evictions
        if parts is not None and ask.watched:
            parts.total = sum(self._seconds(stream.step) for _ in range(ask.watched))
            values.update(parts.shares())
            if evictions := stream.evictions - before:
                values["eviction_ms"] = parts.evicting / evictions * 1e3
        return values

    def _seconds(self, do: Callable[[], Any]) -> float:
        """Wall time until the device is done too."""
        return seconds_of(self.model.device, do)
