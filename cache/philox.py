"""Philox4x32-10, a counter-based generator: a uniform is a function of its counter alone.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Counter-based draws make
eviction independent of slot order, batch, device and restarts.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _mul_hi_lo(multiplier: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of multiplier * x, without leaving signed 64-bit integers."""
    # multiplier - 2^32 is negative and below 2^30 in size, so that the product with x < 2^32 fits;
    # what it lacks, x * 2^32, is added to the high word.
    product = x * (multiplier - (1 << 32))
    return (product >> 32).add_(x), product.bitwise_and_(_MASK)


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Four 32-bit words (as int64 tensors, broadcast shape of `counter`) per counter."""
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _mul_hi_lo(_MULTIPLIERS[0], c0)
        high1, low1 = _mul_hi_lo(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniforms(
    seed: int,
    step: int,
    layer: torch.Tensor,
    head: torch.Tensor,
    block: torch.Tensor,
    count: int,
) -> torch.Tensor:
    """`count` uniforms in the open interval (0, 1) for each (layer, head, block).

    layer, head, block: int64, broadcastable to a shape [...]; returns float64 [..., count].
    The i-th uniform depends on (seed, step, layer, head, block, i) and nothing else.
    Layers and heads must be below 2^16, blocks and steps below 2^32.
    """
    key = (seed & _MASK, (seed >> 32) & _MASK)
    place = (layer << 16) | head
    # Two uniforms come from one counter: all counters of a place are computed together.
    pairs = torch.arange((count + 1) // 2, device=block.device)
    block, place = (each.unsqueeze(-1) for each in torch.broadcast_tensors(block, place))
    words = philox4x32((block, torch.full_like(block, step), place, pairs), key)
    high = torch.stack(words[::2], dim=-1).flatten(-2)
    low = torch.stack(words[1::2], dim=-1).flatten(-2)
    # 53 bits, shifted by half a step so that neither 0 nor 1 can occur.
    bits = (high << 21) | (low >> 11)
    return ((bits.double() + 0.5) * 2.0**-53)[..., :count].contiguous()


def uniform(seed: int, step: int, layer: int, head: int, block: int) -> float:
    """The first of `uniforms`, in Python's integers: for one draw a hundred times as fast."""
    c0, c1, c2, c3 = block, step, (layer << 16) | head, 0
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(_ROUNDS):
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1 = (second >> 32) ^ c1 ^ k0, second & _MASK
        c2, c3 = (first >> 32) ^ c3 ^ k1, first & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return (float((c0 << 21) | (c1 >> 11)) + 0.5) * 2.0**-53
