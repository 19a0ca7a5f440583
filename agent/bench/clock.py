"""Wall time of what a device does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def synchronize(device: torch.device) -> None:
    """Wait for a CUDA device; anything else is never behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(device: torch.device, do: Callable[[], Any]) -> float:
    """Seconds that `do` takes, from when the device is free until it has done its part too."""
    synchronize(device)
    began = time.perf_counter()
    do()
    synchronize(device)
    return time.perf_counter() - began
