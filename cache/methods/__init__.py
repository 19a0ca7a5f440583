"""Eviction methods by name. One method, one small file."""

from cache.methods.base import Method, Observation
from cache.methods.h2o import H2O
from cache.methods.morphkv import MorphKV
from cache.methods.nexus import Nexus
from cache.methods.random_choice import RandomChoice
from cache.methods.registry import make_method, methods, parse_config, register
from cache.methods.snapkv import SnapKV
from cache.methods.streaming_llm import StreamingLLM

__all__ = [
    "H2O",
    "Method",
    "MorphKV",
    "Nexus",
    "Observation",
    "RandomChoice",
    "SnapKV",
    "StreamingLLM",
    "make_method",
    "methods",
    "parse_config",
    "register",
]
