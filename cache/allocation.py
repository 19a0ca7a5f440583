"""How a budget is shared among layers and heads, in whole blocks whose sum is exact.

Layers: an arithmetic progression (PyramidKV, arXiv 2406.02069). Heads: by how many of a layer's
best blocks each one has, with a share that is spread evenly (Ada-KV, arXiv 2407.11550).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from cache.config import EvictingConfig


def apportion(ideal: Sequence[float], total: int, caps: Sequence[int]) -> list[int]:
    """Whole numbers near `ideal` with 0 <= x_i <= caps_i that add up to min(total, sum(caps)).

    What the caps cut off, or what the ideals lack, is spread evenly over those not at a bound; what
    rounding leaves goes to the largest remainders, the lower index first.
    """
    total = min(total, sum(caps))
    shares = [min(max(x, 0.0), float(cap)) for x, cap in zip(ideal, caps, strict=True)]
    while abs(missing := total - math.fsum(shares)) > 1e-9:
        open_ = [
            i for i, cap in enumerate(caps) if (shares[i] < cap if missing > 0 else shares[i] > 0)
        ]
        step = missing / len(open_)
        moved = [min(max(shares[i] + step, 0.0), float(caps[i])) for i in open_]
        if moved == [shares[i] for i in open_]:  # below what a float can tell apart
            break
        for i, share in zip(open_, moved, strict=True):
            shares[i] = share
    # A share that is whole but for the float's error must not lose its last block.
    whole = [math.floor(share + 1e-6) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: (round(whole[i] - shares[i], 6), i))
    for i in by_remainder:
        if sum(whole) == total:
            break
        whole[i] += whole[i] < caps[i]
    return whole


def pyramid_shares(mean: float, layers: int, beta: float, cap: float) -> list[float]:
    """An arithmetic progression of `layers` shares with the given mean, the first layer's largest.

    The last layer gets mean / beta; where the first would get more than `cap`, it gets `cap` and
    the last one accordingly more. Unlike in the paper's code nothing falls back to even shares.
    """
    low = mean / beta
    high = 2 * mean - low
    if high > cap:
        high, low = cap, 2 * mean - cap
    if layers == 1:
        return [mean]
    return [high - layer * (high - low) / (layers - 1) for layer in range(layers)]


def layer_counts(
    config: EvictingConfig, *, target: int, forced: int, present: Sequence[int], heads: int
) -> list[int]:
    """Blocks that each layer keeps in all its `heads` heads; they add up to L * heads * target.

    target: B, the mean per layer and head. forced: blocks that every head keeps. present: blocks
    that each layer holds now in all its heads; their sum is at least what is to be kept.
    """
    if config.layer_budgets == "uniform":
        return [target * heads] * len(present)
    # Layers are shared out in blocks per head while each can have its own number; what cannot be
    # divided among heads is settled below.
    must = forced * heads
    caps = [blocks - must for blocks in present]
    shares = pyramid_shares(
        (target - forced) * heads, len(present), config.pyramid_beta, max(caps, default=0)
    )
    if config.head_budgets == "adaptive":
        free = apportion(shares, (target - forced) * heads * len(present), caps)
        return [must + count for count in free]
    per_head = apportion(
        [share / heads for share in shares],
        (target - forced) * len(present),
        [cap // heads for cap in caps],
    )
    return [must + count * heads for count in per_head]


def head_counts(
    scores: torch.Tensor,
    candidates: torch.Tensor,
    total: int,
    *,
    floor: float,
    normalize: bool = False,
) -> list[int]:
    """Blocks beyond the forced ones that each head of a layer keeps: they add up to `total`.

    c_h is how many of the layer's `total` best candidates are head h's (equal scores: the one with
    fewer newer ones in its head, then the lower head); the ideal is (1 - floor) * c_h + floor *
    total / H, the floor being alpha in Ada-KV's code.

    scores: [H, N], comparable between heads, oldest block first; candidates: bool [H, N].
    normalize: scale a head's scores by the share of their sum that its best total / H have.
    """
    heads = scores.shape[0]
    ranked = scores.double().masked_fill(~candidates, float("-inf"))
    caps = candidates.sum(-1).tolist()
    if normalize:
        own = ranked.clamp_min(0)
        best = own.topk(min(total // heads, own.shape[-1]), dim=-1).values.sum(-1, keepdim=True)
        ranked = ranked * (best / own.sum(-1, keepdim=True).clamp_min(1e-300))
        ranked = ranked.masked_fill(~candidates, float("-inf"))
    total = min(total, sum(caps))
    newest_first = ranked.flip(-1).T.reshape(-1)  # block by block from the newest, heads within
    order = newest_first.argsort(descending=True, stable=True)[:total]
    counts = torch.bincount(order % heads, minlength=heads).tolist()
    ideal = [(1 - floor) * count + floor * total / heads for count in counts]
    return apportion(ideal, total, caps)
