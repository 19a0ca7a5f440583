"""H2O (arXiv 2306.14048): heavy hitters, the keys with the most attention over their whole life."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field

from cache.config import EvictingConfig
from cache.methods.base import Method, Observation, to_unit
from cache.methods.registry import register
from cache.methods.token_attention import grouped_logits

_QUERIES = 64  # rows of the attention matrix held at once


class H2OConfig(EvictingConfig):
    """As its own code keeps scores: they start with the first query that sees a key, survive
    evictions, and are dropped with their key. It halves the budget between heavy hitters and recent
    tokens (here: what sinks and pins leave of it); `recent` beside that is a number of tokens that
    always stay."""

    method: Literal["h2o"] = "h2o"
    block_size: int = Field(1, ge=1, description="b, tokens per block; 1: single tokens")
    sinks: int = 0
    recent_share: float = Field(
        0.5,
        ge=0,
        lt=1,
        description="share of the budget, less sinks and pins, that the newest blocks have for "
        "themselves (under the reservoir they are much likelier to stay, not certain)",
    )


@register
class H2O(Method[H2OConfig]):
    """Column sums of the attention matrix, added up over every query the cache has seen."""

    Config = H2OConfig
    observes: ClassVar[bool] = True

    def observe(self, queries: torch.Tensor, keys: torch.Tensor, scaling: float) -> torch.Tensor:
        return attention_sums(queries, keys, scaling)

    def weights(self, observation: Observation) -> torch.Tensor:
        if observation.sums is None:
            raise RuntimeError("H2O scores what `observe` returned, and nothing was observed")
        weights = to_unit(observation.block_weights(observation.sums))
        recent = math.floor(observation.room * self.config.recent_share + 1e-9)
        weights[..., weights.shape[-1] - recent :] += 1  # above all others
        return weights


def attention_sums(queries: torch.Tensor, keys: torch.Tensor, scaling: float) -> torch.Tensor:
    """Sum over the queries of softmax(q.k * scaling), float32 [H_kv, T], memory linear in T.

    The mean over the queries that share a KV head: of all ways to reduce them the one, up to a
    factor, that does not depend on how the stream was cut into passes.

    queries: [H_q, q, D], keys: [H_kv, T, D]; the last q keys are those of the queries, in order,
    and a query sees the keys up to its own.
    """
    heads, length, _ = keys.shape
    queries, keys, count = queries.float(), keys.float(), queries.shape[1]
    column = torch.arange(length, device=keys.device)
    sums = torch.zeros(heads, queries.shape[0] // heads, length, device=keys.device)
    for first in range(0, count, _QUERIES):
        logits = grouped_logits(queries[:, first : first + _QUERIES], keys) * scaling
        own = torch.arange(first, first + logits.shape[2], device=keys.device) + length - count
        logits.masked_fill_(column > own[:, None], float("-inf"))
        sums += logits.softmax(-1).sum(2)
    return sums.mean(1)
