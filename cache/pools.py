"""Which kind of pool a config needs, and whether a pool fits a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from cache.config import AnyConfig, EvictingConfig
from cache.methods import Method, make_method
from cache.placement import places
from cache.ragged_store import RaggedPool
from cache.split_store import SplitPool
from cache.store import Pool

AnyPool = Pool | RaggedPool | SplitPool


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What of a model its cache's size depends on."""

    layers: int
    kv_heads: int
    query_heads: int
    head_dim: int


def cache_shape(config: PreTrainedConfig) -> CacheShape:
    """The shape of a cache for a model with this config."""
    shape = config.get_text_config()
    heads = shape.num_attention_heads
    return CacheShape(
        layers=shape.num_hidden_layers,
        kv_heads=getattr(shape, "num_key_value_heads", None) or heads,
        query_heads=heads,
        head_dim=getattr(shape, "head_dim", None) or shape.hidden_size // heads,
    )


def make_pool(
    model: PreTrainedModel, config: AnyConfig, *, rows: int = 1, forks: Sequence[AnyConfig] = ()
) -> AnyPool:
    """A pool of `rows` sessions in the shape and dtype of `model`, for caches of `config`.

    Its tensors lie where the layers compute: it is split where these are on several devices.
    Raises ValueError for `forks` (see `EvictingCache`) that cannot be served together.
    """
    shape = cache_shape(model.config)
    kind = RaggedPool if config.ragged else Pool
    with_sums = observer_of((config, *forks)) is not None

    def part(layers: int, device: torch.device) -> Pool | RaggedPool:
        return kind(
            layers=layers,
            kv_heads=shape.kv_heads,
            key_dim=shape.head_dim,
            value_dim=shape.head_dim,
            block_size=config.block_size,
            dtype=model.dtype,
            device=device,
            rows=rows,
            with_sums=with_sums,
        )

    found = places(model)
    if len(found) == 1:
        return part(shape.layers, found[0].device)
    return SplitPool(found, part)


def observer_of(configs: Sequence[AnyConfig]) -> Method[Any] | None:
    """The method whose `observe` the sums come from: there is one kind of sums in a cache."""
    methods = [make_method(each) for each in configs if isinstance(each, EvictingConfig)]
    observers = [method for method in methods if method.observes]
    if len({type(method) for method in observers}) > 1:
        names = ", ".join(sorted({method.config.method for method in observers}))
        raise ValueError(f"{names} add up different things; one cache can serve one of them")
    return observers[0] if observers else None


def require_fit(pool: AnyPool, config: AnyConfig, observer: Method[Any] | None) -> None:
    """Raise ValueError unless `pool` can hold a row for `config` with that observer."""
    wanted = (config.block_size, config.ragged, observer is not None)
    has = (pool.block_size, pool.ragged, pool.with_sums)
    for name, want, have in zip(("block_size", "ragged", "with_sums"), wanted, has, strict=True):
        if want != have and not (name == "with_sums" and have):
            raise ValueError(
                f"the pool was made for {name}={have}, this config needs {want}: make it with "
                "make_pool(model, config)"
            )
