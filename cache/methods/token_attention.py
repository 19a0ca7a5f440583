"""Attention of queries to single tokens, per KV head: what token-wise methods score by."""

from __future__ import annotations

from typing import Literal

import torch

from cache.methods.base import Observation

Group = Literal["mean", "max", "sum"]


def window_logits(observation: Observation) -> torch.Tensor:
    """q.k * scaling of the window's queries, float32 [L, H_kv, G, W', T] in slot order;
    keys that a query must not see are -inf."""
    queries, keys = observation.queries.float(), observation.keys.float()
    grouped = queries.unflatten(1, (keys.shape[1], -1))
    logits = grouped @ keys.unsqueeze(2).transpose(-1, -2)
    logits *= observation.scaling.view(-1, 1, 1, 1, 1)
    return logits.masked_fill_(observation.hidden.unsqueeze(2), float("-inf"))


def reduce_group(values: torch.Tensor, group: Group, dim: int) -> torch.Tensor:
    """Reduce over the queries that share a KV head."""
    if group == "max":
        return values.amax(dim)
    return values.mean(dim) if group == "mean" else values.sum(dim)
