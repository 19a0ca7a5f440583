"""Nexus Sampling (arXiv 2606.23961): direct attention, a short walk over blocks, a reservoir."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, model_validator

from cache.config import EvictingConfig, Selection
from cache.methods.base import Method, Observation
from cache.methods.block_attention import Heads, block_rows
from cache.methods.registry import register

WalkRows = Literal["even", "newest", "all"]


class NexusConfig(EvictingConfig):
    """Nexus Sampling: direct attention plus a short walk over blocks, then a weighted reservoir."""

    method: Literal["nexus"] = "nexus"
    window: int = Field(16, ge=1, description="W, newest queries that are observed")
    walk_steps: int = Field(3, ge=0, description="H, steps of the walk (Eq. 4); 0 turns it off")
    walk_weight: float = Field(0.5, ge=0, description="lambda, weight of the walk term (Eq. 5)")
    walk_rows: WalkRows = Field(
        "even",
        description="which rows the walk takes: even (spread over the window, oldest first), "
        "newest (the last H), all",
    )
    recency_tiebreak: float = Field(1e-6, ge=0, description="epsilon, times the rank in age")
    heads: Heads = Field(
        "kv_head",
        description="layer_mean: queries and keys averaged over heads, one decision per layer; "
        "layer_attention: attention averaged over heads, one decision per layer; "
        "kv_head: one decision per KV head",
    )
    selection: Selection = Field("reservoir", description="reservoir (Eq. 6), or top_k")

    @model_validator(mode="after")
    def _fits_together(self) -> NexusConfig:
        if self.walk_steps > self.window:
            raise ValueError(
                f"walk_steps={self.walk_steps} exceeds window={self.window}: each step of the walk "
                "takes one row of the window; lower walk_steps or raise window"
            )
        if self.head_budgets == "adaptive" and self.heads != "kv_head":
            raise ValueError(
                f"head_budgets='adaptive' compares heads, and heads={self.heads!r} decides for all "
                "heads of a layer at once; use heads='kv_head'"
            )
        return self


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


def nexus_weights(
    rows: torch.Tensor, config: NexusConfig, counts: torch.Tensor | None = None
) -> torch.Tensor:
    """w = a + lambda * c + epsilon * r (Eq. 2, 5) from rows [..., W', N]; float64 [..., N].

    a: mean of the rows (Eq. 1, 3); c: the walk, normalised to sum 1 (0 without steps); r: rank by
    age from 0 (oldest) to 1 (newest), 0 for a single block. counts: [...], blocks that are present,
    the last ones; None: all N.
    """
    rows = rows.double()
    weights = rows.mean(-2)
    if config.walk_steps:
        taken = walk_row_indices(rows.shape[-2], config.walk_steps, config.walk_rows)
        state = walk(rows[..., taken, :])
        weights = weights + config.walk_weight * state / state.sum(-1, keepdim=True)
    blocks = rows.shape[-1]
    present = torch.as_tensor(blocks if counts is None else counts, device=rows.device)
    pads = (blocks - present).unsqueeze(-1)
    rank = (torch.arange(blocks, dtype=torch.float64, device=rows.device) - pads).clamp_min(0)
    return weights + config.recency_tiebreak * rank / (present - 1).clamp_min(1).unsqueeze(-1)


@register
class Nexus(Method[NexusConfig]):
    """Weights of `nexus_weights` over the rows a(q) of the window."""

    Config = NexusConfig

    def weights(self, observation: Observation) -> torch.Tensor:
        rows = block_rows(observation, self.config.heads)
        return nexus_weights(rows, self.config, observation.counts[:, : rows.shape[1]])
