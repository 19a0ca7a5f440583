"""Attention of the window's queries to blocks: the rows a(q) that scores are made of."""

from __future__ import annotations

from typing import Literal

import torch

from cache.budgets import ceil_blocks
from cache.methods.base import Observation
from cache.methods.token_attention import causal_logits

Heads = Literal["layer_mean", "layer_attention", "kv_head"]


def block_rows(observation: Observation, heads: Heads) -> torch.Tensor:
    """Rows a(q) of shape [L, H', W', N] float32, oldest block first; each sums to 1.

    Causal softmax of q.k * scaling over all keys present, in float32, summed inside each block
    ("Nexus Sampling", section 3.1). H' is H_kv for `kv_head` (mean over the query group), else 1:
    `layer_mean` averages queries and keys over heads before the softmax, `layer_attention` averages
    the attention of all heads after it.
    """
    queries, keys = observation.queries.float(), observation.keys.float()
    order = observation.order
    if heads == "layer_mean":
        queries, keys = queries.mean(1, keepdim=True), keys.mean(1, keepdim=True)
    if heads != "kv_head":  # one decision per layer: all heads hold the same blocks
        order = order[:, :1]
    attention = causal_logits(observation, queries, keys).softmax(-1)  # [L, H, G, W', T]
    per_block = _sum_blocks(attention.mean(2), observation.block_size)
    if heads == "layer_attention":
        per_block = per_block.mean(1, keepdim=True)
    per_block = per_block.gather(-1, order.unsqueeze(-2).expand_as(per_block))
    return per_block / per_block.sum(-1, keepdim=True)


def _sum_blocks(values: torch.Tensor, block_size: int) -> torch.Tensor:
    """Sum the last axis in blocks; the last block may be partial."""
    pages = ceil_blocks(values.shape[-1], block_size)
    missing = pages * block_size - values.shape[-1]
    return torch.nn.functional.pad(values, (0, missing)).unflatten(-1, (pages, -1)).sum(-1)
