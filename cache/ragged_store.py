"""The pool for sessions whose layers and heads hold different numbers of tokens.

Per row and layer there is one buffer of pages; each KV head has a segment of it: offset, length and
the room up to the next segment. Pages are as in `store`: one block of `block_size` slots each, the
partial one last. A cut writes what stays to the buffer's front again, segment by segment, and
hands the memory back that is then not needed: bytes follow the budget, not the longest head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from cache.budgets import ceil_blocks
from cache.placement import Place
from cache.store import Held, PoolFull

# A buffer is replaced by a smaller one when it is larger than needed by more than this share.
SPARE = 0.25


@dataclass(slots=True)
class _Planes:
    """Tensors of one layer of one row, by page: keys [P, b, D], values [P, b, Dv], ids [P]."""

    keys: torch.Tensor
    values: torch.Tensor
    block_ids: torch.Tensor
    sums: torch.Tensor | None

    def present(self) -> dict[str, torch.Tensor]:
        """Those that there are, by name."""
        found = {"keys": self.keys, "values": self.values, "block_ids": self.block_ids}
        return found if self.sums is None else {**found, "sums": self.sums}

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.present().values())

    def empty(self, pages: int) -> _Planes:
        """Planes of the same kind with `pages` pages."""
        # A tensor born in inference mode could not be written outside it.
        with torch.inference_mode(False):
            made = {n: p.new_empty((pages, *p.shape[1:])) for n, p in self.present().items()}
        return _Planes(made["keys"], made["values"], made["block_ids"], made.get("sums"))


@dataclass(slots=True)
class _Layer:
    """Planes, and where in them each head's segment starts (page) and how long it is (slots)."""

    planes: _Planes
    offsets: list[int]
    lengths: list[int]
    ends: torch.Tensor  # int64 [H], slot behind the last valid one of each segment


@dataclass(slots=True)
class _Row:
    layers: list[_Layer]
    slack: int = 1  # tokens that every head must have room for after a cut
    free: bool = field(default=True)


