"""A control: blocks stay by chance alone."""

from __future__ import annotations

from typing import Literal

import torch

from cache.config import EvictingConfig, Selection
from cache.methods.base import Method, Observation
from cache.methods.registry import register


class RandomConfig(EvictingConfig):
    """Every block that is up for choice is equally likely to stay, per KV head."""

    method: Literal["random"] = "random"
    selection: Selection = "reservoir"
    samples: int = 1


@register
class RandomChoice(Method[RandomConfig]):
    """Equal weights: the reservoir then draws uniformly without replacement."""

    Config = RandomConfig

    def weights(self, observation: Observation) -> torch.Tensor:
        present = observation.sorted_block_ids >= 0
        return present.double() / observation.counts.unsqueeze(-1)
