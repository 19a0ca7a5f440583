"""One model for several sessions at once: their decode steps run as one batch.

Each session lives in a thread of its own, an agent's loop for instance, and asks for what needs the
model; `Serving` does it in its own thread, one thing after the other: a chunk of somebody's prompt,
then one token of all sessions that are writing, and so on. A session that waits for its tests is in
nobody's way.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from agent.int8_linear import all_quantized
from agent.interrupts import Interrupted
from cache import (
    AnyConfig,
    AnyPool,
    EvictingCache,
    Pool,
    Sampling,
    make_pool,
    replay,
)
from cache.batch_decode import BatchDecoder
from cache.generate import forward
from cache.placement import input_device
from cache.sampling import choose_rows
from cache.static_step import can_capture

T = TypeVar("T")
_REPLAYED = 16  # tokens that are replayed at once


@dataclass(eq=False, kw_only=True)
class _Asked:
    """Something a session waits for."""

    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: BaseException | None = None

    def end(self, result: Any = None, error: BaseException | None = None) -> None:
        self.result, self.error = result, error
        self.done.set()


@dataclass(eq=False, kw_only=True)
class _Job(_Asked):
    work: Callable[[], Any]


@dataclass(eq=False, kw_only=True)
class _Feed(_Asked):
    """A token that a session has drawn, to be fed; its result is the next one."""

    cache: EvictingCache
    token: int
    sampling: Sampling
    since: float = field(default_factory=time.monotonic)


class Serving:
    """The engine of up to `rows` sessions in threads.

    A step runs when all sessions that are writing have asked for it, or `patience` seconds after
    the first one did. With `exact` every step is padded to `rows` where that matters, so that what
    a session writes does not depend, to the last bit, on who else was writing (8-bit layers need no
    padding for it); without it a step of few rows can be cheaper. share_pool: sessions of one kind
    are rows of one pool, and where that is uniform a step has static shapes; None does so on CUDA,
    where that is one graph. Elsewhere each has its own, as the capacity of a shared one is that of
    the longest.

    `stop` ends all that is asked for, and will be, with Interrupted; `close` ends the thread.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: int,
        *,
        exact: bool = True,
        patience: float = 0.02,
        share_pool: bool | None = None,
    ) -> None:
        if rows < 1:
            raise ValueError(f"rows={rows}: at least one session is served")
        self.model, self.rows, self.patience = model, rows, patience
        self.steps = self.fed = 0  # batches so far, and tokens in them
        self._device = input_device(model)
        self._on_gpu = self._device.type == "cuda"
        self._share = self._on_gpu if share_pool is None else share_pool
        self._width = rows if exact and not all_quantized(model) else 0
        self._decoder = BatchDecoder(model, width=self._width)
        self._shared: dict[tuple[bool, int, bool], BatchDecoder] = {}
        self._change = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._feeds: list[_Feed] = []
        self._writing = 0
        self._job_was_last = False
        self._stopped: str | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="serving", daemon=True)
        self._thread.start()

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what sessions ask -----------------------------------------------------------------------

    def pool(self, config: AnyConfig) -> AnyPool:
        if not self._share:
            return make_pool(self.model, config)

        def shared() -> AnyPool:
            fresh = make_pool(self.model, config, rows=self.rows)
            kind = (fresh.ragged, fresh.block_size, fresh.with_sums)
            if kind not in self._shared:
                static = isinstance(fresh, Pool) and (not self._on_gpu or can_capture(self.model))
                self._shared[kind] = BatchDecoder(
                    self.model, fresh, width=self._width, static=static
                )
            found = self._shared[kind].pool
            assert found is not None
            return found

        return self.do(shared)

    def prefill(
        self,
        cache: EvictingCache,
        ids: Sequence[int],
        *,
        chunk: int,
        on_chunk: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """Chunk by chunk: between them others have their turn."""
        if not ids:
            raise ValueError("nothing to feed: no new ids")
        if chunk < 1:
            raise ValueError(f"a chunk holds at least one token, not {chunk}")
        logits = torch.empty(0)
        for start in range(0, len(ids), chunk):
            part, fed = ids[start : start + chunk], min(start + chunk, len(ids))
            logits = self.do(partial(self._chunk, cache, part, last=fed == len(ids)))
            if on_chunk is not None:
                on_chunk(fed)
        return logits

    def decode(
        self, cache: EvictingCache, logits: torch.Tensor, *, sampling: Sampling
    ) -> Generator[int, None, None]:
        # Not here: no other thread is to use the device while a graph is captured.
        [token] = self.do(lambda: choose_rows(logits.unsqueeze(0), [sampling], [cache.seen]))
        with self._change:
            self._writing += 1
        try:
            while True:
                yield token
                feed = _Feed(cache=cache, token=token, sampling=sampling)
                token = self._ask(self._feeds, feed)
        finally:
            with self._change:
                self._writing -= 1
                self._change.notify()

    def replay(
        self,
        cache: EvictingCache,
        ids: Sequence[int],
        *,
        on_token: Callable[[int], None] | None = None,
    ) -> None:
        """A few tokens at a time: between them others have their turn."""
        feed = self._decoder_of(cache).feed
        for start in range(0, len(ids), _REPLAYED):
            part = ids[start : start + _REPLAYED]
            self.do(partial(replay, self.model, cache, part, feed=feed))
            if on_token is not None:
                on_token(start + len(part))

    def do(self, work: Callable[[], T]) -> T:
        if threading.current_thread() is self._thread:
            return work()
        result: T = self._ask(self._jobs, _Job(work=work))
        return result

    # -- how it ends -----------------------------------------------------------------------------

    def stop(self, why: str) -> None:
        """All sessions get Interrupted(why) for what they ask, from now on."""
        with self._change:
            self._stopped = why
            for waiting in (*self._jobs, *self._feeds):
                waiting.end(error=Interrupted(why))
            self._jobs.clear()
            self._feeds.clear()

    def close(self) -> None:
        """End the thread, after what it is doing; nothing can be asked any more."""
        if self._stopped is None:
            self.stop("the model is not served any more")
        with self._change:
            self._closed = True
            self._change.notify()
        self._thread.join()

    # -- the thread ------------------------------------------------------------------------------

    def _ask(self, queue: Any, job: _Asked) -> Any:
        with self._change:
            if self._stopped is not None:
                raise Interrupted(self._stopped)
            queue.append(job)
            self._change.notify()
        try:
            job.done.wait()
        except BaseException:
            # The caller was interrupted, and may close its cache next: nothing is to be under way.
            job.done.wait()
            raise
        if job.error is not None:
            raise job.error
        return job.result

    def _run(self) -> None:
        while (turn := self._next()) is not None:
            if isinstance(turn, _Job):
                try:
                    turn.end(turn.work())
                except BaseException as error:  # it belongs to the one who asked
                    turn.end(error=error)
            else:
                self.steps += 1
                self.fed += len(turn)
                self._step(turn)

    def _next(self) -> _Job | list[_Feed] | None:
        """What is to be done next: jobs and steps take turns. None when that was all."""
        with self._change:
            while not self._closed:
                left = self._feeds[0].since + self.patience - time.monotonic() if self._feeds else 0
                ready = self._feeds and (len(self._feeds) >= self._writing or left <= 0)
                if ready and (self._job_was_last or not self._jobs):
                    self._job_was_last = False
                    feeds, self._feeds[: self.rows] = self._feeds[: self.rows], []
                    return feeds
                if self._jobs:
                    self._job_was_last = True
                    return self._jobs.popleft()
                self._change.wait(left if self._feeds else None)
        return None

    @torch.inference_mode()
    def _chunk(self, cache: EvictingCache, ids: Sequence[int], *, last: bool) -> torch.Tensor:
        logits = forward(self.model, cache, torch.tensor(ids, device=self._device))
        cache.evict("prefill", last_chunk=last)
        return logits

    def _step(self, feeds: Sequence[_Feed]) -> None:
        """Feed a token to each, evict as due, draw the next ones; a failure is its own row's."""
        by_decoder: dict[int, tuple[BatchDecoder, list[_Feed]]] = {}
        for feed in feeds:
            decoder = self._decoder_of(feed.cache)
            by_decoder.setdefault(id(decoder), (decoder, []))[1].append(feed)
        for decoder, group in by_decoder.values():
            try:
                logits = decoder.step([feed.cache for feed in group], [f.token for f in group])
            except BaseException as error:
                # Every cache is as it was: those that can go on do so alone.
                if len(group) == 1:
                    group[0].end(error=error)
                else:
                    for feed in group:
                        self._step([feed])
                continue
            self._draw(group, logits)

    def _draw(self, group: Sequence[_Feed], logits: torch.Tensor) -> None:
        well: list[int] = []
        for row, feed in enumerate(group):
            try:
                feed.cache.evict("decode")
                well.append(row)
            except BaseException as error:  # of this row alone
                feed.end(error=error)
        if not well:
            return
        rest = [group[row] for row in well]
        try:
            drawn = choose_rows(
                logits if len(well) == len(group) else logits[well],
                [feed.sampling for feed in rest],
                [feed.cache.seen for feed in rest],
            )
        except BaseException as error:  # there is one draw for all
            for feed in rest:
                feed.end(error=error)
            return
        for feed, token in zip(rest, drawn, strict=True):
            feed.end(token)

    def _decoder_of(self, cache: EvictingCache) -> BatchDecoder:
        for decoder in self._shared.values():
            if decoder.pool is cache.pool:
                return decoder
        return self._decoder
