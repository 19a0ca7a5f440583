"""The newest rotated queries of every layer, kept for scoring."""

from __future__ import annotations

import torch


class QueryWindow:
    """A ring of the newest `size` queries of all layers; the query of token i is at i mod size.

    Queries of a forward pass are staged and written at its end, in one step for all layers: a pass
    that breaks off changes nothing.
    """

    def __init__(self, size: int, layers: int) -> None:
        self.size = size
        self._staged: list[torch.Tensor | None] = [None] * layers
        self.ring: torch.Tensor | None = None  # [L, H_q, size, D]

    @property
    def nbytes(self) -> int:
        """Bytes of the ring."""
        return self.ring.nbytes if self.ring is not None else 0

    def clear(self) -> None:
        """Forget all queries."""
        self.ring = None
        self.begin()

    def begin(self) -> None:
        """Drop what an unfinished forward pass staged."""
        self._staged = [None] * len(self._staged)

    def stage(self, layer: int, queries: torch.Tensor) -> None:
        """Note a layer's new queries [H_q, q, D]; the newest `size` matter."""
        if self.size:
            # A copy, so that a chunk's whole query tensor is not kept alive.
            self._staged[layer] = queries[:, -self.size :].clone()

    def stage_all(self, queries: torch.Tensor) -> None:
        """Note those of all layers, [L, H_q, q, D], which must not change before `commit`."""
        if self.size:
            self._staged = list(queries[:, :, -self.size :])

    def commit(self, seen: int) -> None:
        """Write what was staged; the last staged query belongs to token `seen` - 1."""
        if not self.size:
            return
        new = torch.stack([q for q in self._staged if q is not None])
        self.begin()
        if self.ring is None:
            shape = (*new.shape[:2], self.size, new.shape[3])
            # A tensor born in inference mode could not be written outside it.
            with torch.inference_mode(False):
                self.ring = torch.zeros(shape, dtype=new.dtype, device=new.device)
        count = new.shape[2]
        slots = torch.arange(seen - count, seen, device=new.device) % self.size
        self.ring[:, :, slots] = new

    def restore(self, ring: torch.Tensor | None) -> None:
        """Take over the ring of another window; a copy is made."""
        self.clear()
        if ring is not None:
            with torch.inference_mode(False):
                self.ring = torch.empty(ring.shape, dtype=ring.dtype, device=ring.device)
            self.ring.copy_(ring)

    def adopt(self, other: QueryWindow, seen: int) -> None:
        """Take over the newest queries of a window that is at least as large."""
        self.clear()
        if self.size and (newest := other.newest(seen, self.size)) is not None:
            self._staged = list(newest)
            self.commit(seen)

    def newest(self, seen: int, count: int) -> torch.Tensor | None:
        """[L, H_q, min(count, seen), D], oldest first; None for a count of 0.

        Raises RuntimeError before the first pass.
        """
        if not count:
            return None
        if self.ring is None:
            raise RuntimeError(
                "no queries were observed: the model does not run the 'evicting' attention "
                "(its attn_implementation was changed after the cache was made)"
            )
        count = min(count, self.size, seen)
        slots = torch.arange(seen - count, seen, device=self.ring.device) % self.size
        return self.ring[:, :, slots]
