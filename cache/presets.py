"""Named settings of the methods: those of their own codes, and those of the Nexus paper."""

from __future__ import annotations

from typing import Any

from cache.config import AnyConfig
from cache.methods import methods, parse_config

_PYRAMID: dict[str, Any] = {"layer_budgets": "pyramid"}
_ADAPTIVE: dict[str, Any] = {"head_budgets": "adaptive"}
# PyramidKV's code runs its own method and its rivals with a window of 8.
_PYRAMIDKV: dict[str, Any] = {"method": "snapkv", "window": 8, **_PYRAMID}

PRESETS: dict[str, dict[str, Any]] = {
    "topk": {"method": "nexus", "selection": "top_k"},
    "pyramidkv": _PYRAMIDKV,
    "ada-snapkv": {"method": "snapkv", **_ADAPTIVE},
    "ada-pyramidkv": {**_PYRAMIDKV, **_ADAPTIVE},
    "ada-nexus": {"method": "nexus", **_ADAPTIVE},
}

# NAME-paper: what "Nexus Sampling" runs every method with; sinks stay as the methods' own codes
# have them.
_PAPER_SUFFIX = "-paper"
_PAPER: dict[str, Any] = {
    "budget": {"kind": "density", "density": 0.2},
    "prefill_eviction": "end",
}
_NEXUS_PAPER: dict[str, Any] = {"heads": "layer_mean", "walk_rows": "newest"}


def preset_names() -> tuple[str, ...]:
    """Every name that `preset` takes: all methods, with their defaults, and the presets."""
    own = (*methods(), *PRESETS)
    return (*own, *(name + _PAPER_SUFFIX for name in own if name != "dense"))


def preset(name: str, **changes: Any) -> AnyConfig:
    """The named preset with `changes` on top.

    Raises ValueError for an unknown name, pydantic.ValidationError for an unknown or bad field.
    """
    if name not in preset_names():
        raise ValueError(f"unknown method {name!r}; there are: {', '.join(preset_names())}")
    base = name.removesuffix(_PAPER_SUFFIX)
    data = {**PRESETS.get(base, {"method": base})}
    if name != base:
        data.update(_PAPER)
        if data["method"] == "nexus" and "head_budgets" not in data:  # which needs scores per head
            data.update(_NEXUS_PAPER)
    return parse_config({**data, **changes})
