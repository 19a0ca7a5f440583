"""Nexus Sampling (arXiv 2606.23961): direct attention, a short walk over blocks, a reservoir."""

from __future__ import annotations

import torch

from cache.config import AnyConfig, NexusConfig, WalkRows
from cache.methods.base import Method, Observation
from cache.methods.block_attention import block_rows
from cache.philox import uniforms
from cache.selection import reservoir_priorities


def walk_row_indices(rows: int, steps: int, which: WalkRows) -> list[int]:
    """Rows of the window that the walk takes, oldest first: `steps` of them, or all."""
    if which == "all":
        return list(range(rows))
    steps = min(steps, rows)
    if which == "newest":
        return list(range(rows - steps, rows))
    return [int(x) for x in torch.linspace(0, rows - 1, steps, dtype=torch.float64).round()]


def walk(rows: torch.Tensor) -> torch.Tensor:
    """C after one step per row (Eq. 4), not normalised: gamma = 1 + <a, C>, C += gamma * a.

    rows: float64 [..., H, N]; returns [..., N]; zeros for H = 0.
    """
    state = torch.zeros_like(rows[..., 0, :] if rows.shape[-2] else rows.sum(-2))
    for row in rows.unbind(-2):
        gamma = 1 + (row * state).sum(-1, keepdim=True)
        state = state + gamma * row
    return state


def nexus_weights(rows: torch.Tensor, config: NexusConfig) -> torch.Tensor:
    """w = a + lambda * c + epsilon * r (Eq. 2, 5) from rows [..., W', N]; float64 [..., N].

    a: mean of the rows (Eq. 1, 3); c: the walk, normalised to sum 1 (0 without steps); r: rank by
    age from 0 (oldest) to 1 (newest), 0 for a single block.
    """
    rows = rows.double()
    weights = rows.mean(-2)
    if config.walk_steps:
        taken = walk_row_indices(rows.shape[-2], config.walk_steps, config.walk_rows)
        state = walk(rows[..., taken, :])
        weights = weights + config.walk_weight * state / state.sum(-1, keepdim=True)
    blocks = rows.shape[-1]
    rank = torch.arange(blocks, dtype=torch.float64, device=rows.device) / max(blocks - 1, 1)
    return weights + config.recency_tiebreak * rank


class Nexus(Method):
    """Weights of `nexus_weights`: as they are, or as the reservoir's priorities (Eq. 6)."""

    def __init__(self, config: AnyConfig) -> None:
        if not isinstance(config, NexusConfig):
            raise TypeError(f"Nexus takes a NexusConfig, not {type(config).__name__}")
        self.config = config
        self.window = config.window

    def priorities(self, observation: Observation) -> torch.Tensor:
        config = self.config
        weights = nexus_weights(block_rows(observation, config.heads), config)
        if config.selection == "top_k":
            return weights
        layers, heads, _ = weights.shape
        device = weights.device
        draws = uniforms(
            config.seed,
            observation.step,
            torch.arange(layers, device=device)[:, None, None],
            torch.arange(heads, device=device)[None, :, None],
            observation.sorted_block_ids[:, :heads],
            config.samples,
        )
        return reservoir_priorities(weights, draws)
