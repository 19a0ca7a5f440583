"""Many sessions decode as one batch: one forward pass for the next token of each.

The linear layers, which cost a pass its time, see all rows at once. Each row keeps its own cache,
length, position, config and method; attention is computed row by row over views of what each one
holds, so that nothing is padded, copied or masked, and a row's attention is that of its solo run to
the bit. Rows may be others at every step.

What a linear layer returns for a row can depend, in the last bits, on how many rows there are:
another kernel does the sums in another order. `width` fixes that number.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from cache.attention import attach, attend, mark_batch
from cache.batch_linear import BlockedLinears, gains
from cache.evicting_cache import EvictingCache
from cache.generate import cache_keyword
from cache.placement import input_device
from cache.pools import AnyPool
from cache.static_step import StaticStep, can_capture
from cache.store import Pool
from cache.support import UnsupportedModel, shared_rotation


class BatchDecoder:
    """Feeds one token to each of several caches of one model.

    Args:
        pool: the pool that all caches must have their rows in; None takes any.
        width: rows that each pass is padded to; 0 pads nothing. With a fixed width a row's logits
            do not depend, to the last bit, on how many others there are.
        static: compute all rows of `pool`, a uniform one, by static shapes (see `static_step`);
            None does so where that makes one graph of a step.

    Raises UnsupportedModel for a model whose rotation of one row depends on the others' lengths,
    ValueError for `static` without a uniform pool.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pool: AnyPool | None = None,
        *,
        width: int = 0,
        static: bool | None = None,
    ) -> None:
        attach(model)
        _require_own_rotation(model)
        self.model = model
        self.pool = pool
        self.width = width
        self._keyword = cache_keyword(model)
        self._device = input_device(model)
        self._blocked = gains(model)
        self._static: StaticStep | None = None
        if isinstance(pool, Pool):
            if static if static is not None else can_capture(model):
                self._static = StaticStep(model, pool)
        elif static:
            raise ValueError("static shapes need a pool whose heads all hold equally much")

    @torch.inference_mode()
    def step(self, caches: Sequence[EvictingCache], tokens: Sequence[int]) -> torch.Tensor:
        """Feed tokens[i] to caches[i]; float32 logits [B, vocabulary]. Evicts nothing.

        A pass that breaks off leaves every cache as it was. Raises ValueError for caches that
        cannot be fed together.
        """
        self._check(caches, tokens)
        if self._static is not None:
            return self._static.step(caches, tokens)
        batch = _Batch(caches)
        padding = [0] * (self.width - len(caches))
        inputs = [[*tokens, *padding], [*(cache.seen for cache in caches), *padding]]
        ids, positions = torch.tensor(inputs, device=self._device).unsqueeze(-1)
        taken: dict[str, Any] = {self._keyword: batch}
        with BlockedLinears() if self._blocked else nullcontext():
            out = self.model(
                input_ids=ids,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
                **taken,
            )
        batch.finish()
        logits: torch.Tensor = out.logits[: len(caches), -1].float()
        return logits

    def feed(self, cache: EvictingCache, token: int) -> torch.Tensor:
        """`step` for one cache; float32 logits [vocabulary]."""
        return self.step([cache], [token])[0]

    def advance(self, caches: Sequence[EvictingCache], tokens: Sequence[int]) -> torch.Tensor:
        """`step`, and then for each cache the eviction that is due, as `decode` does it."""
        logits = self.step(caches, tokens)
        for cache in caches:
            cache.evict("decode")
        return logits

    def _check(self, caches: Sequence[EvictingCache], tokens: Sequence[int]) -> None:
        if not caches or len(caches) != len(tokens):
            raise ValueError(
                f"{len(caches)} caches and {len(tokens)} tokens: one token for each of at least "
                "one cache is needed"
            )
        if len({id(cache) for cache in caches}) < len(caches):
            raise ValueError("a cache is in the batch twice; it can be fed one token a step")
        if self.width and len(caches) > self.width:
            raise ValueError(f"{len(caches)} caches are more than the width of {self.width}")
        for cache in caches:
            if cache.model is not self.model:
                raise ValueError("a cache of the batch belongs to another model")
            if self.pool is not None and cache.pool is not self.pool:
                raise ValueError("a cache of the batch has its row in another pool")


class _Batch(Cache):
    """What the model takes for its cache during one pass."""

    def __init__(self, caches: Sequence[EvictingCache]) -> None:
        super().__init__(layers=[])
        self._caches = caches
        self._held: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._layers = caches[0].num_layers
        self._attended = 0

    def __len__(self) -> int:
        return self._layers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens that the longest stream has had."""
        return max(cache.seen for cache in self._caches)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [B, H_kv, 1, D], a row to each cache; what comes back is the new ones alone."""
        if layer_idx == 0:
            # All before the first write: where rows share a pool, making room moves them all.
            for cache in self._caches:
                cache.reserve(1)
        self._held = [
            cache.update(key_states[i : i + 1], value_states[i : i + 1], layer_idx)
            for i, cache in enumerate(self._caches)
        ]
        mark_batch(key_states, self)
        return key_states, value_states

    def attend(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """Each row over what its cache holds; rows beyond the caches are padding, and zero."""
        rows = [
            attend(cache, layer, query[i : i + 1], keys, values, scale)
            for i, (cache, (keys, values)) in enumerate(zip(self._caches, self._held, strict=True))
        ]
        self._attended += 1
        missing = query.shape[0] - len(rows)
        if missing:
            rows.append(torch.zeros_like(rows[0]).expand(missing, -1, -1, -1))
        return torch.cat(rows)

    def finish(self) -> None:
        """The new tokens count as seen. Raises RuntimeError when they were not attended to here."""
        if self._attended != self._layers:
            raise RuntimeError(
                "the model does not run the 'evicting' attention (its attn_implementation was "
                "changed after the decoder was made)"
            )
        for cache in self._caches:
            cache.finish_layer(self._layers - 1)


def _require_own_rotation(model: PreTrainedModel) -> None:
    kind = shared_rotation(model)
    if kind is not None:
        raise UnsupportedModel(
            f"{model.config.name_or_path or 'this model'} cannot decode several sessions as one "
            f"batch: its rotary embedding (rope_type {kind!r}) changes for all rows with the "
            "length of the longest; decode its sessions one by one"
        )
