"""Attention of queries to single tokens, per KV head: what token-wise methods score by."""

from __future__ import annotations

from typing import Literal

import torch

from cache.methods.base import Observation

Group = Literal["mean", "max", "sum"]


def window_logits(observation: Observation) -> torch.Tensor:
    """q.k * scaling of the window's queries, float32 [L, H_kv, G, W', T] in slot order;
    keys that a query must not see are -inf."""
    return causal_logits(observation, observation.queries.float(), observation.keys.float())


def causal_logits(
    observation: Observation, queries: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """q.k * scaling of queries [L, H_q, W', D] and keys [L, H, T, D]: [L, H, G, W', T], -inf where
    a query must not see a key. The tensors stand in the place of the observation's own, in float32;
    H is H_kv, or 1 where all heads hold the same."""
    # The factor goes to the queries, which are few.
    logits = grouped_logits(queries * observation.scaling.view(-1, 1, 1, 1), keys)
    heads = keys.shape[1]
    if observation.padded:
        return logits.masked_fill_(observation.hidden[:, :heads].unsqueeze(2), float("-inf"))
    # Only the newest keys can be later than a query: the rest of the logits is not touched.
    rows = observation.query_index
    index, slots = observation.key_index[:, :heads].topk(min(len(rows), keys.shape[2]), dim=-1)
    later = (index.unsqueeze(-2) > rows.unsqueeze(-1)).unsqueeze(2)  # [L, H, 1, W', W']
    places = slots[:, :, None, None].expand(*logits.shape[:-1], -1)
    newest = logits.gather(-1, places).masked_fill_(later, float("-inf"))
    return logits.scatter_(-1, places, newest)


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
