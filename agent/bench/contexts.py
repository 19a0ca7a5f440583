"""How a stream comes to have N tokens behind it without reading them: random keys and values.

A dense cache gets all N. One that evicts gets what it would hold after N tokens: as many blocks as
its budget says, sinks and the newest ones among them, the others drawn by chance, with queries and
sums that are random too. Speed and bytes do not depend on what the numbers are; which blocks a
later step evicts does, and is not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from cache import EvictingCache
from cache.budgets import ceil_blocks
from cache.config import EvictingConfig
from cache.policy import Policy
from cache.state import CacheState


@dataclass(frozen=True)
class Sizes:
    """Of a model: what its caches are shaped by."""

    layers: int
    heads: int
    kv_heads: int
    dim: int
    vocabulary: int


def sizes_of(model: PreTrainedModel) -> Sizes:
    """Read from its config."""
    shape = model.config.get_text_config()
    heads = shape.num_attention_heads
    return Sizes(
        shape.num_hidden_layers,
        heads,
        getattr(shape, "num_key_value_heads", None) or heads,
        getattr(shape, "head_dim", None) or shape.hidden_size // heads,
        shape.vocab_size,
    )


class Content:
    """Random keys and values [L, H_kv, tokens, D] that all contestants share the front of."""

    def __init__(self, model: PreTrainedModel, tokens: int, *, seed: int = 0) -> None:
        self.sizes = sizes_of(model)
        self.tokens = tokens
        self.random = torch.Generator(device=model.device).manual_seed(seed)
        self._dtype, self._device = model.dtype, model.device
        self.keys = self.normal(self.sizes.kv_heads, tokens)
        self.values = self.normal(self.sizes.kv_heads, tokens)

    def normal(self, heads: int, tokens: int) -> torch.Tensor:
        """[L, heads, tokens, D] in the model's dtype, on its device."""
        shape = (self.sizes.layers, heads, tokens, self.sizes.dim)
        out = torch.empty(shape, dtype=self._dtype, device=self._device)
        for layer in out:  # by layer, so that no second copy of all is ever there
            layer.normal_(generator=self.random)
        return out

    def uniform(self, *shape: int) -> torch.Tensor:
        """float32 in [0, 1)."""
        return torch.rand(shape, generator=self.random, device=self._device)


def filled_state(cache: EvictingCache, content: Content, seen: int, *, room: int) -> CacheState:
    """The state of `cache`, a fresh one, as it might be after `seen` tokens.

    room: slots that are reserved at once, so that nothing is timed while it grows; an evicting
    cache under a token budget needs what it reserves itself.
    """
    if seen < 1:
        raise ValueError(f"{seen} tokens: nothing to fill a cache with")
    config, size = cache.config, cache.config.block_size
    base = cache.state()
    shape = content.sizes
    blocks = torch.arange(ceil_blocks(seen, size), device=content.keys.device)
    kept = blocks.expand(shape.layers, shape.kv_heads, -1)
    decided: dict[str, Any] = base.policy
    if isinstance(config, EvictingConfig):
        policy = Policy(config)
        target = policy.target("prefill", seen=seen, resident=seen, last_chunk=True)
        decided = policy.state()
        if target < len(blocks):
            drawn = content.uniform(*kept.shape)
            drawn[:, :, policy.forced_mask(blocks, seen)] = 2.0
            kept = drawn.topk(target, dim=-1).indices.sort(dim=-1).values
    missing = len(blocks) * size - seen  # of the newest block, which always stays
    held = kept.shape[-1] * size - missing
    if held > content.tokens:
        raise ValueError(f"{held} tokens are to be held, the content has {content.tokens}")
    tensors = {
        "keys": content.keys[:, :, :held],
        "values": content.values[:, :, :held],
        "block_ids": kept,
    }
    if cache.pool.with_sums:
        tensors["sums"] = content.uniform(shape.layers, shape.kv_heads, held)
    if config.ragged:
        tensors = {name: plane.flatten(0, 2) for name, plane in tensors.items()}
        tensors["lengths"] = torch.full((shape.layers, shape.kv_heads), held)
    if window := getattr(config, "window", 0):
        tensors["queries"] = content.normal(shape.heads, window)
    return replace(
        base,
        seen=seen,
        scaling=(shape.dim**-0.5,) * shape.layers,
        policy=decided,
        stats={**base.stats, "evictions": int(kept.shape[-1] < len(blocks))},
        room=room,
        tensors=tensors,
    )
