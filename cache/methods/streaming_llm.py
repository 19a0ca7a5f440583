"""StreamingLLM (arXiv 2309.17453): attention sinks and a window of recent tokens, nothing else."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from cache.config import EvictingConfig
from cache.methods.base import Method, Observation, to_unit
from cache.methods.registry import register


class StreamingLLMConfig(EvictingConfig):
    """Keeps the newest tokens that fit, behind the sinks. Positions stay absolute, as in the codes
    that compare with it (its own code numbers positions by slot)."""

    method: Literal["streaming_llm"] = "streaming_llm"
    block_size: int = Field(1, ge=1, description="b, tokens per block; 1: single tokens")
    sinks: int = Field(4, ge=0, description="blocks at the start that always stay")


@register
class StreamingLLM(Method[StreamingLLMConfig]):
    """The newer a block, the larger its weight; by position."""

    Config = StreamingLLMConfig

    def weights(self, observation: Observation) -> torch.Tensor:
        return to_unit(observation.sorted_block_ids.double() + 1)
