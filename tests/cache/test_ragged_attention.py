"""Segments of a flat buffer, head by head and by a variable-length kernel's arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cache.attention import lower_right_mask
from cache.ragged_attention import ragged_attention, varlen
from cache.ragged_store import Segments

SEGMENTS = Segments(starts=(0, 16, 40), lengths=(13, 20, 7))
SLOTS, DIM, VALUE_DIM = 56, 8, 6


def plain(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float):
    """Softmax by loops over heads and queries; query i of q sees all but the last q - 1 - i."""
    heads, length = query.shape[1], query.shape[2]
    group = heads // len(SEGMENTS.starts)
    out = torch.zeros(1, heads, length, values.shape[-1], dtype=torch.float64)
    for head in range(heads):
        start, count = SEGMENTS.starts[head // group], SEGMENTS.lengths[head // group]
        for i in range(length):
            seen = slice(start, start + count - (length - 1 - i))
            logits = (keys[seen].double() @ query[0, head, i].double()) * scale
            out[0, head, i] = logits.softmax(0) @ values[seen].double()
    return out.float()


def kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor,
) -> torch.Tensor:
    """What the documentation of torch.nn.attention.varlen.varlen_attn says, in loops."""
    assert window_size == ((-1, -1) if max_q == 1 else (-1, 0))
    assert (cu_seq_q.dtype, cu_seq_k.dtype, seqused_k.dtype) == (torch.int32,) * 3
    assert query.is_contiguous()
    group = query.shape[1] // key.shape[1]
    assert enable_gqa == (group > 1)
    assert int(cu_seq_q[-1]) == query.shape[0]
    assert int(cu_seq_k[-1]) == key.shape[0]
    out = query.new_zeros(*query.shape[:2], value.shape[-1])
    for n in range(len(cu_seq_q) - 1):
        rows = range(int(cu_seq_q[n]), int(cu_seq_q[n + 1]))
        first, used = int(cu_seq_k[n]), int(seqused_k[n])
        assert len(rows) <= max_q
        assert used <= max_k
        assert first + used <= int(cu_seq_k[n + 1])
        for i, row in enumerate(rows):
            # With (-1, 0) causal, aligned to the lower right; a single query sees all either way.
            stop = first + used - (len(rows) - 1 - i)
            for head in range(query.shape[1]):
                logits = key[first:stop, head // group] @ query[row, head] * scale
                out[row, head] = logits.softmax(0) @ value[first:stop, head // group]
    return out


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("how", ["heads", "kernel"])
def test_both_ways_equal_plain_attention(group: int, length: int, how: str) -> None:
    torch.manual_seed(group * 10 + length)
    query = torch.randn(1, 3 * group, length, DIM)
    keys, values = torch.randn(SLOTS, DIM), torch.randn(SLOTS, VALUE_DIM)
    for start, count in zip(SEGMENTS.starts, SEGMENTS.lengths, strict=True):
        room = min([s for s in SEGMENTS.starts if s > start], default=SLOTS)
        keys[start + count : room] = math.nan  # what is not valid must not be read
    arguments: tuple[Any, ...] = (query, keys, values, SEGMENTS, 0.3)
    if how == "kernel":
        out = varlen(kernel, *arguments)
    else:
        mask = (lambda count: lower_right_mask(length, count, query)) if length > 1 else None
        out = ragged_attention(*arguments, mask)
    torch.testing.assert_close(out, plain(query, keys, values, 0.3), atol=1e-5, rtol=0)
