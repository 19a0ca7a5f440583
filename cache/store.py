"""The pool: keys and values of several sessions in preallocated pages, written in place.

A page is one block of `block_size` slots and always holds tokens of one block of the stream, in
order. Per row (session) the valid slots are one prefix; page order is otherwise free, since keys
keep the rotation they entered with. `block_ids` says, per layer, row and KV head, which block of
the stream a page holds: the token in slot s entered with index block_id * block_size + s % size.

Here all layers and heads of a row hold equally much; `ragged_store` is for those that do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cache.budgets import ceil_blocks
from cache.placement import Place


class PoolFull(RuntimeError):
    """Every row of the pool is taken."""


@dataclass(frozen=True, slots=True)
class PageMoves:
    """Page copies of one compaction, as [L, H, E] source and destination pages.

    Heads that move fewer pages than others repeat a move, so that shapes depend on lengths alone.
    `tail`: one more copy (source, destination) for all layers and heads, after the others.
    """

    source: torch.Tensor
    destination: torch.Tensor
    tail: tuple[int, int] | None

    def apply(self, pages: torch.Tensor) -> None:
        """Move along the third axis of `pages` [L, H, P, ...], in place."""
        if self.source.shape[-1]:
            layers = torch.arange(pages.shape[0], device=pages.device)[:, None, None]
            heads = torch.arange(pages.shape[1], device=pages.device)[None, :, None]
            pages[layers, heads, self.destination] = pages[layers, heads, self.source]
        if self.tail is not None:
            source, destination = self.tail
            pages[:, :, destination] = pages[:, :, source]


def plan_moves(keep: torch.Tensor, kept: int, tail_partial: bool) -> PageMoves:
    """Which pages move so that the `kept` pages become the prefix; only holes are filled.

    keep: bool [L, H, P] in page order, `kept` set in each row; with `tail_partial` the last page
    is set and must end up last, since new tokens go on in it.
    """
    pages = keep.shape[-1]
    body = kept - 1 if tail_partial else kept  # destination pages of full blocks
    full = keep[..., : pages - 1] if tail_partial else keep
    holes = ~full[..., :body]
    movers = full.clone()
    movers[..., :body] = False
    width = min(full.shape[-1] - body, body)
    destination = holes.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :width]
    source = movers.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :width]
    idle = ~holes.gather(-1, destination)  # as many holes as movers in every row
    # Idle entries repeat the row's first move, or copy a page onto itself where nothing moves.
    first_destination = destination[..., :1]
    first_source = torch.where(idle[..., :1], first_destination, source[..., :1])
    destination = torch.where(idle, first_destination, destination)
    source = torch.where(idle, first_source, source)
    tail = (pages - 1, kept - 1) if tail_partial and kept != pages else None
    return PageMoves(source, destination, tail)


@dataclass(frozen=True, slots=True)
class Held:
    """What consecutive layers of a row hold, in slot order: for methods to look at.

    keys: [l, H_kv, T, D]; block_ids: int64 [l, H_kv, N]; sums: float32 [l, H_kv, T] or None. Heads
    that hold less than others are padded in front, with block id -1 and zeros.
    """

    first_layer: int
    keys: torch.Tensor
    block_ids: torch.Tensor
    sums: torch.Tensor | None


class Pool:
    """Pages for `rows` sessions of one model on one device.

    keys, values: [L, R, H_kv, S, D]; block_ids: int64 [L, R, H_kv, S / block_size]; sums: float32
    [L, R, H_kv, S], what a method adds up for each slot, where there is one that does. S (the
    capacity in slots) is common to all rows and grows by `make_room`.
    """

    ragged = False

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
        lead = (layers, rows, kv_heads)
        self.keys = torch.empty((*lead, 0, key_dim), dtype=dtype, device=device)
        self.values = torch.empty((*lead, 0, value_dim), dtype=dtype, device=device)
        self.block_ids = torch.empty((*lead, 0), dtype=torch.int64, device=device)
        self.sums = torch.empty((*lead, 0), device=device) if with_sums else None
        self.peak_bytes = 0
        self._free = list(range(rows))[::-1]
        self._lengths = [0] * rows

    # -- size ------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Slots per row."""
        return self.keys.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes of the pool's tensors."""
        return self.keys.nbytes + self.values.nbytes + self.block_ids.nbytes + self.sums_nbytes

    @property
    def sums_nbytes(self) -> int:
        """Bytes of the sums alone."""
        return 0 if self.sums is None else self.sums.nbytes

    def take(self) -> int:
        """A free row. Raises PoolFull."""
        if not self._free:
            raise PoolFull(f"all {self.rows} rows are in use; give one back or open a larger pool")
        row = self._free.pop()
        self._lengths[row] = 0
        return row

    def give_back(self, row: int) -> None:
        """Free `row`; what it held is forgotten."""
        self._lengths[row] = 0
        self._free.append(row)

    def length(self, row: int) -> int:
        """Valid slots of `row`, the same for all layers and heads."""
        return self._lengths[row]

    def lengths(self, row: int) -> torch.Tensor:
        """Valid slots of each layer and head, int64 [L, H_kv] on the CPU."""
        return torch.full((self.keys.shape[0], self.keys.shape[2]), self._lengths[row])

    def segments(self, layer: int, row: int) -> None:
        """None: all heads of a layer are as long as `view` says."""

    def make_room(self, row: int, tokens: int, *, expected: int = 0, headroom: float = 0.0) -> None:
        """See that `tokens` more fit behind what `row` holds; nothing happens where they do.

        expected: slots it will hold before long, to be taken at once; headroom: the share by which
        to take more than needed.
        """
        slots = max(self._lengths[row] + tokens, expected)
        if self._lengths[row] + tokens > self.capacity:
            self._resize(int(slots * (1 + headroom)))

    def fit(self, row: int, slots: int) -> None:
        """Give back memory beyond `slots`, or beyond the longest row where that is longer."""
        wanted = self._round_up(max(slots, *self._lengths))
        if wanted < self.capacity:
            self._resize(wanted)

    def _round_up(self, slots: int) -> int:
        return ceil_blocks(slots, self.block_size) * self.block_size

    def _resize(self, slots: int) -> None:
        slots = self._round_up(slots)
        used = self._round_up(max(self._lengths))

        def resized(old: torch.Tensor, unit: int) -> torch.Tensor:
            shape = (*old.shape[:3], slots // unit, *old.shape[4:])
            # A tensor born in inference mode could not be written outside it.
            with torch.inference_mode(False):
                new = torch.empty(shape, dtype=old.dtype, device=old.device)
            new[:, :, :, : used // unit] = old[:, :, :, : used // unit]
            return new

        before = self.nbytes
        self.keys, self.values = resized(self.keys, 1), resized(self.values, 1)
        self.block_ids = resized(self.block_ids, self.block_size)
        if self.sums is not None:
            self.sums = resized(self.sums, 1)
        # Old and new live side by side while the content is copied.
        self.peak_bytes = max(self.peak_bytes, before + self.nbytes)

    # -- content ---------------------------------------------------------------------------------

    def write(self, layer: int, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put [H_kv, q, D] behind the row's valid slots; valid only after `advance`.

        Raises ValueError when there is no room.
        """
        start = self._lengths[row]
        stop = start + keys.shape[1]
        if stop > self.capacity:
            raise ValueError(
                f"{stop} slots are needed, {self.capacity} reserved: call make_room first"
            )
        self.keys[layer, row, :, start:stop] = keys
        self.values[layer, row, :, start:stop] = values
        if self.sums is not None:
            self.sums[layer, row, :, start:stop] = 0

    def view(self, layer: int, row: int, pending: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [1, H_kv, T, D] of a layer, the `pending` ones not yet valid included.

        They are views, not copies.
        """
        length = self._lengths[row] + pending
        return (
            self.keys[layer, row : row + 1, :, :length],
            self.values[layer, row : row + 1, :, :length],
        )

    def advance(self, row: int, tokens: int, first_index: int) -> None:
        """Declare `tokens` written slots valid; the first one entered with index `first_index`."""
        start, size = self._lengths[row], self.block_size
        if (first_index - start) % size:
            raise ValueError(
                f"token {first_index} cannot follow slot {start}: blocks of {size} would be torn"
            )
        self._lengths[row] = start + tokens
        first_page, last_page = ceil_blocks(start, size), ceil_blocks(start + tokens, size)
        if last_page > first_page:
            shift = (first_index - start) // size
            ids = torch.arange(first_page, last_page, device=self.block_ids.device) + shift
            self.block_ids[:, row, :, first_page:last_page] = ids

    def add_sums(self, row: int, added: Sequence[Sequence[torch.Tensor]]) -> None:
        """Add to the sums of all valid slots, per layer and head [T]."""
        assert self.sums is not None
        stacked = torch.stack([torch.stack(tuple(heads)) for heads in added])
        self.sums[:, row, :, : self._lengths[row]] += stacked

    def held(self, row: int, layers: range) -> Held:
        """What `layers` (consecutive ones) hold, as views."""
        part, length = slice(layers.start, layers.stop), self._lengths[row]
        return Held(
            layers.start,
            self.keys[part, row, :, :length],
            self.block_ids[part, row, :, : ceil_blocks(length, self.block_size)],
            None if self.sums is None else self.sums[part, row, :, :length],
        )

    def export(self, row: int) -> dict[str, torch.Tensor]:
        """The content of `row` for `fill`: views of keys, values, block_ids and sums."""
        held = self.held(row, range(self.keys.shape[0]))
        length = self._lengths[row]
        content = {
            "keys": held.keys,
            "values": self.values[:, row, :, :length],
            "block_ids": held.block_ids,
        }
        return content if held.sums is None else {**content, "sums": held.sums}

    def fill(self, row: int, content: Mapping[str, torch.Tensor]) -> None:
        """Make a copy of what another row exported the content of `row`."""
        length = content["keys"].shape[2]
        self._lengths[row] = 0
        self.make_room(row, length)
        for name, old in content.items():
            getattr(self, name)[:, row, :, : old.shape[2]] = old
        self._lengths[row] = length

    def compact(
        self, row: int, keep: Sequence[torch.Tensor], counts: Sequence[Sequence[int]]
    ) -> None:
        """Drop the pages of `row` that `keep` leaves out.

        keep: bool [l, H_kv, P] for consecutive layers, which together are all. counts: pages kept
        per layer and head, here all the same.
        """
        size, length, kept = self.block_size, self._lengths[row], counts[0][0]
        tail = length % size
        moves = plan_moves(torch.cat(tuple(keep)), kept, tail_partial=tail != 0)
        for plane in (self.keys, self.values, self.sums):
            if plane is not None:
                moves.apply(plane[:, row].unflatten(2, (-1, size)))
        moves.apply(self.block_ids[:, row])
        self._lengths[row] = (kept - 1) * size + tail if tail else kept * size
