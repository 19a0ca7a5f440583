"""Eviction methods by name. One method, one small file."""

from __future__ import annotations

from cache.config import NexusConfig
from cache.methods.base import Method
from cache.methods.nexus import Nexus

_METHODS: dict[type, type[Method]] = {NexusConfig: Nexus}


def make_method(config: NexusConfig) -> Method:
    """The method that an evicting config describes."""
    return _METHODS[type(config)](config)


__all__ = ["Method", "make_method"]
