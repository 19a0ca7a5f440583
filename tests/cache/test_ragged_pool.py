"""The ragged pool against dicts of tokens: any appends, cuts, fits and copies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import PoolFull, RaggedPool

LAYERS, HEADS, DIM = 2, 3, 2


def make(rows: int = 1, size: int = 4) -> RaggedPool:
    return RaggedPool(
        layers=LAYERS,
        kv_heads=HEADS,
        key_dim=DIM,
        value_dim=DIM + 1,
        block_size=size,
        dtype=torch.float32,
        device="cpu",
        rows=rows,
        with_sums=True,
    )


class Model:
    """One row as it should be: per (layer, head) a dict from token index to [mark, sum]."""

    def __init__(self, pool: RaggedPool, salt: int) -> None:
        self.pool, self.salt = pool, salt
        self.row = pool.take()
        self.seen = 0
        self.held = {(layer, head): {} for layer in range(LAYERS) for head in range(HEADS)}

    def append(self, count: int) -> None:
        pool = self.pool
        pool.make_room(self.row, count)
        for layer in range(LAYERS):
            marks = torch.zeros(HEADS, count, 1)
            for head in range(HEADS):
                for i in range(count):
                    token = self.seen + i
                    mark = self.salt * 100_000 + (layer * HEADS + head) * 10_000 + token
                    marks[head, i, 0] = mark
                    self.held[layer, head][token] = [float(mark), 0.0]
            pool.write(layer, self.row, marks.repeat(1, 1, DIM), -marks.repeat(1, 1, DIM + 1))
        pool.advance(self.row, count, self.seen)
        self.seen += count
        self.add()

    def add(self) -> None:
        """Token t gets t + 1 on top, in every head."""
        added = [[self.indices(layer, head) + 1.0 for head in range(HEADS)] for layer in range(2)]
        self.pool.add_sums(self.row, added)
        for tokens in self.held.values():
            for token, pair in tokens.items():
                pair[1] += token + 1.0

    def indices(self, layer: int, head: int) -> torch.Tensor:
        """The token in each slot of a head, as the pool says."""
        size = self.pool.block_size
        held = self.pool.held(self.row, range(layer, layer + 1))
        index = (held.block_ids[0, head, :, None] * size + torch.arange(size)).flatten()
        index = index[: held.keys.shape[2]]
        return index[index >= 0]

    def cut(self, random) -> None:
        """Keep any blocks in each head, the partial one among them."""
        size = self.pool.block_size
        keep, counts = [], []
        for layer in range(LAYERS):
            ids = self.pool.held(self.row, range(layer, layer + 1)).block_ids
            mask = torch.zeros(ids.shape, dtype=torch.bool)
            counts.append([])
            for head in range(HEADS):
                tokens = self.held[layer, head]
                blocks = sorted({token // size for token in tokens})
                must = [self.seen // size] if self.seen % size else []
                free = [block for block in blocks if block not in must]
                chosen = {*random.sample(free, random.randint(not must, len(free))), *must}
                present = ids[0, head].tolist()
                assert sorted(block for block in present if block >= 0) == blocks
                mask[0, head] = torch.tensor([block in chosen for block in present])
                counts[-1].append(len(chosen))
                self.held[layer, head] = {t: v for t, v in tokens.items() if t // size in chosen}
            keep.append(mask)
        self.pool.compact(self.row, keep, counts)

    def check(self) -> None:
        pool = self.pool
        lengths = pool.lengths(self.row)
        for layer in range(LAYERS):
            held = pool.held(self.row, range(layer, layer + 1))
            keys, values = pool.view(layer, self.row)
            segments = pool.segments(layer, self.row)
            for head in range(HEADS):
                tokens = self.held[layer, head]
                count = int(lengths[layer, head])
                assert count == len(tokens)
                if segments is None:
                    own_keys, own_values = keys[0, head], values[0, head]
                else:
                    part = slice(segments.starts[head], segments.starts[head] + count)
                    own_keys, own_values = keys[0, 0, part], values[0, 0, part]
                    assert segments.lengths[head] == count
                assert own_keys.shape == (count, DIM)
                index = self.indices(layer, head).tolist()
                assert own_keys[:, 0].tolist() == [tokens[token][0] for token in index]
                assert torch.equal(own_values[:, 0], -own_keys[:, 1])
                padded = held.keys.shape[2] - count
                assert torch.equal(held.keys[0, head, padded:], own_keys)
                assert held.sums[0, head, padded:].tolist() == [tokens[t][1] for t in index]
                assert sorted(index) == sorted(tokens)


@settings(max_examples=60, deadline=None)
@given(
    size=st.sampled_from([1, 3, 4]),
    steps=st.lists(
        st.tuples(st.integers(1, 14), st.sampled_from(["", "cut", "cut fit", "fit", "copy"])),
        min_size=1,
        max_size=8,
    ),
    random=st.randoms(use_true_random=False),
)
def test_any_sequence_of_appends_cuts_fits_and_copies(size, steps, random):
    pool = make(rows=3, size=size)
    row, other = Model(pool, salt=0), Model(pool, salt=1)
    for count, then in steps:
        row.append(count)
        row.check()
        if "cut" in then:
            row.cut(random)
        if "fit" in then:
            pool.fit(row.row, 0)
        if then == "copy":
            twin = pool.take()
            pool.fill(twin, pool.export(row.row))
            old, row.row = row.row, twin
            pool.give_back(old)
        row.check()
        other.append(3)
        other.check()


@settings(max_examples=30, deadline=None)
@given(random=st.randoms(use_true_random=False), tokens=st.integers(200, 300))
def test_bytes_follow_what_is_kept_not_the_longest_head(random, tokens):
    pool = make()
    row = Model(pool, salt=0)
    row.append(tokens)
    full = pool.nbytes
    row.cut(random)
    pool.fit(row.row, 0)
    held = int(pool.lengths(row.row).sum())
    slot = (DIM + DIM + 1) * 4 + 4 + 8 / pool.block_size  # keys, values, sum, block id
    assert pool.nbytes <= 1.25 * slot * (held + 2 * pool.block_size * LAYERS * HEADS)
    assert pool.nbytes < full
    assert pool.peak_bytes >= full


def test_rows_run_out_and_writing_without_room_is_an_error():
    pool = make()
    row = pool.take()
    with pytest.raises(PoolFull, match="all 1 rows"):
        pool.take()
    with pytest.raises(ValueError, match="5 slots are needed, 0 reserved"):
        pool.write(0, row, torch.zeros(HEADS, 5, DIM), torch.zeros(HEADS, 5, DIM + 1))
    pool.make_room(row, 8)
    with pytest.raises(ValueError, match="token 3 cannot follow slot 0"):
        pool.advance(row, 2, 3)
    before = pool.nbytes
    pool.give_back(row)
    assert before > pool.nbytes == LAYERS * HEADS * 8  # where the empty segments end
    assert pool.take() == row
