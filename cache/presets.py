"""Named settings of the methods: those of their own codes, and those of the Nexus paper."""

from __future__ import annotations

from typing import Any

from cache.config import AnyConfig
from cache.methods import methods, parse_config

_PAPER: dict[str, Any] = {
    "budget": {"kind": "density", "density": 0.2},
    "prefill_eviction": "end",
}
PRESETS: dict[str, dict[str, Any]] = {
    "nexus-paper": {"method": "nexus", "heads": "layer_mean", "walk_rows": "newest", **_PAPER},
    "topk": {"method": "nexus", "selection": "top_k"},
}


def preset_names() -> tuple[str, ...]:
    """Every name that `preset` takes: all methods, with their defaults, and the presets."""
    return (*methods(), *PRESETS)


def preset(name: str, **changes: Any) -> AnyConfig:
    """The named preset with `changes` on top.

    Raises ValueError for an unknown name, pydantic.ValidationError for an unknown or bad field.
    """
    if name not in preset_names():
        raise ValueError(f"unknown method {name!r}; there are: {', '.join(preset_names())}")
    return parse_config({**PRESETS.get(name, {"method": name}), **changes})
