"""The newest rotated queries of every layer, kept for scoring."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cache.placement import Place


class QueryWindow:
    """A ring of the newest `size` queries of all layers; the query of token i is at i mod size.

    Each place has a part of it on its device. Queries of a forward pass are staged and written at
    its end, in one step for all layers of a place: a pass that breaks off changes nothing.
    """

    def __init__(self, size: int, places: Sequence[Place]) -> None:
        self.size = size
        self._places = tuple(places)
        self._staged: list[torch.Tensor | None] = []
        self._rings: list[torch.Tensor] = []  # per place [l, H_q, size, D]; none before a pass
        self.begin()

    @property
    def nbytes(self) -> int:
        """Bytes of the ring."""
        return sum(ring.nbytes for ring in self._rings)

    @property
    def heads(self) -> int:
        """Query heads of a layer; 0 before the first pass."""
        return self._rings[0].shape[1] if self._rings else 0

    @property
    def ring(self) -> torch.Tensor | None:
        """The whole ring [L, H_q, size, D]; a copy on the CPU where it is on several devices."""
        if len(self._rings) > 1:
            return torch.cat([ring.cpu() for ring in self._rings])
        return self._rings[0] if self._rings else None

    def clear(self) -> None:
        """Forget all queries."""
        self._rings = []
        self.begin()

    def begin(self) -> None:
        """Drop what an unfinished forward pass staged."""
        self._staged = [None] * self._places[-1].layers.stop

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
        staged = [q for q in self._staged if q is not None]
        self.begin()
        new = [torch.stack(staged[p.layers.start : p.layers.stop]) for p in self._places]
        if not self._rings:
            # A tensor born in inference mode could not be written outside it.
            with torch.inference_mode(False):
                self._rings = [
                    part.new_zeros((*part.shape[:2], self.size, part.shape[3])) for part in new
                ]
        for ring, part in zip(self._rings, new, strict=True):
            ring[:, :, self._slots(seen, part.shape[2], ring.device)] = part

    def restore(self, ring: torch.Tensor | None) -> None:
        """Take over the ring of another window, wherever it is; a copy is made."""
        self.clear()
        if ring is not None:
            for place in self._places:
                part = ring[place.layers.start : place.layers.stop]
                with torch.inference_mode(False):
                    own = torch.empty(part.shape, dtype=part.dtype, device=place.device)
                self._rings.append(own.copy_(part))

    def adopt(self, other: QueryWindow, seen: int) -> None:
        """Take over the newest queries of a window of the same places, at least as large."""
        self.clear()
        if not self.size:
            return
        for place in self._places:
            newest = other.newest(seen, self.size, place.layers)
            assert newest is not None
            self._staged[place.layers.start : place.layers.stop] = list(newest)
        self.commit(seen)

    def newest(self, seen: int, count: int, layers: range) -> torch.Tensor | None:
        """[l, H_q, min(count, seen), D] of `layers`, which are of one place, oldest first; None for
        a count of 0.

        Raises RuntimeError before the first pass.
        """
        if not count:
            return None
        if not self._rings:
            raise RuntimeError(
                "no queries were observed: the model does not run the 'evicting' attention "
                "(its attn_implementation was changed after the cache was made)"
            )
        count = min(count, self.size, seen)
        for place, ring in zip(self._places, self._rings, strict=True):
            if layers.start in place.layers:
                first = layers.start - place.layers.start
                part = ring[first : first + len(layers)]
                return part[:, :, self._slots(seen, count, ring.device)]
        raise IndexError(f"there is no layer {layers.start}")

    def _slots(self, seen: int, count: int, device: torch.device) -> torch.Tensor:
        return torch.arange(seen - count, seen, device=device) % self.size
