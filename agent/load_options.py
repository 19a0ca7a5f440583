"""How weights are loaded: over which devices, and with how many bits. Read without torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

# Ways in which accelerate spreads layers by itself.
DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
# What the short names of `--quantize` mean: bitsandbytes, on GPUs and (slowly) on CPUs.
QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "4bit": {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },
    "8bit": {"quant_method": "bitsandbytes", "load_in_8bit": True},
}


def read_device_map(value: str) -> str | dict[str, int | str]:
    """What `--device-map` means: a way of accelerate's, or a file's module -> device.

    Raises ValueError.
    """
    if value in DEVICE_MAPS:
        return value
    data = _read_json("--device-map", value, DEVICE_MAPS)
    if not data or not all(type(place) in (int, str) for place in data.values()):
        raise ValueError(
            f"--device-map {value} is no device map: it must be an object of module names and "
            'devices, such as {"model.embed_tokens": 0, "model.layers.0": 0, "lm_head": "cuda:1"}'
        )
    return data


def read_quantization(value: str) -> dict[str, Any]:
    """The quantization_config that `--quantize` means; a file may also be a model's config.json
    that has one. Raises ValueError."""
    if value in QUANTIZATIONS:
        return dict(QUANTIZATIONS[value])
    data = _read_json("--quantize", value, QUANTIZATIONS)
    data = data.get("quantization_config", data)
    if not isinstance(data, dict) or not (
        isinstance(data.get("quant_method"), str)
        or data.get("load_in_4bit")
        or data.get("load_in_8bit")
    ):
        raise ValueError(
            f"--quantize {value} is no quantization_config: it has no quant_method "
            "(bitsandbytes, torchao, gptq, awq, compressed-tensors, fp8, ...)"
        )
    return data


def method_name(config: Mapping[str, Any]) -> str:
    """What a quantization_config is called in reports: its method and its bits."""
    method = str(config.get("quant_method") or "bitsandbytes")
    bits = weight_bits(config)
    return method if bits is None else f"{method}-{bits:g}bit"


def weight_bits(config: Mapping[str, Any]) -> float | None:
    """Bits of a quantised weight, without its scales; None where the config does not say."""
    if config.get("load_in_4bit"):
        return 4
    if config.get("load_in_8bit"):
        return 8
    for key in ("bits", "w_bit", "nbits", "num_bits", "weights"):
        found = config.get(key)
        if isinstance(found, int | float) and not isinstance(found, bool):
            return found
        if isinstance(found, str) and found.removeprefix("int").removeprefix("q").isdigit():
            return int(found.removeprefix("int").removeprefix("q"))
    method = str(config.get("quant_method"))
    for name, bits in (("fp8", 8), ("mxfp4", 4), ("nvfp4", 4), ("bitnet", 2), ("eetq", 8)):
        if name in method:
            return bits
    groups = config.get("config_groups")  # compressed-tensors
    if isinstance(groups, Mapping):
        found = [(group.get("weights") or {}).get("num_bits") for group in groups.values()]
        known = [bits for bits in found if bits]
        return max(known) if known else None
    inner = json.dumps(config.get("quant_type", ""), default=str).lower()  # torchao
    for mark, bits in (("int4", 4), ("int8", 8), ("float8", 8), ("nvfp4", 4), ("mx", 8)):
        if mark in inner:
            return bits
    return None


def _read_json(flag: str, value: str, others: Iterable[str]) -> dict[str, Any]:
    file = Path(value).expanduser()
    if not file.is_file():
        raise ValueError(
            f"{flag} {value!r} is neither {', '.join(others)} nor a JSON file that is there"
        )
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{flag} {value} cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{flag} {value} holds no JSON object")
    return data
