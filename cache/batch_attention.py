"""Attention of one new token of every row of a uniform pool, by lengths that are on the device.

Shapes depend on the pool alone, so that a pass can be captured once and replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from cache.ragged_attention import UNBOUNDED, kernel_for


def attend_rows(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """[R, H_q, 1, Dv] for `query` [R, H_q, 1, D] over the first `counts` [R] (at least one) of
    `keys` [R, H_kv, S, D] and `values` [R, H_kv, S, Dv].

    What lies beyond must be finite: the mask multiplies it by zero.
    """
    kernel = kernel_for(query)
    if kernel is not None:
        return varlen_rows(kernel, query, keys, values, counts, scale)
    rows, heads, slots, dim = keys.shape
    seen = torch.arange(slots, device=keys.device) < counts[:, None, None, None]
    folded = query.view(rows, heads, -1, dim)  # the group as query length: each key is read once
    out = scaled_dot_product_attention(folded, keys, values, attn_mask=seen, scale=scale)
    return out.reshape(rows, -1, 1, values.shape[-1])


def varlen_rows(
    kernel: Callable[..., Any],
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The same by a kernel with the arguments of `torch.nn.attention.varlen.varlen_attn`, which
    reads no more than `counts` say. Each KV head of a row is one sequence of its batch."""
    rows, heads, slots, dim = keys.shape
    sequences = rows * heads
    starts = torch.arange(sequences + 1, dtype=torch.int32, device=keys.device)
    out = kernel(
        query.reshape(sequences, -1, dim),
        keys.reshape(-1, 1, dim),
        values.reshape(-1, 1, values.shape[-1]),
        starts,
        starts * slots,
        1,
        slots,
        scale=scale,
        window_size=UNBOUNDED,
        enable_gqa=query.shape[1] > heads,
        seqused_k=counts.to(torch.int32).repeat_interleave(heads),
    )
    return out.reshape(rows, -1, 1, values.shape[-1])
