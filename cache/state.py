"""Everything that decides how a cache goes on: what forks and snapshots are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from cache.budgets import ceil_blocks
from cache.config import AnyConfig


@dataclass(frozen=True)
class CacheState:
    """One session's state.

    tensors: what the pool exports of its row: keys, values [L, H_kv, T, D], block_ids [L, H_kv, N]
    and sums [L, H_kv, T] where the method has them, in slot order; where heads can differ, the same
    as [all slots, D], [all blocks] and [all slots], head after head, and lengths [L, H_kv].
    queries: the window's ring [L, H_q, W, D]. room: slots there was room for, where that is one
    number. All else is plain data. The random draws need no
    state: they are functions of the seed and these counters.
    """

    model: Mapping[str, Any]
    config: Mapping[str, Any]
    seen: int
    scaling: tuple[float, ...]
    policy: dict[str, Any]
    stats: dict[str, Any]
    room: int
    tensors: Mapping[str, torch.Tensor] = field(repr=False)

    def uncut(self, config: AnyConfig) -> CacheState:
        """The same for a cache of `config`, of whatever block size and kind of pool, that goes on
        from here: all tokens are there, in order."""
        lead = (self.model["num_hidden_layers"], -1, self.seen)
        planes = {
            name: self.tensors[name].reshape(*lead, self.tensors[name].shape[-1])
            for name in ("keys", "values")
        }
        if "sums" in self.tensors:
            planes["sums"] = self.tensors["sums"].reshape(lead)
        layers, heads = planes["keys"].shape[:2]
        blocks = torch.arange(ceil_blocks(self.seen, config.block_size))
        planes["block_ids"] = blocks.to(planes["keys"].device).expand(layers, heads, -1)
        if config.ragged:
            planes = {name: plane.flatten(0, 2) for name, plane in planes.items()}
            planes["lengths"] = torch.full((layers, heads), self.seen)
        return replace(self, tensors=planes)

    def require(self, model: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Raise ValueError, naming the first difference, unless both are the same as here."""
        for what, mine, yours in (("model", self.model, model), ("config", self.config, config)):
            for name in {**mine, **yours}:
                if mine.get(name) != yours.get(name):
                    raise ValueError(
                        f"the saved cache is of another {what}: {name} was {mine.get(name)!r}, "
                        f"here it is {yours.get(name)!r}"
                    )


def model_shape(model: PreTrainedModel) -> dict[str, Any]:
    """What of a model must be the same for its cache to make sense: architecture, not weights."""
    shape = model.config.get_text_config()
    names = (
        "model_type",
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    )
    found = {name: getattr(shape, name, None) for name in names}
    found["rope"] = str(getattr(shape, "rope_parameters", None))
    found["dtype"] = str(model.dtype).removeprefix("torch.")
    return found
