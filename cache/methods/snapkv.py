"""SnapKV (arXiv 2404.14469): attention of the prompt's last queries, smoothed along the prompt."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch.nn.functional import avg_pool1d, max_pool1d

from cache.config import EvictingConfig, Scope
from cache.methods.base import Method, Observation, to_unit
from cache.methods.registry import register
from cache.methods.token_attention import Group, reduce_group, window_logits


class SnapKVConfig(EvictingConfig):
    """Defaults are the LongBench settings of its own code; that has no sinks, and evicts only
    after a prompt has been read, so that the cache grows while it decodes."""

    method: Literal["snapkv"] = "snapkv"
    scope: Scope = "prefill"
    block_size: int = Field(1, ge=1, description="b, tokens per block; 1: single tokens")
    sinks: int = 0
    window: int = Field(32, ge=1, description="W, newest queries that are observed and kept")
    kernel: int = Field(7, ge=1, description="width of the pooling along the prompt, odd")
    pooling: Literal["avg", "max"] = "max"
    group: Group = Field("mean", description="over the queries of a KV head, before the pooling")


@register
class SnapKV(Method[SnapKVConfig]):
    """Softmax over all keys, mean over the window's rows, pooled over the tokens before it."""

    Config = SnapKVConfig

    def weights(self, observation: Observation) -> torch.Tensor:
        config = self.config
        attention = window_logits(observation).softmax(-1).mean(-2)
        tokens = reduce_group(attention, config.group, 2)  # [L, H_kv, T] in slot order
        order = observation.slot_order
        along = tokens.gather(-1, order)
        before = along.shape[-1] - observation.queries.shape[2]
        if before > 0:
            pool = avg_pool1d if config.pooling == "avg" else max_pool1d
            width = config.kernel // 2
            along = torch.cat(
                [
                    pool(along[..., :before], config.kernel, stride=1, padding=width),
                    along[..., before:],
                ],
                -1,
            )
        pooled = torch.empty_like(tokens).scatter_(-1, order, along)
        return to_unit(observation.block_weights(pooled))
