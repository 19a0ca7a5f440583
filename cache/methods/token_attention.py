"""Attention of queries to single tokens, per KV head: what token-wise methods score by."""

from __future__ import annotations

from typing import Literal

import torch

from cache.methods.base import Observation

Group = Literal["mean", "max", "sum"]


def window_logits(observation: Observation) -> torch.Tensor:
    """q.k * scaling of the window's queries, float32 [L, H_kv, G, W', T] in slot order;
    keys that a query must not see are -inf."""
    logits = grouped_logits(observation.queries.float(), observation.keys.float())
    logits *= observation.scaling.view(-1, 1, 1, 1, 1)
    return logits.masked_fill_(observation.hidden.unsqueeze(2), float("-inf"))


def grouped_logits(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """q.k of queries [..., H_q, W, D] and keys [..., H, T, D]: [..., H, G, W, T], G = H_q / H.

    The group is folded into the query length: broadcast over it, a product would copy the keys.
    """
    group = queries.shape[-3] // keys.shape[-3]
    folded = queries.unflatten(-3, (-1, group)).flatten(-3, -2)
    return (folded @ keys.transpose(-1, -2)).unflatten(-2, (group, -1))


def reduce_group(values: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """Reduce over the queries that share a KV head."""
    if group == "max":
        return values.amax(dim)
    return values.mean(dim) if group == "mean" else values.sum(dim)
