"""What a method sees of one session's cache, and what it decides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Generic, TypeVar

import torch

from cache.budgets import ceil_blocks
from cache.config import EvictingConfig

ConfigT = TypeVar("ConfigT", bound=EvictingConfig)


@dataclass(frozen=True)
class Observation:
    """Some consecutive layers of one session before an eviction step.

    queries: [L, H_q, W', D], the newest W' <= W rotated queries, oldest first.
    keys: [L, H_kv, T, D], rotated, in slot order.
    block_ids: int64 [L, H_kv, N], the block that each page of `keys` holds, N = ceil(T / b).
    scaling: [L], the factor of q.k in each layer.
    sums: float32 [L, H_kv, T], what `Method.observe` gave, added up over each slot's life; None
    for methods that observe nothing.
    seen: tokens the stream has had; step: number of the eviction step, from 0; room: blocks that
    each head of these layers will keep, on average, beyond sinks and pinned ones.

    Heads that hold less than others are padded in front: block id -1, keys of zeros. Padding is
    part of `hidden`, weighs nothing in `block_weights`, and is never kept. padded: whether there
    can be any.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    block_ids: torch.Tensor
    scaling: torch.Tensor
    block_size: int
    seen: int
    step: int
    room: int = 0
    sums: torch.Tensor | None = None
    padded: bool = True

    @cached_property
    def counts(self) -> torch.Tensor:
        """int64 [L, H_kv]: blocks that each head holds."""
        return (self.block_ids >= 0).sum(-1)

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
        """int64 [L, H_kv, T], the index each slot's token entered with; negative for padding."""
        size = self.block_size
        offsets = torch.arange(size, device=self.block_ids.device)
        index = (self.block_ids * size).unsqueeze(-1) + offsets
        return index.flatten(-2)[..., : self.keys.shape[2]]

    @cached_property
    def slot_order(self) -> torch.Tensor:
        """int64 [L, H_kv, T]: slots from the oldest token to the newest."""
        return self.key_index.argsort(dim=-1)

    @cached_property
    def hidden(self) -> torch.Tensor:
        """bool [L, H_kv, W', T]: keys that a query must not see, later ones and padding."""
        index = self.key_index.unsqueeze(-2)
        return (index > self.query_index.unsqueeze(-1)) | (index < 0)

    def block_weights(self, tokens: torch.Tensor) -> torch.Tensor:
        """Sums over the blocks, float64 [L, H, N] oldest first, of values [L, H, T] in slot order.

        H is H_kv, or 1 for one decision per layer.
        """
        pages = ceil_blocks(tokens.shape[-1], self.block_size)
        missing = pages * self.block_size - tokens.shape[-1]
        padded = torch.nn.functional.pad(tokens.double(), (0, missing))
        per_page = padded.unflatten(-1, (pages, -1)).sum(-1)
        heads = tokens.shape[1]
        per_page = per_page.masked_fill(self.block_ids[:, :heads] < 0, 0.0)
        return per_page.gather(-1, self.order[:, :heads])


class Method(ABC, Generic[ConfigT]):
    """Weighs the blocks of a session; `config` says everything else.

    A subclass names its config class, whose field `method` is its name, and implements `weights`.
    Nothing is kept on the object: one may serve many sessions. What a method remembers of each slot
    it returns from `observe`; the cache adds it up and moves it along with the slot.
    """

    Config: ClassVar[type[EvictingConfig]]
    observes: ClassVar[bool] = False  # whether `observe` is to be called

    def __init__(self, config: ConfigT) -> None:
        self.config = config

    @abstractmethod
    def weights(self, observation: Observation) -> torch.Tensor:
        """float64 [L, H_kv or 1, N], non-negative, oldest block first: the larger, the likelier to
        stay. A second dimension of 1 is one decision for all heads of a layer.

        Adaptive head budgets compare the weights of a layer's heads with each other. For the
        reservoir their scale matters: they should add up to about 1 (see `to_unit`).
        """

    @property
    def query_aware(self) -> bool:
        """Whether what stays depends on the newest tokens, so on a question at a prompt's end."""
        return self.observes or bool(self.config.window)

    def observe(self, queries: torch.Tensor, keys: torch.Tensor, scaling: float) -> torch.Tensor:
        """What the new queries [H_q, q, D] of one layer add to its slots: float32 [H_kv, T].

        keys: [H_kv, T, D] in slot order, those of the new queries last, in order. Only a method
        that `observes` is asked, and has its own.
        """
        raise NotImplementedError(f"{type(self).__name__} observes nothing")


def to_unit(weights: torch.Tensor) -> torch.Tensor:
    """Scale weights [L, H, N] so that a layer's heads add up to 1 on average.

    One factor per layer: heads stay comparable.
    """
    return weights / weights.sum(-1, keepdim=True).mean(-2, keepdim=True).clamp_min(1e-300)
