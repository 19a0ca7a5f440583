"""Bytes that a model's weights take, counted on the meta device before any are there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from agent.load_options import weight_bits
from agent.model_convert import quiet


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights in memory, and how they were counted."""

    parameters: int
    size: int
    exact: bool  # otherwise worked out from the bits that a quantization_config names


def weights_of(
    config: PreTrainedConfig, dtype: torch.dtype, quantization: Mapping[str, Any] | None = None
) -> Weights:
    """Weights of a model with this config, where `quantization` says how its linear layers but the
    last are held."""
    model = _empty(config, dtype)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    size = sum(parameter.nbytes for parameter in model.parameters())
    size += sum(buffer.nbytes for buffer in model.buffers())
    if quantization is None:
        return Weights(parameters, size, exact=True)
    bits = weight_bits(quantization)
    if bits is None:
        return Weights(parameters, size, exact=False)
    group = quantization.get("group_size", 64)
    scales = 16 / group if bits < 8 and isinstance(group, int) and group > 0 else 0
    if quantization.get("bnb_4bit_use_double_quant"):
        scales = 8 / 64  # the scales are quantised too
    last = model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not last:
            size -= int(module.weight.nbytes - module.weight.numel() * (bits + scales) / 8)
    return Weights(parameters, size, exact=False)


def int8_weights(config: PreTrainedConfig) -> Weights:
    """Weights with the 8-bit linear layers of agent.int8_linear, the last one among them."""
    model = _empty(config, torch.float32)
    tied = bool(config.get_text_config().tie_word_embeddings)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    size = sum(parameter.nbytes for parameter in model.parameters())
    for module in model.modules():
        if isinstance(module, nn.Linear):
            own = module.weight.numel() + 4 * module.out_features
            shared = tied and module is model.get_output_embeddings()
            size += own if shared else own - module.weight.nbytes
    return Weights(parameters, size, exact=True)


def _empty(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model on the meta device, its layers as they are where nothing is quantised."""
    with quiet(), torch.device("meta"):
        # A copy without it: made on the meta device, no quantiser is needed.
        plain = type(config).from_dict({**config.to_dict(), "quantization_config": None})
        model: PreTrainedModel = AutoModelForCausalLM.from_config(plain, dtype=dtype)
    return model
