"""How a budget is dealt out to layers and heads, in exact fractions, from the definitions.

PyramidKV (arXiv 2406.02069) gives low layers more than high ones, in an arithmetic progression;
Ada-KV (arXiv 2407.11550) gives a layer's heads as many entries as they have among the layer's
best, mixed with an even share. Both in blocks, and both without losing or inventing one. Nothing
here imports `cache`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any


def apportion(ideal: Sequence[Any], total: int, caps: Sequence[int]) -> list[int]:
    """Integers 0 <= x_i <= caps_i that add up to min(total, sum of caps), near the ideals.

    What the ideals, cut to their caps, leave over (or are over) is spread evenly over those that
    can still take (or give); then largest remainders, ties to the lower index.
    """
    total = min(total, sum(caps))
    bounds = [Fraction(cap) for cap in caps]
    x = [min(max(Fraction(i), Fraction(0)), cap) for i, cap in zip(ideal, bounds, strict=True)]
    while missing := total - sum(x):
        open_ = [i for i in range(len(x)) if (x[i] < bounds[i] if missing > 0 else x[i] > 0)]
        for i in open_:
            x[i] = min(max(x[i] + Fraction(missing, len(open_)), Fraction(0)), bounds[i])
    out = [int(value) for value in x]
    by_remainder = sorted(range(len(x)), key=lambda i: (out[i] - x[i], i))
    for i in by_remainder[: total - sum(out)]:
        out[i] += 1
    return out


def pyramid(mean: Any, layers: int, beta: Any, cap: Any) -> list[Fraction]:
    """An arithmetic progression over the layers, from most to fewest, with that mean."""
    mean = Fraction(mean)
    if layers == 1:
        return [mean]
    low = mean / Fraction(beta)
    high = 2 * mean - low
    if high > cap:
        high, low = Fraction(cap), 2 * mean - Fraction(cap)
    return [high - (high - low) * layer / (layers - 1) for layer in range(layers)]


def layer_free(
    config: Any, *, target: int, forced: int, present: Sequence[int], heads: int
) -> list[int]:
    """Blocks beyond the forced ones that each layer keeps in all its heads together.

    target: blocks per layer and head; forced: blocks that each head must keep; present: blocks that
    each layer holds in all its heads. Where a layer's heads are all alike, layers are dealt blocks
    of all heads at once.
    """
    layers, free = len(present), target - forced
    if getattr(config, "layer_budgets", "uniform") == "uniform":
        return [heads * free] * layers
    unit = 1 if config.head_budgets == "adaptive" else heads
    caps = [(count - forced * heads) // unit for count in present]
    mean = heads * free // unit
    shares = pyramid(mean, layers, decimal(config.pyramid_beta), caps[0])
    return [unit * count for count in apportion(shares, layers * mean, caps)]


def decimal(number: float) -> Fraction:
    """The number that was written down: 0.2 is 1/5, which no float is."""
    return Fraction(str(number))


def votes(scores: Sequence[Mapping[int, float]], total: int) -> list[int]:
    """How many of the `total` best candidates of a layer each head has.

    scores: by head, of its candidates by block. Of equals the newer block comes first, then the
    lower head.
    """
    best = sorted(
        ((score, block, -head) for head, own in enumerate(scores) for block, score in own.items()),
        reverse=True,
    )[:total]
    return [sum(-entry[2] == head for entry in best) for head in range(len(scores))]


def normalized(scores: Sequence[Mapping[int, float]], total: int) -> list[dict[int, float]]:
    """Each head's scores times the share of its mass that its best total / H candidates hold."""
    out = []
    for own in scores:
        best = sorted(own.values(), reverse=True)[: total // len(scores)]
        mass = sum(own.values())
        share = sum(best) / mass if mass else 0.0
        out.append({block: score * share for block, score in own.items()})
    return out


def head_free(
    scores: Sequence[Mapping[int, float]], total: int, *, alpha: float, normalize: bool = False
) -> list[int]:
    """How many of its candidates each head keeps, `total` in all."""
    counted = votes(normalized(scores, total) if normalize else scores, total)
    even = decimal(alpha)
    ideal = [(1 - even) * count + even * Fraction(total, len(scores)) for count in counted]
    return apportion(ideal, total, [len(own) for own in scores])
