"""Eviction methods by name. One method, one small file."""

from __future__ import annotations

from cache.config import AnyConfig, DenseConfig, NexusConfig
from cache.methods.base import Method
from cache.methods.nexus import Nexus

_METHODS: dict[type, type[Method]] = {NexusConfig: Nexus}


def make_method(config: AnyConfig) -> Method | None:
    """The method that `config` describes; None for dense, which never evicts."""
    if isinstance(config, DenseConfig):
        return None
    return _METHODS[type(config)](config)


__all__ = ["Method", "make_method"]
