"""The attention function that reads an `EvictingCache`.

It is registered with transformers under a name of its own and chosen per model by `attach`; nothing
that other models use is changed. It gets rotated queries, hands the newest ones to the cache, and
builds its own mask: all slots that were there before a forward pass are older than every new token,
so causality is lower-right over the slots, whatever their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from cache.ragged_attention import ragged_attention
from cache.support import require_supported

if TYPE_CHECKING:
    from cache.evicting_cache import EvictingCache

NAME = "evicting"
_OWNER = "evicting_cache"
_BATCH = "evicting_batch"
_UNSERVED = ("sliding_window", "softcap", "s_aux")


def attach(model: PreTrainedModel) -> None:
    """Make `model` attend through this module; harmless when it does already.

    Raises UnsupportedModel when the architecture cannot be served.
    """
    if model.config._attn_implementation == NAME:
        return
    require_supported(model.config)
    AttentionInterface.register(NAME, evicting_attention)
    model.set_attn_implementation(NAME)


def mark_owner(keys: torch.Tensor, owner: EvictingCache) -> None:
    """Say which cache a view of keys belongs to; the view is what the attention function gets."""
    setattr(keys, _OWNER, owner)


class Batch(Protocol):
    """New tokens of several caches in one forward pass, one token each."""

    def attend(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """[B, H_q, 1, D] of the batch's caches: [B, 1, H_q, D]."""
        ...


def mark_batch(keys: torch.Tensor, batch: Batch) -> None:
    """Say that `keys` are new ones of several caches, to which `batch` attends."""
    setattr(keys, _BATCH, batch)


def evicting_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of `query` [1, H_q, q, D] over `key`, `value` [1, H_kv, T, D]; [1, q, H_q, D].

    Where heads hold different numbers of keys these are one flat buffer [1, 1, S, D], of which the
    owner knows the segments.
    `attention_mask` is not used: transformers makes none for this name. Raises ValueError for a
    batch of sequences and for features it does not compute.
    """
    for name in _UNSERVED:
        if kwargs.get(name) is not None:
            raise ValueError(f"attention with {name}={kwargs[name]} is not served by {NAME!r}")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    number: Any = module.layer_idx  # an attribute that a Module does not declare
    layer = int(number)
    batch: Batch | None = getattr(key, _BATCH, None)
    if batch is not None:
        return batch.attend(layer, query, scale), None
    if query.shape[0] != 1:
        raise ValueError(
            f"{NAME!r} attention takes one sequence at a time, not a batch of {query.shape[0]}: it "
            "cannot see padding; use a cache per sequence, or a BatchDecoder for one token of each"
        )
    owner: EvictingCache | None = getattr(key, _OWNER, None)
    out = attend(owner, layer, query, key, value, scale)
    if owner is not None:
        owner.finish_layer(layer)
    return out, None


def attend(
    owner: EvictingCache | None,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of one sequence, of which `owner` takes note; shapes as above."""
    _, query_heads, length, _ = query.shape
    segments = owner.segments(layer) if owner is not None else None
    if owner is not None:
        owner.observe(layer, query, key, segments, scale)

    def mask(keys: int) -> torch.Tensor:
        if owner is not None:
            return owner.causal_mask(length, keys, query)
        return lower_right_mask(length, keys, query)

    if segments is not None:
        causal = mask if length > 1 else None
        out = ragged_attention(query, key[0, 0], value[0, 0], segments, scale, causal)
    else:
        group = query_heads // key.shape[1]
        # Folding the query group into the query length reads each key once.
        folded = query.reshape(1, key.shape[1], group * length, query.shape[-1])
        full = mask(key.shape[2]).repeat(group, 1) if length > 1 else None
        out = scaled_dot_product_attention(folded, key, value, attn_mask=full, scale=scale)
        out = out.reshape(1, query_heads, length, value.shape[-1])
    return out.transpose(1, 2)


def lower_right_mask(queries: int, keys: int, like: torch.Tensor) -> torch.Tensor:
    """Additive mask [queries, keys]: the last query sees all keys, each one before it one fewer."""
    hidden = torch.ones(queries, keys, dtype=torch.bool, device=like.device).triu(
        keys - queries + 1
    )
    return torch.zeros(queries, keys, dtype=like.dtype, device=like.device).masked_fill_(
        hidden, float("-inf")
    )
