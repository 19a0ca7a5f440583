"""Attention over keys whose number differs from head to head: segments of one flat buffer.

On CUDA one variable-length kernel does all heads of a layer, where the installed torch has one that
reads segments in place; elsewhere the heads are attended to one after the other, with the same
result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from cache.ragged_store import Segments

# With one query nothing is later; only so does the kernel share out keys among processors.
UNBOUNDED = (-1, -1)


def ragged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    segments: Segments,
    scale: float,
    mask: Callable[[int], torch.Tensor] | None,
) -> torch.Tensor:
    """[1, H_q, q, Dv] for `query` [1, H_q, q, D] over flat `keys` [S, D], `values` [S, Dv].

    segments: of each KV head, the newest q keys being those of the queries. mask: the additive
    lower-right mask [q, T] for T keys; None for a single query.
    """
    kernel = kernel_for(query)
    if kernel is not None:
        return varlen(kernel, query, keys, values, segments, scale)
    heads, length = len(segments.starts), query.shape[2]
    grouped = query[0].unflatten(0, (heads, -1))  # [H_kv, G, q, D]
    out = query.new_empty(*grouped.shape[:-1], values.shape[-1])
    for head, (start, count) in enumerate(zip(segments.starts, segments.lengths, strict=True)):
        part = slice(start, start + count)
        folded = grouped[head].reshape(1, 1, -1, query.shape[-1])
        own = None if mask is None else mask(count).repeat(grouped.shape[1], 1)
        attended = scaled_dot_product_attention(
            folded, keys[None, None, part], values[None, None, part], attn_mask=own, scale=scale
        )
        out[head] = attended.view(grouped.shape[1], length, -1)
    return out.flatten(0, 1).unsqueeze(0)


def varlen(
    kernel: Callable[..., Any],
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    segments: Segments,
    scale: float,
) -> torch.Tensor:
    """The same by a kernel with the arguments of `torch.nn.attention.varlen.varlen_attn`.

    Each KV head is one sequence of its batch: q queries of G heads, over the segment's keys.
    """
    heads, length, device = len(segments.starts), query.shape[2], query.device
    packed = query[0].unflatten(0, (heads, -1)).transpose(1, 2).flatten(0, 1)  # [H_kv * q, G, D]
    ends = [*segments.starts, keys.shape[0]]
    out = kernel(
        packed.contiguous(),
        keys.unsqueeze(1),
        values.unsqueeze(1),
        torch.arange(heads + 1, dtype=torch.int32, device=device) * length,
        torch.tensor(ends, dtype=torch.int32, device=device),
        length,
        max(segments.lengths),
        scale=scale,
        window_size=UNBOUNDED if length == 1 else (-1, 0),  # causal, the last query seeing all keys
        enable_gqa=packed.shape[1] > 1,
        seqused_k=torch.tensor(segments.lengths, dtype=torch.int32, device=device),
    )
    return out.unflatten(0, (heads, length)).transpose(1, 2).flatten(0, 1).unsqueeze(0)


_ASKED_FOR = frozenset({"scale", "window_size", "enable_gqa", "seqused_k"})


def kernel_for(query: torch.Tensor) -> Callable[..., Any] | None:
    """`varlen_kernel` where it takes queries of that dtype and device."""
    if query.is_cuda and query.dtype in (torch.float16, torch.bfloat16):
        return varlen_kernel()
    return None


@cache
def varlen_kernel() -> Callable[..., Any] | None:
    """torch's variable-length attention, if it can read segments with room between them and knows
    all that `varlen` asks for; its arguments became more from release to release."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = set(inspect.signature(varlen_attn).parameters)
    return varlen_attn if known >= _ASKED_FOR else None
