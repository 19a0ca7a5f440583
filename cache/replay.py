"""Feeding again what was sampled once, so that a cache becomes what it was."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from cache.evicting_cache import EvictingCache
from cache.generate import forward


@torch.inference_mode()
def replay(
    model: PreTrainedModel,
    cache: EvictingCache,
    ids: Sequence[int],
    *,
    on_token: Callable[[int], None] | None = None,
) -> None:
    """Feed `ids` one by one with the evictions in between, as `decode` fed them.

    on_token is told how many have been fed.
    """
    for fed, token in enumerate(ids, 1):
        forward(model, cache, torch.tensor([token], device=model.device))
        cache.evict("decode")
        if on_token is not None:
            on_token(fed)
