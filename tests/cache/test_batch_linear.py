"""Linear layers in blocks return what linear layers return."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from cache.batch_linear import BlockedLinears, blocked_linear, gains


@pytest.mark.parametrize("outputs", [64, 128, 200, 1000])
@pytest.mark.parametrize("bias", [False, True])
def test_equals_linear_and_a_row_does_not_depend_on_the_others(outputs, bias):
    torch.manual_seed(outputs)
    weight, x = torch.randn(outputs, 96), torch.randn(5, 1, 96)
    offset = torch.randn(outputs) if bias else None
    out = blocked_linear(x, weight, offset)
    exact = linear(x.double(), weight.double(), None if offset is None else offset.double())
    assert out.shape == exact.shape
    assert (out - exact).abs().max() < 1e-4
    order = torch.tensor([3, 0, 4, 2, 1])
    assert torch.equal(blocked_linear(x[order], weight, offset), out[order])
    other = x.clone()
    other[2:] = 7.0
    assert torch.equal(blocked_linear(other, weight, offset)[:2], out[:2])


@pytest.mark.parametrize(
    ("rows", "dtype", "shape", "blocked"),
    [
        (1, torch.float32, (256, 512), False),
        (2, torch.float32, (256, 512), True),
        (8, torch.float32, (256, 512), True),
        (9, torch.float32, (256, 512), False),
        (8, torch.bfloat16, (256, 512), False),
        (8, torch.float32, (256, 256), False),
        (8, torch.float32, (32, 8192), False),
    ],
)
def test_layers_that_gain_are_blocked_and_only_inside(monkeypatch, rows, dtype, shape, blocked):
    calls = []

    def noted(*arguments):
        calls.append(arguments)
        return blocked_linear(*arguments)

    monkeypatch.setattr("cache.batch_linear.blocked_linear", noted)
    torch.manual_seed(0)
    layer = nn.Linear(shape[1], shape[0], dtype=dtype)
    x = torch.randn(rows, 1, shape[1], dtype=dtype)
    plain = layer(x)
    with BlockedLinears():
        out = layer(x)
    assert len(calls) == blocked
    assert gains(nn.Sequential(nn.ReLU(), layer)) == (blocked or rows in (1, 9))
    assert (out - plain).abs().max() <= (1e-4 if blocked else 0)