@dataclass(frozen=True, slots=True)
class Segments:
    """Valid slots of each head of a layer: the first one, and how many there are."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]


class RaggedPool:
    """Pages for `rows` sessions; the same methods as `Pool`, with lengths per layer and head."""

    ragged = True

    def __init__(
        self,
        *,
        layers: int,
        kv_heads: int,
        key_dim: int,
        value_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        rows: int = 1,
        with_sums: bool = False,
    ) -> None:
        if rows < 1:
            raise ValueError(f"a pool needs at least one row, not {rows}")
        self.block_size = block_size
        self.rows = rows
        self.with_sums = with_sums
        self.key_dim = key_dim
        self.places = (Place(range(layers), torch.device(device)),)
        self.peak_bytes = 0
        self._heads = kv_heads
        self._blank = _Planes(
            torch.empty((0, block_size, key_dim), dtype=dtype, device=device),
            torch.empty((0, block_size, value_dim), dtype=dtype, device=device),
            torch.empty(0, dtype=torch.int64, device=device),
            torch.empty((0, block_size), device=device) if with_sums else None,
        )
        self._rows = [_Row([self._blank_layer() for _ in range(layers)]) for _ in range(rows)]
        self._planes_bytes = 0  # of all rows: a sum over them at each move would be most of a cut

    def _blank_layer(self) -> _Layer:
        none = [0] * self._heads
        ends = torch.zeros(self._heads, dtype=torch.int64, device=self._blank.keys.device)
        return _Layer(self._blank.empty(0), list(none), list(none), ends)

    # -- size ------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """0: there is no one number of slots per row."""
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes of the pool's tensors."""
        ends = self._rows[0].layers[0].ends.nbytes  # the same everywhere
        return self._planes_bytes + ends * sum(len(row.layers) for row in self._rows)

    @property
    def sums_nbytes(self) -> int:
        """Bytes of the sums alone."""
        sums = [layer.planes.sums for row in self._rows for layer in row.layers]
        return sum(plane.nbytes for plane in sums if plane is not None)

    def take(self) -> int:
        """A free row. Raises PoolFull."""
        for number, row in enumerate(self._rows):
            if row.free:
                row.free = False
                return number
        raise PoolFull(f"all {self.rows} rows are in use; give one back or open a larger pool")

    def give_back(self, row: int) -> None:
        """Free `row`, and its memory."""
        layers = self._rows[row].layers
        self._planes_bytes -= sum(layer.planes.nbytes for layer in layers)
        self._rows[row] = _Row([self._blank_layer() for _ in layers])

    def length(self, row: int) -> int:
        """Valid slots of `row` per layer and head, on average: a whole number, since all grow
        alike and every cut leaves a whole mean."""
        layers = self._rows[row].layers
        return sum(sum(layer.lengths) for layer in layers) // (len(layers) * self._heads)

    def lengths(self, row: int) -> torch.Tensor:
        """Valid slots of each layer and head, int64 [L, H_kv] on the CPU."""
        return torch.tensor([layer.lengths for layer in self._rows[row].layers])

    def segments(self, layer: int, row: int) -> Segments | None:
        """Where in what `view` returns each head's valid slots are; None when all heads of the
        layer are alike, so that it is a rectangle."""
        held = self._rows[row].layers[layer]
        if self._even(held):
            return None
        return Segments(tuple(at * self.block_size for at in held.offsets), tuple(held.lengths))

    def make_room(self, row: int, tokens: int, *, expected: int = 0, headroom: float = 0.0) -> None:
        """See that `tokens` more fit behind every segment of `row`; nothing happens where they do.

        expected: slots a head will hold before long, to be taken at once; headroom: the share by
        which to take more than needed.
        """
        held = self._rows[row]
        held.slack = max(held.slack, tokens)
        for layer in held.layers:
            if all(
                ceil_blocks(length + tokens, self.block_size) <= room
                for length, room in zip(layer.lengths, self._rooms(layer), strict=True)
            ):
                continue
            slots = [
                int(max(length + tokens, expected) * (1 + headroom)) for length in layer.lengths
            ]
            self._move(layer, None, [self._pages(length) for length in layer.lengths], slots)

    def fit(self, row: int, slots: int) -> None:
        """Give back what `row` has room for beyond one block behind each segment."""
        held = self._rows[row]
        held.slack = 1
        for layer in held.layers:
            pages = [self._pages(length) for length in layer.lengths]
            self._move(layer, None, pages, [length + 1 for length in layer.lengths])

    def _pages(self, slots: int) -> int:
        return ceil_blocks(slots, self.block_size)

    def _rooms(self, layer: _Layer) -> list[int]:
        """Pages from each segment's start to the next one's."""
        stops = [*layer.offsets[1:], layer.planes.keys.shape[0]]
        return [stop - start for start, stop in zip(layer.offsets, stops, strict=True)]

    def _even(self, layer: _Layer) -> bool:
        return len(set(layer.lengths)) == 1 and len(set(self._rooms(layer))) == 1

    def _rectangle(self, layer: _Layer, plane: torch.Tensor) -> torch.Tensor:
        """[H, room, ...] of an even layer's pages."""
        return plane.unflatten(0, (self._heads, -1))

    def _move(
        self, layer: _Layer, source: torch.Tensor | None, pages: list[int], slots: list[int]
    ) -> None:
        """Give every segment room for `slots`, and the content at pages `source` of the planes.

        pages: how many of `source` belong to each head, in order; None: what is there now.
        """
        rooms = [self._pages(count) for count in slots]
        offsets = [sum(rooms[:head]) for head in range(self._heads)]
        device = layer.planes.keys.device

        def ranges(starts: list[int]) -> torch.Tensor:
            parts = [
                torch.arange(start, start + n, device=device)
                for start, n in zip(starts, pages, strict=True)
            ]
            return torch.cat(parts)

        source = ranges(layer.offsets) if source is None else source
        destination = ranges(offsets)
        total, now = sum(rooms), layer.planes.keys.shape[0]
        fits = total <= now <= total * (1 + SPARE)
        new = layer.planes if fits else layer.planes.empty(total)
        before = self.nbytes
        for name, old in layer.planes.present().items():
            copy = old[source]  # so that segments may move onto one another
            new.present()[name][destination] = copy
            spent = before + copy.nbytes + (0 if fits else new.nbytes)
            self.peak_bytes = max(self.peak_bytes, spent)
        self._planes_bytes += new.nbytes - layer.planes.nbytes
        layer.planes, layer.offsets = new, offsets
        self._set_ends(layer)

    def _set_ends(self, layer: _Layer) -> None:
        ends = [
            offset * self.block_size + length
            for offset, length in zip(layer.offsets, layer.lengths, strict=True)
        ]
        layer.ends = torch.tensor(ends, device=layer.planes.keys.device)

    # -- content ---------------------------------------------------------------------------------

    def write(self, layer: int, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put [H_kv, q, D] behind the valid slots of each head; valid only after `advance`.

        Raises ValueError when there is no room.
        """
        held, count = self._rows[row].layers[layer], keys.shape[1]
        for length, room in zip(held.lengths, self._rooms(held), strict=True):
            if length + count > room * self.block_size:
                raise ValueError(
                    f"{length + count} slots are needed, {room * self.block_size} reserved: call "
                    "make_room first"
                )
        slots = held.ends.unsqueeze(-1) + torch.arange(count, device=keys.device)
        held.planes.keys.flatten(0, 1)[slots] = keys
        held.planes.values.flatten(0, 1)[slots] = values
        if held.planes.sums is not None:
            held.planes.sums.flatten(0, 1)[slots] = 0

    def view(self, layer: int, row: int, pending: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer, as views: [1, H_kv, T, D], the `pending` slots that are not
        yet valid included, where all heads are alike, else [1, 1, S, D], all segments and the room
        between them (see `segments`).
        """
        held = self._rows[row].layers[layer]
        if not self._even(held):
            planes = held.planes
            return planes.keys.flatten(0, 1)[None, None], planes.values.flatten(0, 1)[None, None]
        length = held.lengths[0] + pending

        def rectangle(plane: torch.Tensor) -> torch.Tensor:
            return self._rectangle(held, plane).flatten(1, 2)[None, :, :length]

        return rectangle(held.planes.keys), rectangle(held.planes.values)

    def advance(self, row: int, tokens: int, first_index: int) -> None:
        """Declare `tokens` written slots valid; the first one entered with index `first_index`."""
        size = self.block_size
        for layer in self._rows[row].layers:
            for head, start in enumerate(layer.lengths):
                if (first_index - start) % size:
                    raise ValueError(
                        f"token {first_index} cannot follow slot {start}: blocks of {size} would "
                        "be torn"
                    )
                first, last = ceil_blocks(start, size), ceil_blocks(start + tokens, size)
                if last > first:
                    ids = torch.arange(first, last, device=layer.ends.device)
                    begin = layer.offsets[head]
                    layer.planes.block_ids[begin + first : begin + last] = (
                        ids + (first_index - start) // size
                    )
            layer.lengths = [length + tokens for length in layer.lengths]
            layer.ends = layer.ends + tokens

    def add_sums(self, row: int, added: Sequence[Sequence[torch.Tensor]]) -> None:
        """Add to the sums of all valid slots, per layer and head [T]."""
        for layer, heads in zip(self._rows[row].layers, added, strict=True):
            assert layer.planes.sums is not None
            flat = layer.planes.sums.flatten()
            for offset, values in zip(layer.offsets, heads, strict=True):
                start = offset * self.block_size
                flat[start : start + values.shape[0]] += values

    def held(self, row: int, layers: range) -> Held:
        """What `layers` (here one) hold: copies padded to the longest head, or views where heads
        are alike."""
        (number,) = layers
        layer = self._rows[row].layers[number]
        pages = [self._pages(length) for length in layer.lengths]
        most = max(pages)

        def padded(plane: torch.Tensor, fill: int) -> torch.Tensor:
            if self._even(layer):
                return self._rectangle(layer, plane)[None, :, :most]
            out = plane.new_full((1, self._heads, most, *plane.shape[1:]), fill)
            for head, (offset, count) in enumerate(zip(layer.offsets, pages, strict=True)):
                out[0, head, most - count :] = plane[offset : offset + count]
            return out

        missing = max(pages) * self.block_size - max(layer.lengths)  # the same for all heads

        def slots(plane: torch.Tensor) -> torch.Tensor:
            return padded(plane, 0).flatten(2, 3)[:, :, : most * self.block_size - missing]

        planes = layer.planes
        return Held(
            number,
            slots(planes.keys),
            padded(planes.block_ids, -1),
            None if planes.sums is None else slots(planes.sums),
        )

    def export(self, row: int) -> dict[str, torch.Tensor]:
        """The content of `row` for `fill`: keys, values, block_ids and sums of all segments, one
        behind the other, and their lengths."""
        found: dict[str, list[torch.Tensor]] = {}
        for layer in self._rows[row].layers:
            for name, plane in layer.planes.present().items():
                slots = plane if name == "block_ids" else plane.flatten(0, 1)
                unit = 1 if name == "block_ids" else self.block_size
                for offset, length in zip(layer.offsets, layer.lengths, strict=True):
                    count = self._pages(length) if name == "block_ids" else length
                    found.setdefault(name, []).append(slots[offset * unit :][:count])
        content = {name: torch.cat(parts) for name, parts in found.items()}
        return {**content, "lengths": self.lengths(row)}

    def fill(self, row: int, content: Mapping[str, torch.Tensor]) -> None:
        """Make a copy of what another row exported the content of `row`."""
        held = self._rows[row]
        done = dict.fromkeys(content, 0)
        for layer, lengths in zip(held.layers, content["lengths"].tolist(), strict=True):
            layer.lengths = [0] * self._heads
            self._move(layer, None, [0] * self._heads, [length + 1 for length in lengths])
            layer.lengths = lengths
            self._set_ends(layer)
            for name, plane in layer.planes.present().items():
                slots = plane if name == "block_ids" else plane.flatten(0, 1)
                unit = 1 if name == "block_ids" else self.block_size
                for offset, length in zip(layer.offsets, lengths, strict=True):
                    count = self._pages(length) if name == "block_ids" else length
                    start = offset * unit
                    slots[start : start + count] = content[name][done[name] : done[name] + count]
                    done[name] += count

    def compact(
        self, row: int, keep: Sequence[torch.Tensor], counts: Sequence[Sequence[int]]
    ) -> None:
        """Drop the pages of `row` that `keep` leaves out.

        keep: per layer bool [1, H_kv, P], padded in front like `held`. counts: pages kept per layer
        and head.
        """
        held = self._rows[row]
        for layer, mask, kept in zip(held.layers, keep, counts, strict=True):
            most = mask.shape[-1]
            # Pages of the buffer, in the padded order of `held`; pads are never kept.
            shift = [
                offset + self._pages(length) - most
                for offset, length in zip(layer.offsets, layer.lengths, strict=True)
            ]
            heads, page = mask[0].nonzero(as_tuple=True)
            source = page + torch.tensor(shift, device=page.device)[heads]
            size = self.block_size
            tail = layer.lengths[0] % size
            layer.lengths = [n * size - (size - tail if tail else 0) for n in kept]
            self._move(layer, source, list(kept), [n + held.slack for n in layer.lengths])
