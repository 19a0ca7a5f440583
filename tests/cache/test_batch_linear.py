"""Linear layers in blocks return what linear layers return."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers import LlamaConfig, LlamaForCausalLM

from cache import EvictingCache, preset
from cache.batch_decode import BatchDecoder
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


def test_a_batch_decodes_in_blocks_what_is_large_in_its_model(monkeypatch):
    calls = []

    def noted(x, weight, bias=None):
        calls.append(tuple(weight.shape))
        return blocked_linear(x, weight, bias)

    monkeypatch.setattr("cache.batch_linear.blocked_linear", noted)
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=2048, **shape, **heads)).eval()
    caches = [EvictingCache(model, preset("dense")) for _ in range(3)]
    BatchDecoder(model).step(caches, [1, 2, 3])
    assert calls == [(2048, 64)]
    BatchDecoder(model).step(caches[:1], [1])
    assert len(calls) == 1
