"""What the machine is, and how fast it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from agent.bench.clock import seconds_of
from agent.bench.origin import origin
from agent.bench.readings import Spread, spread
from agent.bench.shapes import bytes_read_per_token, weight_bytes
from benchmarks.h200.work import Work


def machine(work: Work) -> None:
    """What it is, and how fast it reads: copies, and products of a matrix and a vector."""
    device, scale = work.device, work.scale
    work.tell("origin", **origin(device))
    half = scale.copied // 2
    seconds = _copying(device, half)
    work.tell("copy", gb_per_s=2 * half / seconds.median / 1e9, best=2 * half / seconds.low / 1e9)
    side = 256 if work.dry else 8192
    count = 2 if work.dry else 16  # together far beyond any cache
    weights = [torch.randn(side, side, device=device).to(scale.dtype) for _ in range(count)]
    vector = torch.randn(side, 1, device=device).to(scale.dtype)

    def products() -> None:
        for weight in weights:
            weight @ vector

    seconds = _spread(device, products)
    read = sum(weight.nbytes for weight in weights)
    work.tell("gemv", gb_per_s=read / seconds.median / 1e9, best=read / seconds.low / 1e9)
    model = work.model
    per_token = bytes_read_per_token(model)
    work.tell(
        "bound",
        shape=scale.shape,
        weight_gib=weight_bytes(model) / 2**30,
        read_gib_per_token=per_token / 2**30,
        tokens_per_s=read / seconds.median / per_token,
    )


def _copying(device: torch.device, count: int) -> Spread:
    """Seconds of copying so many bytes; they are given back."""
    source = torch.empty(count, dtype=torch.uint8, device=device).random_(0, 255)
    target = torch.empty_like(source)
    return _spread(device, lambda: target.copy_(source))


def _spread(device: torch.device, do: Callable[[], Any]) -> Spread:
    """Seconds of ten calls, after two that do not count."""
    for _ in range(2):
        do()
    found = spread([seconds_of(device, do) for _ in range(10)])
    assert found is not None
    return found
