"""Products of a few rows with a large float32 matrix on the CPU, at about the cost of one row.

With one row a linear layer reads its weights once, as fast as memory allows. With some rows the
library packs the weights first, which costs more than the product itself (measured: eight rows take
2.6 times as long as one, in the output layer of a 0.5B model). In blocks that fit a core's cache
they do not (1.1 times).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

_BLOCK = 64  # outputs
_ROWS = 8  # beyond, packing pays
_SMALLEST = 1 << 17  # weights of a layer for which it is worth while


def blocked_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """What `linear` returns, up to the order of sums; a row does not depend on the others."""
    rows = x.reshape(-1, x.shape[-1])
    whole = weight.shape[0] // _BLOCK
    blocks = weight[: whole * _BLOCK].view(whole, _BLOCK, -1).transpose(1, 2)
    out = torch.bmm(rows.expand(whole, *rows.shape), blocks).transpose(0, 1).flatten(1)
    if out.shape[1] < weight.shape[0]:
        out = torch.cat([out, rows @ weight[out.shape[1] :].t()], dim=1)
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], -1)


class BlockedLinears(TorchFunctionMode):
    """While it is entered, in this thread, linear layers that gain by it compute in blocks."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is linear and not kwargs and _gains(*args):
            return blocked_linear(*args)
        return func(*args, **(kwargs or {}))


def gains(model: nn.Module) -> bool:
    """Whether some layer of `model` does."""
    layers = (module for module in model.modules() if type(module) is nn.Linear)
    return any(_worth_while(layer.weight) for layer in layers)


def _gains(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    return 1 < x.numel() // x.shape[-1] <= _ROWS and _worth_while(weight)


def _worth_while(weight: torch.Tensor) -> bool:
    return (
        weight.numel() >= _SMALLEST
        and weight.dtype is torch.float32
        and weight.device.type == "cpu"
        and weight.is_contiguous()
        and weight.shape[0] >= _BLOCK
    )
