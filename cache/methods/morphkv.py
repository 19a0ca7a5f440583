"""MorphKV (arXiv 2503.00979): what the recent tokens agree on, cut again at every token."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from cache.config import EvictingConfig
from cache.methods.base import Method, Observation, to_unit
from cache.methods.registry import register
from cache.methods.token_attention import window_logits


class MorphKVConfig(EvictingConfig):
    """Defaults are the LongBench settings of its own code, whose capacity counts the window.

    That code cuts before a step's attention, down to the budget and the step's own token; cutting
    to the budget after the step before it is the same. It caches its window's logits, which get out
    of step with their keys once heads differ; here they are computed again from the kept queries.
    """

    method: Literal["morphkv"] = "morphkv"
    block_size: int = Field(1, ge=1, description="b, tokens per block; 1: single tokens")
    sinks: int = 0
    window: int = Field(32, ge=1, description="W, newest tokens, that vote and stay")
    fuse: Literal["sum", "max"] = Field("sum", description="over the rows of the window")


@register
class MorphKV(Method[MorphKVConfig]):
    """Logits summed over the query group, softmax of each row over the tokens before the window
    alone, rows fused."""

    Config = MorphKVConfig

    def weights(self, observation: Observation) -> torch.Tensor:
        logits = window_logits(observation).sum(2)  # [L, H_kv, W', T]
        first = observation.seen - observation.queries.shape[2]
        newer = (observation.key_index >= first).unsqueeze(-2)
        rows = logits.masked_fill(newer, float("-inf")).softmax(-1).nan_to_num(0.0)
        fused = rows.sum(-2) if self.config.fuse == "sum" else rows.amax(-2)
        return to_unit(observation.block_weights(fused))
