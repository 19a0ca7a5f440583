"""KV caches that forget on purpose: eviction under a budget for one persistent stream."""

from cache.config import AnyConfig, DenseConfig, EvictingConfig
from cache.evicting_cache import EvictingCache
from cache.generate import decode, generate, prefill, replay
from cache.methods import Method, Observation, methods, parse_config, register
from cache.methods.nexus import NexusConfig
from cache.pools import AnyPool, make_pool
from cache.presets import preset, preset_names
from cache.ragged_store import RaggedPool
from cache.sampling import Sampling
from cache.snapshot import load_snapshot, save_snapshot
from cache.stats import CacheStats, EvictionRecord
from cache.store import Pool, PoolFull

__all__ = [
    "AnyConfig",
    "AnyPool",
    "CacheStats",
    "DenseConfig",
    "EvictingCache",
    "EvictingConfig",
    "EvictionRecord",
    "Method",
    "NexusConfig",
    "Observation",
    "Pool",
    "PoolFull",
    "RaggedPool",
    "Sampling",
    "decode",
    "generate",
    "load_snapshot",
    "make_pool",
    "methods",
    "parse_config",
    "prefill",
    "preset",
    "preset_names",
    "register",
    "replay",
    "save_snapshot",
]
