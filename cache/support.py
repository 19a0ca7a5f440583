"""Which models the evicting cache can serve.

It keeps one key and one value per token, KV head and layer, and replaces the attention function.
So it serves decoders in which every layer attends to all earlier tokens (Llama, Qwen2, Qwen3 and
their kin). What is said here of a config holds for any model loaded with it.
"""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

# Attributes by which configs announce layers that carry a state instead of keys and values.
_STATE_LAYERS = (
    "ssm_cfg",
    "mamba_d_state",
    "mamba_state_dim",
    "ssm_state_size",
    "state_size",
    "layers_block_type",
    "block_types",
    "hybrid_override_pattern",
    "linear_num_value_heads",
    "conv_L_cache",
    "attention_hidden_size",
)
_SHARED_ROPE = ("dynamic", "longrope")
# Learned sinks are weights, not config; these families have them.
_SINK_FAMILIES = frozenset({"gpt_oss"})


class UnsupportedModel(ValueError):
    """The evicting cache cannot serve a model of this architecture."""


def unsupported_reason(config: PretrainedConfig) -> str | None:
    """Why the evicting cache cannot serve a model with this config, or None if it can."""
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model: its cross-attention cache is not a stream of tokens"
    text = config.get_text_config(decoder=True)
    try:
        return (
            _compressed(text)
            or _layers(text)
            or _window(text)
            or _scores(text)
            or _shared(text)
            or _attention_function(config, text)
        )
    except RuntimeError as error:  # newer configs refuse one answer where layers differ
        return f"its layers differ in their attention ({str(error).splitlines()[0]})"


def require_supported(config: PretrainedConfig, name: str | None = None) -> None:
    """Raise UnsupportedModel, naming the model and the reason, unless the cache can serve it."""
    reason = unsupported_reason(config)
    if reason is not None:
        who = name or getattr(config, "name_or_path", "") or "this model"
        raise UnsupportedModel(
            f"{who} (model_type {config.model_type!r}) cannot be served: {reason}. Take a decoder "
            "with full attention in every layer, such as Llama, Qwen2.5 or Qwen3"
        )


def _compressed(text: PretrainedConfig) -> str | None:
    rank = _get(text, "kv_lora_rank")
    if rank is not None:
        return (
            f"its attention is MLA (kv_lora_rank {rank}): a token's keys and values are one latent "
            "shared by all heads, so heads cannot evict apart"
        )
    return None


def _layers(text: PretrainedConfig) -> str | None:
    kinds = sorted(set(_get(text, "layer_types") or ()) - {"full_attention"})
    others = [kind for kind in kinds if kind != "sliding_attention"]
    if others:
        return f"it is a hybrid: some layers are {', '.join(others)}, not full attention"
    for name in _STATE_LAYERS:
        if _get(text, name):
            return f"it has state-space, convolution or linear layers ({name} is set)"
    return None


def _window(text: PretrainedConfig) -> str | None:
    kinds = _get(text, "layer_types")
    if kinds is not None:
        used = "sliding_attention" in kinds
    else:
        # Older configs without layer types: a window alone means that it is used.
        used = bool(_get(text, "use_sliding_window", True))
    window = _get(text, "sliding_window")
    if not used or (window is None and kinds is None):
        return None
    reach = _get(text, "max_position_embeddings")
    if window is not None and reach is not None and window >= reach:
        return None  # wider than any sequence the model was made for
    return f"it uses sliding-window attention (sliding_window {window}), so old tokens are unseen"


def _scores(text: PretrainedConfig) -> str | None:
    cap = _get(text, "attn_logit_softcapping") or _get(text, "attn_logit_softcap")
    if cap:
        return f"it caps its attention scores (attn_logit_softcapping {cap})"
    if text.model_type in _SINK_FAMILIES:
        return "its heads have learned attention sinks, which take a share of the softmax"
    if _get(text, "alibi"):
        return "its positions are ALiBi biases on the scores, not rotations of the keys"
    if _get(text, "is_causal") is False or _get(text, "use_bidirectional_attention"):
        return "its attention is not causal"
    if hasattr(text, "add_cross_attention") and _get(text, "is_decoder") is False:
        return "it is an encoder (is_decoder is False): its attention is not causal"
    return None


def _shared(text: PretrainedConfig) -> str | None:
    shared = _get(text, "num_kv_shared_layers")
    if shared:
        return f"{shared} of its layers read the keys and values of other layers"
    heads = _get(text, "num_key_value_heads")
    if isinstance(heads, list | tuple) and len(set(heads)) > 1:
        return "its layers differ in the number of KV heads"
    return None


def _attention_function(config: PretrainedConfig, text: PretrainedConfig) -> str | None:
    model = _causal_class(config) or _causal_class(text)
    if model is None:
        return None  # custom or newer than the mapping: the attention function itself will tell
    for each in model if isinstance(model, tuple) else (model,):
        if not getattr(each, "_supports_attention_backend", False):
            return f"{each.__name__} does not let its attention function be replaced"
    return None


def _causal_class(config: PretrainedConfig) -> Any:
    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)


def _get(config: PretrainedConfig, name: str, default: Any = None) -> Any:
    return getattr(config, name, default)


def shared_rotation(model: PreTrainedModel) -> str | None:
    """The rope type of a model whose rotation of all rows follows the longest; else None."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kind = rope.get("rope_type")
    return kind if kind in _SHARED_ROPE else None
