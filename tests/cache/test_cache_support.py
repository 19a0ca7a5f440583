"""Which architectures the cache takes, and that a refusal says what and why."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    BertConfig,
    DeepseekV2Config,
    FalconConfig,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
    T5Config,
)

from cache.support import UnsupportedModel, require_supported, unsupported_reason

_TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
_FULL = ["full_attention"] * 2


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**_TINY),
        Qwen2Config(**_TINY),
        # Qwen2.5 on the hub: a window is named, but switched off.
        Qwen2Config(**_TINY, sliding_window=4096, use_sliding_window=False, max_window_layers=28),
        Qwen2Config(**_TINY, layer_types=_FULL),
        Qwen3Config(**_TINY, head_dim=8),
        MistralConfig(**_TINY, sliding_window=None),
        # Wider than any sequence of the model: never in effect.
        MistralConfig(**_TINY, sliding_window=8192, max_position_embeddings=4096),
    ],
    ids=lambda config: config.model_type,
)
def test_full_attention_decoders_are_served(config: PretrainedConfig) -> None:
    assert unsupported_reason(config) is None
    require_supported(config)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (MistralConfig(**_TINY, sliding_window=16), "sliding_window 16"),
        (
            Qwen2Config(**_TINY, use_sliding_window=True, sliding_window=16, max_window_layers=1),
            "sliding_window 16",
        ),
        (Gemma2Config(**_TINY, head_dim=8), "sliding_window"),
        # Gemma's cap alone, without any window.
        (Gemma2Config(**_TINY, head_dim=8, layer_types=_FULL), "attn_logit_softcapping 50"),
        (DeepseekV2Config(**_TINY, kv_lora_rank=16), "kv_lora_rank 16"),
        (T5Config(), "encoder-decoder"),
        (Qwen3NextConfig(**_TINY, head_dim=8), "linear_attention"),
        (MambaConfig(hidden_size=32, num_hidden_layers=2), "not full attention"),
        (GptOssConfig(num_hidden_layers=2, layer_types=_FULL), "sinks"),
        (BertConfig(num_hidden_layers=2), "not causal"),
        (FalconConfig(num_hidden_layers=2, alibi=True), "ALiBi"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_others_are_refused_with_the_reason(config: PretrainedConfig, says: str) -> None:
    with pytest.raises(UnsupportedModel, match=says) as caught:
        require_supported(config, "the-model")
    assert "the-model" in str(caught.value)
    assert config.model_type in str(caught.value)


def test_layers_that_share_keys_are_refused() -> None:
    config = LlamaConfig(**_TINY)
    config.num_kv_shared_layers = 1
    assert "1 of its layers read the keys" in str(unsupported_reason(config))
