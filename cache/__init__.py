"""KV caches that forget on purpose: eviction under a budget for one persistent stream."""

from cache.config import AnyConfig, DenseConfig, EvictionConfig, NexusConfig, parse_config, preset
from cache.evicting_cache import EvictingCache, make_pool
from cache.generate import decode, generate, prefill
from cache.sampling import Sampling
from cache.stats import CacheStats, EvictionRecord
from cache.store import Pool, PoolFull

__all__ = [
    "AnyConfig",
    "CacheStats",
    "DenseConfig",
    "EvictingCache",
    "EvictionConfig",
    "EvictionRecord",
    "NexusConfig",
    "Pool",
    "PoolFull",
    "Sampling",
    "decode",
    "generate",
    "make_pool",
    "parse_config",
    "prefill",
    "preset",
]
