"""Which blocks stay, given their weights: the K largest, or a weighted reservoir."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cache.config import EvictingConfig
from cache.philox import uniforms


def priorities(
    weights: torch.Tensor,
    block_ids: torch.Tensor,
    config: EvictingConfig,
    *,
    step: int,
    first_layer: int = 0,
) -> torch.Tensor:
    """What `config.selection` makes of weights [l, H or 1, N]; the largest stay.

    block_ids: int64 [l, H, N], in the order of the weights. The reservoir's draws depend on (seed,
    step, layer, head, block) alone; a layer that decides as one has head 0.
    """
    if config.selection == "top_k":
        return weights
    layers, heads, _ = weights.shape
    draws = uniforms(
        config.seed,
        step,
        first_layer + torch.arange(layers, device=weights.device)[:, None, None],
        torch.arange(heads, device=weights.device)[None, :, None],
        block_ids[:, :heads].clamp_min(0),  # pads, which are never chosen
        config.samples,
    )
    return reservoir_priorities(weights, draws)


def reservoir_priorities(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Log of the mean over i of u_i^(1/w), up to a constant (Eq. 6; n = 1: Efraimidis-Spirakis).

    weights: float64 [...], non-negative; uniforms: float64 [..., n] in (0, 1). Returns [...].
    In log space since u^(1/w) underflows once w is about 1/N (at N = 2048 most are zero in
    float32). A weight of 0 gives -inf.
    """
    exponents = uniforms.log() / weights.double().unsqueeze(-1)
    return torch.logsumexp(exponents, dim=-1)


def keep_largest(
    priorities: torch.Tensor, forced: torch.Tensor, count: int | Sequence[Sequence[int]]
) -> torch.Tensor:
    """Mask of the `count` blocks that stay: all forced ones, then the largest priorities.

    priorities: [..., N], ordered from the oldest block to the newest; forced: bool [..., N].
    count: one number, or one for each of [L, H]. Equal priorities go to the newer block, so the
    result does not depend on slot order. Returns bool [..., N] with exactly `count` set. Raises
    ValueError when that cannot be.
    """
    blocks = priorities.shape[-1]
    several = {count} if isinstance(count, int) else {each for row in count for each in row}
    if not 0 <= min(several) <= max(several) <= blocks:
        raise ValueError(f"cannot keep {count} of {blocks} blocks")
    ranked = priorities.double().masked_fill(forced, float("inf"))
    order = ranked.flip(-1).argsort(dim=-1, descending=True, stable=True)
    place = torch.arange(blocks, device=forced.device)
    if len(several) == 1:
        chosen = place < several.pop()
    else:
        chosen = place < torch.tensor(count, device=forced.device).unsqueeze(-1)
    chosen = chosen.expand_as(forced)
    return torch.zeros_like(forced).scatter_(-1, (blocks - 1) - order, chosen)
