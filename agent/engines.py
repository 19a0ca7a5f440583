"""What does for a session what needs the model; here, for a session that has it for itself."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Protocol, TypeVar

import torch
from transformers import PreTrainedModel

from cache import (
    AnyConfig,
    AnyPool,
    EvictingCache,
    Pool,
    Sampling,
    decode,
    make_pool,
    prefill,
    replay,
)
from cache.batch_decode import BatchDecoder
from cache.generate import FeedOne
from cache.static_step import can_capture

T = TypeVar("T")


class Engine(Protocol):
    """Does for a session what needs the model. See also `agent.serving`, for several."""

    def pool(self, config: AnyConfig) -> AnyPool:
        """Where a cache of `config` is to live."""
        ...

    def prefill(
        self,
        cache: EvictingCache,
        ids: Sequence[int],
        *,
        chunk: int,
        on_chunk: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        """What `cache.prefill` does."""
        ...

    def decode(
        self, cache: EvictingCache, logits: torch.Tensor, *, sampling: Sampling
    ) -> Generator[int, None, None]:
        """What `cache.decode` does; to be closed when no more is wanted."""
        ...

    def replay(
        self,
        cache: EvictingCache,
        ids: Sequence[int],
        *,
        on_token: Callable[[int], None] | None = None,
    ) -> None:
        """What `cache.replay` does, by the same passes as `decode`."""
        ...

    def do(self, work: Callable[[], T]) -> T:
        """Do `work`, which uses the model or writes to a pool, while nothing else does."""
        ...


class Alone:
    """The engine of a session that has the model for itself.

    static: decode by static shapes where heads hold equally much; None does so where that makes
    one CUDA graph of a step.
    """

    def __init__(self, model: PreTrainedModel, *, static: bool | None = None) -> None:
        self.model = model
        self._static = can_capture(model) if static is None else static
        self._decoder: BatchDecoder | None = None  # of the pool that was used last

    def pool(self, config: AnyConfig) -> AnyPool:
        return make_pool(self.model, config)

    def prefill(
        self,
        cache: EvictingCache,
        ids: Sequence[int],
        *,
        chunk: int,
        on_chunk: Callable[[int], None] | None = None,
    ) -> torch.Tensor:
        return prefill(self.model, cache, ids, chunk=chunk, on_chunk=on_chunk)

    def decode(
        self, cache: EvictingCache, logits: torch.Tensor, *, sampling: Sampling
    ) -> Generator[int, None, None]:
        feed = self._feed_of(cache)
        yield from decode(self.model, cache, logits, sampling=sampling, feed=feed)

    def replay(
        self,
        cache: EvictingCache,
        ids: Sequence[int],
        *,
        on_token: Callable[[int], None] | None = None,
    ) -> None:
        replay(self.model, cache, ids, feed=self._feed_of(cache), on_token=on_token)

    def do(self, work: Callable[[], T]) -> T:
        return work()

    def _feed_of(self, cache: EvictingCache) -> FeedOne | None:
        if not self._static or not isinstance(cache.pool, Pool):
            return None
        if self._decoder is None or self._decoder.pool is not cache.pool:
            self._decoder = BatchDecoder(self.model, cache.pool, static=True)
        return self._decoder.feed
