"""The pool: keys and values of several sessions in preallocated pages, written in place.

A page is one block of `block_size` slots and always holds tokens of one block of the stream, in
order. Per row (session) the valid slots are one prefix; page order is otherwise free, since keys
keep the rotation they entered with. `block_ids` says, per layer, row and KV head, which block of
the stream a page holds: the token in slot s entered with index block_id * block_size + s % size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cache.budgets import ceil_blocks


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


class Pool:
    """Pages for `rows` sessions of one model on one device.

    keys, values: [L, R, H_kv, S, D]; block_ids: int64 [L, R, H_kv, S / block_size].
    S (the capacity in slots) is common to all rows and grows by `reserve`.
    """

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
    ) -> None:
        if rows < 1:
            raise ValueError(f"a pool needs at least one row, not {rows}")
        self.block_size = block_size
        self.rows = rows
        lead = (layers, rows, kv_heads)
        self.keys = torch.empty((*lead, 0, key_dim), dtype=dtype, device=device)
        self.values = torch.empty((*lead, 0, value_dim), dtype=dtype, device=device)
        self.block_ids = torch.empty((*lead, 0), dtype=torch.int64, device=device)
        self.peak_bytes = 0
        self._free = list(range(rows))[::-1]
        self._lengths = [0] * rows

    @property
    def capacity(self) -> int:
        """Slots per row."""
        return self.keys.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes of the pool's tensors."""
        return self.keys.nbytes + self.values.nbytes + self.block_ids.nbytes

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

    def reserve(self, slots: int, *, headroom: float = 0.0) -> None:
        """Make room for `slots` in every row; with `headroom`, for that share more when growing."""
        if slots > self.capacity:
            self._resize(int(slots * (1 + headroom)))

    def fit(self, slots: int) -> None:
        """Give back memory beyond `slots`, or beyond the longest row where that is longer."""
        wanted = self._round_up(max(slots, *self._lengths))
        if wanted < self.capacity:
            self._resize(wanted)

    def _round_up(self, slots: int) -> int:
        return ceil_blocks(slots, self.block_size) * self.block_size

    def _resize(self, slots: int) -> None:
        slots = self._round_up(slots)
        pages, used = slots // self.block_size, self._round_up(max(self._lengths))
        resized = []
        for old, size, valid in (
            (self.keys, slots, used),
            (self.values, slots, used),
            (self.block_ids, pages, used // self.block_size),
        ):
            # A tensor born in inference mode could not be written outside it.
            with torch.inference_mode(False):
                new = torch.empty(
                    (*old.shape[:3], size, *old.shape[4:]), dtype=old.dtype, device=old.device
                )
            new[:, :, :, :valid] = old[:, :, :, :valid]
            resized.append(new)
        before = self.nbytes
        self.keys, self.values, self.block_ids = resized
        # Old and new live side by side while the content is copied.
        self.peak_bytes = max(self.peak_bytes, before + self.nbytes)

    def write(self, layer: int, row: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put [H_kv, q, D] behind the row's valid slots; valid only after `advance`.

        Raises ValueError when the capacity was not reserved.
        """
        start = self._lengths[row]
        stop = start + keys.shape[1]
        if stop > self.capacity:
            raise ValueError(
                f"{stop} slots are needed, {self.capacity} reserved: call reserve first"
            )
        self.keys[layer, row, :, start:stop] = keys
        self.values[layer, row, :, start:stop] = values

    def view(self, layer: int, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [1, H_kv, length, D] of the first `length` slots, without a copy."""
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

    def fill(
        self, row: int, keys: torch.Tensor, values: torch.Tensor, block_ids: torch.Tensor
    ) -> None:
        """Make copies of [L, H_kv, T, D], [L, H_kv, T, D], [L, H_kv, N] the content of `row`.

        Raises ValueError when the capacity was not reserved.
        """
        length = keys.shape[2]
        if length > self.capacity:
            raise ValueError(f"{length} slots are needed, {self.capacity} reserved: reserve first")
        self.keys[:, row, :, :length] = keys
        self.values[:, row, :, :length] = values
        self.block_ids[:, row, :, : block_ids.shape[2]] = block_ids
        self._lengths[row] = length

    def compact(self, row: int, keep: torch.Tensor, kept: int) -> PageMoves:
        """Drop the pages of `row` that `keep` [L, H_kv, P] leaves out; `kept` are set in each head.

        Returns the moves, to be applied to whatever else is remembered per page.
        """
        size, length = self.block_size, self._lengths[row]
        tail = length % size
        moves = plan_moves(keep, kept, tail_partial=tail != 0)
        for slots in (self.keys, self.values):
            moves.apply(slots[:, row].unflatten(2, (-1, size)))
        moves.apply(self.block_ids[:, row])
        self._lengths[row] = (kept - 1) * size + tail if tail else kept * size
        return moves
