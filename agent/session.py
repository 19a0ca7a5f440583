"""One stream through one cache: feed ids, sample ids, and say what it cost."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Literal

import torch
from transformers import PreTrainedModel

from agent.engines import Alone, Engine
from cache import AnyConfig, AnyPool, EvictingCache, Sampling

Finish = Literal["stop", "stop_text", "length"]


@dataclass(frozen=True)
class TurnStats:
    """What one turn cost. Tokens are counts of one layer; seconds are wall time.

    fed: ids prefilled; sampled: ids drawn; seen: ids fed since the stream began; resident: slots
    held at the end; peak_tokens: most held at once during the turn; cache_bytes, peak_bytes: of
    all cache tensors; evictions, evicted_tokens: of this turn. forked, forked_evictions,
    forked_evicted_tokens: what a session that began as a fork took over, at no cost but
    fork_seconds, the copying of caches in this turn; nothing of it is in the other counts but seen.
    """

    fed: int
    sampled: int
    seen: int
    resident: int
    peak_tokens: int
    cache_bytes: int
    peak_bytes: int
    evictions: int
    evicted_tokens: int
    prefill_seconds: float
    decode_seconds: float
    eviction_seconds: float
    forked: int = 0
    forked_evictions: int = 0
    forked_evicted_tokens: int = 0
    fork_seconds: float = 0.0


class Session:
    """A model and the cache of one stream. Eviction time is not part of prefill or decode time."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: AnyConfig,
        *,
        sampling: Sampling,
        chunk: int,
        pool: AnyPool | None = None,
        cache: EvictingCache | None = None,
        engine: Engine | None = None,
    ) -> None:
        """`cache`: one to go on with, of that config; None makes a new one in `pool`.

        engine: what uses the model for it; None where no other session does."""
        self.model = model
        self.engine = engine or Alone(model)
        self.sampling = sampling
        self.chunk = chunk
        self.cache = cache or EvictingCache(model, config, pool=pool)
        self._logits: torch.Tensor | None = None
        self.begin_turn()

    def begin_turn(self, *, forked: bool = False) -> None:
        """Start counting a new turn; with `forked`, all there is counts as taken over by it."""
        stats = self.cache.stats
        self._before = (stats.evictions, stats.evicted_tokens, stats.eviction_seconds)
        self._forked = (self.cache.seen, *self._before[:2]) if forked else (0, 0, 0)
        self._fed = self._sampled = 0
        self._prefill_seconds = self._decode_seconds = self._fork_seconds = 0.0
        stats.peak_tokens = self.cache.resident

    def fork(self, *, sampling: Sampling | None = None, pool: AnyPool | None = None) -> Session:
        """A session that goes on from here by itself: all it shares with this is the model.

        sampling: the twin's own, if it differs. pool: where its cache lives; None makes a pool with
        one row. It costs a copy of the cache. Raises PoolFull when `pool` has no free row.
        """
        began = time.perf_counter()
        twin = copy.copy(self)
        twin.cache = self.engine.do(lambda: self.cache.fork(pool=pool))
        twin._logits = None if self._logits is None else self._logits.clone()
        twin.sampling = self.sampling if sampling is None else sampling
        twin.begin_turn(forked=True)
        spent = time.perf_counter() - began
        self._fork_seconds += spent
        twin._fork_seconds = spent
        return twin

    def feed(self, ids: Sequence[int], *, on_progress: Callable[[int], None] | None = None) -> None:
        """Prefill `ids` behind what the stream has; `on_progress` hears the ids fed so far."""
        began, evicting = time.perf_counter(), self.cache.stats.eviction_seconds
        before = self.cache.seen
        self._logits = None
        try:
            self._logits = self.engine.prefill(
                self.cache, ids, chunk=self.chunk, on_chunk=on_progress
            )
        finally:
            self._fed += self.cache.seen - before
            spent = time.perf_counter() - began
            self._prefill_seconds += spent - (self.cache.stats.eviction_seconds - evicting)

    def sample(
        self,
        *,
        max_new_tokens: int,
        stop_ids: Collection[int],
        stop: Callable[[list[int]], bool] | None = None,
    ) -> tuple[list[int], Finish]:
        """Draw ids until a stop id, until `stop` says so of all ids drawn, or up to the limit.

        The last id is not fed: it goes in front of the next turn. Raises RuntimeError when nothing
        was fed before, ValueError for a limit below 1.
        """
        if self._logits is None:
            raise RuntimeError("feed the prompt first: there are no logits to sample from")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={max_new_tokens}: a reply has at least one token")
        logits, self._logits = self._logits, None
        began, evicting = time.perf_counter(), self.cache.stats.eviction_seconds
        drawn: list[int] = []
        finish: Finish = "length"
        try:
            with closing(self.engine.decode(self.cache, logits, sampling=self.sampling)) as tokens:
                for token in tokens:
                    drawn.append(token)
                    if token in stop_ids:
                        finish = "stop"
                        break
                    if stop is not None and stop(drawn):
                        finish = "stop_text"
                        break
                    if len(drawn) >= max_new_tokens:
                        break
        finally:
            self._sampled += len(drawn)
            spent = time.perf_counter() - began
            self._decode_seconds += spent - (self.cache.stats.eviction_seconds - evicting)
        return drawn, finish

    def turn_stats(self) -> TurnStats:
        """What happened since `begin_turn`."""
        cache, stats = self.cache, self.cache.stats
        evictions, evicted, seconds = self._before
        forked, forked_evictions, forked_evicted = self._forked
        return TurnStats(
            fed=self._fed,
            sampled=self._sampled,
            seen=cache.seen,
            resident=cache.resident,
            peak_tokens=stats.peak_tokens,
            cache_bytes=cache.nbytes,
            peak_bytes=cache.peak_bytes,
            evictions=stats.evictions - evictions,
            evicted_tokens=stats.evicted_tokens - evicted,
            prefill_seconds=self._prefill_seconds,
            decode_seconds=self._decode_seconds,
            eviction_seconds=stats.eviction_seconds - seconds,
            forked=forked,
            forked_evictions=forked_evictions,
            forked_evicted_tokens=forked_evicted,
            fork_seconds=self._fork_seconds,
        )

    def close(self) -> None:
        """Give the cache's row back."""
        self.cache.close()
