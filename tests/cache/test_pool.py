"""The pool against a dict of tokens: what is held where, after any sequence of cuts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import Pool, PoolFull
from cache.store import plan_moves

LAYERS, HEADS, DIM = 2, 3, 2


def make(rows: int = 1, size: int = 4) -> Pool:
    return Pool(
        layers=LAYERS,
        kv_heads=HEADS,
        key_dim=DIM,
        value_dim=DIM + 1,
        block_size=size,
        dtype=torch.float32,
        device="cpu",
        rows=rows,
    )


class Model:
    """One row as it should be: per (layer, head) a dict from token index to its mark."""

    def __init__(self, pool: Pool, salt: int) -> None:
        self.pool, self.salt = pool, salt
        self.row = pool.take()
        self.seen = 0
        self.held = {(layer, head): {} for layer in range(LAYERS) for head in range(HEADS)}

    def mark(self, layer: int, head: int, token: int) -> float:
        return float(self.salt * 100_000 + (layer * HEADS + head) * 10_000 + token)

    def append(self, count: int) -> None:
        pool = self.pool
        pool.make_room(self.row, count)
        for layer in range(LAYERS):
            marks = torch.tensor(
                [
                    [self.mark(layer, head, self.seen + i) for i in range(count)]
                    for head in range(HEADS)
                ]
            ).unsqueeze(-1)
            pool.write(layer, self.row, marks.repeat(1, 1, DIM), -marks.repeat(1, 1, DIM + 1))
            for head in range(HEADS):
                for i in range(count):
                    token = self.seen + i
                    self.held[layer, head][token] = self.mark(layer, head, token)
        pool.advance(self.row, count, self.seen)
        self.seen += count

    def blocks(self, layer: int, head: int) -> list[int]:
        return sorted({token // self.pool.block_size for token in self.held[layer, head]})

    def cut(self, kept: int, random) -> None:
        """Keep `kept` random blocks in each head, the partial one among them."""
        size = self.pool.block_size
        pages = -(-self.pool.length(self.row) // size)
        keep = torch.zeros(LAYERS, HEADS, pages, dtype=torch.bool)
        for (layer, head), tokens in self.held.items():
            blocks = self.blocks(layer, head)
            must = [self.seen // size] if self.seen % size else []
            free = [b for b in blocks if b not in must]
            chosen = set(random.sample(free, kept - len(must)) + must)
            ids = self.pool.block_ids[layer, self.row, head, :pages].tolist()
            assert sorted(ids) == blocks
            for page, block in enumerate(ids):
                keep[layer, head, page] = block in chosen
            self.held[layer, head] = {t: m for t, m in tokens.items() if t // size in chosen}
        self.pool.compact(self.row, [keep], [[kept] * HEADS] * LAYERS)

    def check(self) -> None:
        pool, size = self.pool, self.pool.block_size
        length = pool.length(self.row)
        for layer in range(LAYERS):
            keys, values = pool.view(layer, self.row)
            assert keys.shape == (1, HEADS, length, DIM)
            for head in range(HEADS):
                ids = pool.block_ids[layer, self.row, head].tolist()
                found = {}
                for slot in range(length):
                    token = ids[slot // size] * size + slot % size
                    found[token] = keys[0, head, slot, 0].item()
                    assert (values[0, head, slot] == -keys[0, head, slot, 0]).all()
                assert found == self.held[layer, head]


@settings(max_examples=60, deadline=None)
@given(
    size=st.sampled_from([1, 3, 4]),
    steps=st.lists(st.tuples(st.integers(1, 14), st.floats(0, 1)), min_size=1, max_size=8),
    random=st.randoms(use_true_random=False),
)
def test_any_sequence_of_appends_and_cuts(size, steps, random):
    row = Model(make(size=size), salt=0)
    for count, share in steps:
        row.append(count)
        row.check()
        pages = -(-row.pool.length(row.row) // size)
        kept = max(1, min(pages, round(share * pages)))
        row.cut(kept, random)
        row.check()


@settings(max_examples=25, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 11), st.booleans()), min_size=4, max_size=14
    ),
    random=st.randoms(use_true_random=False),
)
def test_rows_do_not_touch_each_other(steps, random):
    pool = make(rows=3)
    rows = [Model(pool, salt) for salt in range(3)]
    for which, count, cut in steps:
        rows[which].append(count)
        if cut:
            pages = -(-pool.length(rows[which].row) // 4)
            rows[which].cut(max(1, pages // 2), random)
            pool.fit(0, 0)
        for row in rows:
            row.check()


@settings(max_examples=150, deadline=None)
@given(pages=st.integers(1, 12), tail=st.booleans(), data=st.data())
def test_moves_fill_holes_and_copy_no_more_than_needed(pages, tail, data):
    kept = data.draw(st.integers(1, pages))
    keep = torch.zeros(1, 4, pages, dtype=torch.bool)
    for head in range(4):
        full = list(range(pages - 1 if tail else pages))
        chosen = data.draw(st.permutations(full))[: kept - 1 if tail else kept]
        keep[0, head, chosen] = True
        keep[0, head, pages - 1] |= tail
    before = torch.arange(pages).repeat(1, 4, 1)
    after = before.clone()
    moves = plan_moves(keep, kept, tail)
    moves.apply(after)
    body = kept - 1 if tail else kept
    for head in range(4):
        assert sorted(after[0, head, :kept].tolist()) == before[0, head][keep[0, head]].tolist()
        if tail:
            assert after[0, head, kept - 1] == pages - 1  # new tokens go on in it
        # Only holes are filled: what may stay in place does.
        for page in range(body):
            if keep[0, head, page]:
                assert after[0, head, page] == page
    assert moves.source.shape == moves.destination.shape
    assert moves.source.shape[-1] <= min(body, pages - body)


def test_growth_keeps_contents_and_addresses_stay_while_there_is_room():
    pool = make(rows=2)
    one, two = Model(pool, 1), Model(pool, 2)
    pool.make_room(one.row, 40)
    address = pool.keys.data_ptr()
    one.append(13)
    two.append(39)
    assert pool.keys.data_ptr() == address
    assert pool.capacity == 40
    pool.make_room(one.row, 87, headroom=0.25)
    assert pool.capacity == 128  # 125, in whole blocks
    assert pool.peak_bytes > pool.nbytes
    one.check()
    two.check()
    pool.fit(0, 0)
    assert pool.capacity == 40
    one.check()
    two.check()
    expected = LAYERS * 2 * HEADS * (40 * (DIM + DIM + 1) * 4 + 10 * 8)
    assert pool.nbytes == expected


def test_rows_run_out_by_name_and_come_back():
    pool = make(rows=2)
    first = pool.take()
    second = pool.take()
    assert {first, second} == {0, 1}
    with pytest.raises(PoolFull, match="all 2 rows"):
        pool.take()
    pool.give_back(first)
    assert pool.take() == first
    with pytest.raises(ValueError, match="at least one row, not 0"):
        make(rows=0)


def test_writing_without_room_and_torn_blocks_are_errors():
    pool = make()
    row = pool.take()
    with pytest.raises(ValueError, match="5 slots are needed, 0 reserved"):
        pool.write(0, row, torch.zeros(HEADS, 5, DIM), torch.zeros(HEADS, 5, DIM + 1))
    pool.make_room(row, 8)
    with pytest.raises(ValueError, match="token 3 cannot follow slot 0"):
        pool.advance(row, 2, 3)
