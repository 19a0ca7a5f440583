"""Models that are only a shape: published sizes, random weights, no files.

Speed and bytes depend on sizes alone, so that a model can be timed before anybody has fetched it.
What such a model says is noise.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

# Named as in the models' own config.json.
_LLAMA_31_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _llama(hidden: int, inner: int, layers: int, heads: int, dim: int, **more: Any) -> Any:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": dim,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "rope_parameters": _LLAMA_31_ROPE,
        **more,
    }


def _qwen2(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, tied: bool
) -> Any:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": tied,
    }


def _qwen3(hidden: int, inner: int, layers: int, heads: int) -> Any:
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": False,
    }


_LLAMA_32_ROPE = {**_LLAMA_31_ROPE, "factor": 32.0}
_QWEN3_32B = _qwen3(5120, 25600, 64, 64)

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _llama(4096, 14336, 32, 32, 128),
    "llama-3.2-1b": _llama(
        2048, 8192, 16, 32, 64, rope_parameters=_LLAMA_32_ROPE, tie_word_embeddings=True
    ),
    "qwen2.5-coder-0.5b": _qwen2(896, 4864, 24, 14, 2, 151936, True),
    "qwen2.5-coder-1.5b": _qwen2(1536, 8960, 28, 12, 2, 151936, True),
    "qwen2.5-coder-7b": _qwen2(3584, 18944, 28, 28, 4, 152064, False),
    "qwen2.5-coder-32b": _qwen2(5120, 27648, 64, 40, 8, 152064, False),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-32b": _QWEN3_32B,
    "deepswe": _QWEN3_32B,  # DeepSWE-Preview is a Qwen3-32B
    "deepswe-preview": _QWEN3_32B,
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
        "tie_word_embeddings": True,
    },
    "tiny": {  # of no published model: for tests
        **_qwen3(64, 96, 3, 4),
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 128,
    },
}


def shape_config(name: str, *, layers: int | None = None) -> PreTrainedConfig:
    """The config of a named shape, cut to `layers`. Raises ValueError naming what there is."""
    if name not in SHAPES:
        raise ValueError(f"unknown shape {name!r}; there are: {', '.join(SHAPES)}")
    values = dict(SHAPES[name])
    kind = values.pop("model_type")
    whole = values["num_hidden_layers"]
    if layers is not None:
        if not 1 <= layers <= whole:
            raise ValueError(f"{layers} layers: {name} has {whole}; choose from 1 to {whole}")
        values["num_hidden_layers"] = layers
    return AutoConfig.for_model(kind, **values)


def shaped_model(
    name: str,
    *,
    layers: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> PreTrainedModel:
    """A model of that shape with random weights, made on `device` in `dtype`: nothing is copied."""
    config = shape_config(name, layers=layers)
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.eval().requires_grad_(False)
    return model


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters, shared ones once."""
    return sum(parameter.nbytes for parameter in model.parameters())


def bytes_read_per_token(model: PreTrainedModel) -> int:
    """Bytes of the weights that one token has to read: an embedding that is no output layer is
    only looked up."""
    inner, outer = model.get_input_embeddings(), model.get_output_embeddings()
    looked_up = outer is not None and inner.weight is not outer.weight
    return weight_bytes(model) - (weight_bytes(inner) if looked_up else 0)
