"""Everything that decides how a cache goes on: what forks and snapshots are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True)
class CacheState:
    """One session's state.

    tensors: keys, values [L, H_kv, T, D] and block_ids [L, H_kv, N] in slot order; queries, the
    window's ring [L, H_q, W, D], and sums [L, H_kv, T] where the method has them. All else is plain
    data. The random draws need no state: they are functions of the seed and these counters.
    """

    model: Mapping[str, Any]
    config: Mapping[str, Any]
    seen: int
    scaling: tuple[float, ...]
    policy: dict[str, Any]
    stats: dict[str, Any]
    tensors: Mapping[str, torch.Tensor] = field(repr=False)

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
