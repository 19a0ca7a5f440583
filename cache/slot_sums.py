"""What a method adds up for each slot over its life, moved along with the slot."""

from __future__ import annotations

import torch

from cache.budgets import ceil_blocks
from cache.store import PageMoves


class SlotSums:
    """float32 sums [L, H_kv, T] in slot order.

    A forward pass stages what it adds, layer by layer, and `commit` takes it in one step: a pass
    that breaks off changes nothing.
    """

    def __init__(self, layers: int, block_size: int) -> None:
        self._block_size = block_size
        self._staged: list[torch.Tensor | None] = [None] * layers
        self.values: torch.Tensor | None = None  # capacity in slots, a multiple of the block size
        self._length = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the sums."""
        return self.values.nbytes if self.values is not None else 0

    def begin(self) -> None:
        """Drop what an unfinished forward pass staged."""
        self._staged = [None] * len(self._staged)

    def stage(self, layer: int, added: torch.Tensor) -> None:
        """Note what a layer's new queries add to its slots, [H_kv, T]; new slots come last."""
        self._staged[layer] = added

    def commit(self) -> None:
        """Add what was staged; slots that are new start from zero."""
        added = torch.stack([part for part in self._staged if part is not None])
        self.begin()
        length = added.shape[-1]
        if self.values is None or length > self.values.shape[-1]:
            self._grow(added, length)
        assert self.values is not None
        self.values[..., self._length : length] = 0
        self.values[..., :length] += added
        self._length = length

    def compact(self, moves: PageMoves, length: int) -> None:
        """Follow a compaction of the pool, after which `length` slots are valid."""
        if self.values is not None:
            moves.apply(self.values.unflatten(2, (-1, self._block_size)))
        self._length = length

    def view(self) -> torch.Tensor | None:
        """The sums of the valid slots, [L, H_kv, T]."""
        return None if self.values is None else self.values[..., : self._length]

    def restore(self, values: torch.Tensor | None) -> None:
        """Take over the sums [L, H_kv, T] of another cache; a copy is made."""
        self.begin()
        self.values, self._length = None, 0
        if values is not None:
            self._grow(values, values.shape[-1])
            assert self.values is not None
            self.values[..., : values.shape[-1]] = values
            self._length = values.shape[-1]

    def _grow(self, like: torch.Tensor, length: int) -> None:
        """Room for a quarter more than `length` slots; what is there stays."""
        slots = ceil_blocks(length + length // 4, self._block_size) * self._block_size
        with torch.inference_mode(False):
            grown = torch.zeros(*like.shape[:2], slots, dtype=torch.float32, device=like.device)
        if self.values is not None:
            grown[..., : self._length] = self.values[..., : self._length]
        self.values = grown
