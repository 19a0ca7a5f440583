"""What a method sees of one session's cache, and what it decides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch

from cache.config import AnyConfig


@dataclass(frozen=True)
class Observation:
    """One session before an eviction step.

    queries: [L, H_q, W', D], the newest W' <= W rotated queries, oldest first.
    keys: [L, H_kv, T, D], rotated, in slot order.
    block_ids: int64 [L, H_kv, N], the block that each page of `keys` holds, N = ceil(T / b).
    scaling: [L], the factor of q.k in each layer.
    seen: tokens the stream has had; step: number of the eviction step, from 0.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    block_ids: torch.Tensor
    scaling: torch.Tensor
    block_size: int
    seen: int
    step: int

    @cached_property
    def order(self) -> torch.Tensor:
        """int64 [L, H_kv, N]: pages from the oldest block to the newest."""
        return self.block_ids.argsort(dim=-1)

    @cached_property
    def sorted_block_ids(self) -> torch.Tensor:
        """int64 [L, H_kv, N], ascending."""
        return self.block_ids.gather(-1, self.order)

    @cached_property
    def query_index(self) -> torch.Tensor:
        """int64 [W'], the index each query's token entered with."""
        rows = self.queries.shape[2]
        return torch.arange(self.seen - rows, self.seen, device=self.queries.device)

    @cached_property
    def key_index(self) -> torch.Tensor:
        """int64 [L, H_kv, T], the index each slot's token entered with."""
        size = self.block_size
        offsets = torch.arange(size, device=self.block_ids.device)
        index = (self.block_ids * size).unsqueeze(-1) + offsets
        return index.flatten(-2)[..., : self.keys.shape[2]]


class Method(ABC):
    """Scores the blocks of a session; `config` says everything that is not state.

    window: newest queries the cache must keep for the method (0: none).
    """

    window: int = 0

    @abstractmethod
    def __init__(self, config: AnyConfig) -> None: ...

    @abstractmethod
    def priorities(self, observation: Observation) -> torch.Tensor:
        """float64 [L, H_kv or 1, N], oldest block first: the largest stay.

        A second dimension of 1 is one decision for all heads of a layer.
        """
