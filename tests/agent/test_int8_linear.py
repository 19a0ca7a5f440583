"""8-bit linear layers against float64, and what a quantised model still is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from agent.int8_linear import (
    Int8Linear,
    all_quantized,
    quantize_linears,
    quantize_rows,
    quantize_weight,
)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 5),
    width=st.integers(1, 40),
    scale=st.floats(1e-4, 1e4),
    seed=st.integers(0, 1000),
)
def test_rows_come_back_within_half_a_step(rows: int, width: int, scale: float, seed: int) -> None:
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * scale
    quantised, scales = quantize_rows(values)
    assert quantised.dtype == torch.int8
    # Half a step, and the rounding of float32 on top.
    error = (quantised.double() * scales.double() - values.double()).abs()
    assert bool((error <= scales.double() * 0.5 * (1 + 1e-5)).all())
    assert bool((quantised.abs().amax(-1) == 127).all())


def test_a_row_of_zeros_stays_zero() -> None:
    quantised, scales = quantize_rows(torch.zeros(2, 8))
    assert not quantised.any()
    assert not scales.any()


def test_one_layer_that_is_not_quantised_is_one_whose_rows_may_depend_on_each_other() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)), nn.LayerNorm(8))
    assert not all_quantized(model)
    quantize_linears(model)
    assert all_quantized(model)
    model.append(nn.modules.linear.NonDynamicallyQuantizableLinear(8, 8))  # a kind of nn.Linear
    assert not all_quantized(model)
    assert not all_quantized(nn.LayerNorm(8))


@pytest.mark.parametrize("rows", [1, 255, 256, 257, 700])
def test_a_weight_in_parts_is_quantised_as_in_one(rows: int) -> None:
    weight = torch.randn(rows, 24).bfloat16()
    for part, whole in zip(quantize_weight(weight), quantize_rows(weight), strict=True):
        assert torch.equal(part, whole)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 255, 256, 257, 600])
def test_the_product_is_that_of_the_quantised_numbers(rows: int, bias: bool) -> None:
    torch.manual_seed(rows)
    linear = nn.Linear(96, 48, bias=bias)
    x = torch.randn(1, rows, 96) * torch.logspace(-2, 2, rows)[:, None]
    got = Int8Linear(linear)(x)
    codes, scales = quantize_rows(x[0])
    weight, weight_scales = quantize_rows(linear.weight.detach())
    exact = (codes.double() * scales.double()) @ (weight.double() * weight_scales.double()).T
    if linear.bias is not None:
        exact = exact + linear.bias.detach().double()
    assert got.shape == (1, rows, 48)
    torch.testing.assert_close(got[0].double(), exact, rtol=1e-5, atol=1e-5)
    # And near what the layer computed before: one part in a hundred of the row's size.
    plain = linear(x)[0].detach()
    size = plain.abs().amax(-1, keepdim=True)
    assert bool(((got[0] - plain).abs() <= 0.03 * size + 1e-6).all())


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(0)
    layer = Int8Linear(nn.Linear(64, 32))
    x = torch.randn(300, 64)
    x[17] *= 1000
    together = layer(x)
    alone = torch.cat([layer(row[None]) for row in x])
    assert torch.equal(together, alone)


def test_every_linear_of_a_model_is_replaced() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 4, bias=False)))
    assert quantize_linears(model) == 2
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    assert model(torch.randn(3, 8)).shape == (3, 4)
    assert quantize_linears(model) == 0


@pytest.mark.model
def test_a_quantised_model_predicts_nearly_what_it_did() -> None:
    from agent.models import load

    loaded = load("smollm2-135m", dtype="float32", device="cpu")
    text = (
        "def area(width, height):\n    return width * height\n\n\nThe capital of France is Paris."
    )
    ids = torch.tensor([loaded.tokenizer(text).input_ids])
    with torch.inference_mode():
        before = loaded.model(input_ids=ids).logits[0].log_softmax(-1)
        assert quantize_linears(loaded.model) > 100
        after = loaded.model(input_ids=ids).logits[0].log_softmax(-1)
    divergence = (before.exp() * (before - after)).sum(-1).mean()
    assert float(divergence) < 0.2  # 0.10 when written; a wrong scale gives several nats
    assert float((before.argmax(-1) == after.argmax(-1)).float().mean()) > 0.8
