"""Whether this machine can load quantised weights, asked of transformers before any are fetched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.quantizers.auto import (
    AUTO_QUANTIZER_MAPPING,
    AutoHfQuantizer,
    AutoQuantizationConfig,
)

from agent.load_options import method_name
from agent.model_errors import CannotQuantize


def quantization_of(config: PreTrainedConfig) -> dict[str, Any] | None:
    """The quantization_config that a checkpoint carries, as plain data."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        found = getattr(config.get_text_config(), "quantization_config", None)
    if found is None:
        return None
    data: dict[str, Any] = dict(found) if isinstance(found, Mapping) else found.to_dict()
    return data


def make_config(data: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """The quantization_config for `from_pretrained`. Raises CannotQuantize."""
    data = dict(data)
    if data.get("load_in_4bit"):
        data.setdefault("bnb_4bit_compute_dtype", str(dtype).removeprefix("torch."))
    try:
        return AutoQuantizationConfig.from_dict(data)
    except (ImportError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CannotQuantize(f"{method_name(data)}: {_line(error)}") from error


def require_quantizer(
    data: Mapping[str, Any], what: str, *, loaded: bool, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Raise CannotQuantize, naming `what` asks for it, unless weights of this form can be used.

    loaded: they come quantised, rather than being quantised as they are loaded.
    """
    name = method_name(data)
    config = make_config(data, dtype)
    kind = AUTO_QUANTIZER_MAPPING.get(getattr(config.quant_method, "value", config.quant_method))
    if not loaded and getattr(kind, "requires_calibration", False):
        raise CannotQuantize(
            f"{what} ({name}) cannot be used here: it takes calibration; choose a model that comes "
            "in this form, or 4bit or 8bit"
        )
    try:
        quantizer = AutoHfQuantizer.from_config(config, pre_quantized=loaded)
        quantizer.validate_environment(device_map=None, weights_only=True)
    except (ImportError, RuntimeError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CannotQuantize(f"{what} ({name}) cannot be used here: {_line(error)}") from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
