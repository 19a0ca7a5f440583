"""The pool of a model whose layers are on several devices: one pool for each of them.

What is kept of a layer lies beside the layer. To the outside it is one pool: layers are numbered
through, and what it exports is what a pool on a single device would have exported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from cache.budgets import ceil_blocks
from cache.placement import Place
from cache.ragged_store import RaggedPool, Segments
from cache.store import Held, Pool

Part = Pool | RaggedPool


class SplitPool:
    """The same methods as `Pool` and `RaggedPool`, over a part for each place.

    make: a part for so many layers on that device; all parts are of one kind.
    """

    def __init__(self, places: Sequence[Place], make: Callable[[int, torch.device], Part]) -> None:
        self.places = tuple(places)
        self.parts = tuple(make(len(place.layers), place.device) for place in self.places)
        first = self.parts[0]
        self.block_size, self.rows, self.with_sums = first.block_size, first.rows, first.with_sums
        self.ragged = first.ragged
        self.key_dim = first.key_dim
        self._at = [
            (part, layer - place.layers.start)
            for part, place in zip(self.parts, self.places, strict=True)
            for layer in place.layers
        ]

    # -- size ------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Slots per row; 0 where that is no single number."""
        return self.parts[0].capacity

    @property
    def nbytes(self) -> int:
        """Bytes of the pool's tensors, on all devices."""
        return sum(part.nbytes for part in self.parts)

    @property
    def sums_nbytes(self) -> int:
        """Bytes of the sums alone."""
        return sum(part.sums_nbytes for part in self.parts)

    @property
    def peak_bytes(self) -> int:
        """Most bytes each device ever held at once, added up."""
        return sum(part.peak_bytes for part in self.parts)

    def take(self) -> int:
        """A free row, the same in all parts. Raises PoolFull."""
        (row,) = {part.take() for part in self.parts}
        return row

    def give_back(self, row: int) -> None:
        """Free `row`; what it held is forgotten."""
        for part in self.parts:
            part.give_back(row)

    def length(self, row: int) -> int:
        """Valid slots of `row` per layer and head, on average, which is whole over all parts."""
        if not self.ragged:
            return self.parts[0].length(row)
        lengths = self.lengths(row)
        return int(lengths.sum()) // lengths.numel()

    def lengths(self, row: int) -> torch.Tensor:
        """Valid slots of each layer and head, int64 [L, H_kv] on the CPU."""
        return torch.cat([part.lengths(row) for part in self.parts])

    def segments(self, layer: int, row: int) -> Segments | None:
        """As the layer's own part has them."""
        part, own = self._at[layer]
        return part.segments(own, row)

    def make_room(self, row: int, tokens: int, *, expected: int = 0, headroom: float = 0.0) -> None:
        """See that `tokens` more fit behind what `row` holds, on every device."""
        for part in self.parts:
            part.make_room(row, tokens, expected=expected, headroom=headroom)

    def fit(self, row: int, slots: int) -> None:
        """Give back memory that is not needed for `slots`."""
        for part in self.parts:
            part.fit(row, slots)

    # -- content ---------------------------------------------------------------------------------

    def write(self, layer: int, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put [H_kv, q, D] behind the row's valid slots; valid only after `advance`."""
        part, own = self._at[layer]
        part.write(own, row, keys, values)

    def view(self, layer: int, row: int, pending: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, as views on its device."""
        part, own = self._at[layer]
        return part.view(own, row, pending)

    def advance(self, row: int, tokens: int, first_index: int) -> None:
        """Declare `tokens` written slots valid; the first one entered with index `first_index`."""
        for part in self.parts:
            part.advance(row, tokens, first_index)

    def add_sums(self, row: int, added: Sequence[Sequence[torch.Tensor]]) -> None:
        """Add to the sums of all valid slots, per layer and head [T]."""
        for part, place in zip(self.parts, self.places, strict=True):
            part.add_sums(row, added[place.layers.start : place.layers.stop])

    def held(self, row: int, layers: range) -> Held:
        """What `layers` hold: consecutive ones that are on one device."""
        part, own = self._at[layers.start]
        return replace(part.held(row, range(own, own + len(layers))), first_layer=layers.start)

    def export(self, row: int) -> dict[str, torch.Tensor]:
        """The content of `row` as an unsplit pool exports it: a copy, on the CPU, since no device
        need have room for all of it."""
        contents = [part.export(row) for part in self.parts]
        return {name: torch.cat([each[name].cpu() for each in contents]) for name in contents[0]}

    def fill(self, row: int, content: Mapping[str, torch.Tensor]) -> None:
        """Make a copy of what another row exported the content of `row`."""
        slots = pages = 0
        for part, place in zip(self.parts, self.places, strict=True):
            layers = slice(place.layers.start, place.layers.stop)
            if "lengths" not in content:
                part.fill(row, {name: plane[layers] for name, plane in content.items()})
                continue
            # Of a ragged row all slots stand one behind the other, and all pages.
            lengths = content["lengths"][layers]
            more_slots = int(lengths.sum())
            more_pages = sum(ceil_blocks(n, self.block_size) for n in lengths.flatten().tolist())
            own = {"lengths": lengths}
            for name in content.keys() - own.keys():
                start, count = (pages, more_pages) if name == "block_ids" else (slots, more_slots)
                own[name] = content[name][start : start + count]
            part.fill(row, own)
            slots, pages = slots + more_slots, pages + more_pages

    def compact(
        self, row: int, keep: Sequence[torch.Tensor], counts: Sequence[Sequence[int]]
    ) -> None:
        """Drop the pages of `row` that `keep` leaves out: bool [l, H_kv, P] for consecutive layers
        of one device each, which together are all. counts: pages kept per layer and head."""
        groups = list(keep)
        for part, place in zip(self.parts, self.places, strict=True):
            own: list[torch.Tensor] = []
            while sum(len(group) for group in own) < len(place.layers):
                own.append(groups.pop(0))
            part.compact(row, own, counts[place.layers.start : place.layers.stop])
