"""Choosing the next token: greedy, or by a draw that depends on the seed and position alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cache.philox import uniforms

_TOKEN_STREAM = 0xFFFF  # a "layer" of the generator that no eviction draws from


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_p keeps the smallest set of tokens with that much probability.

    The draw at a position is a function of (seed, position), so that a resumed run goes on as the
    undisturbed one would. Raises ValueError for values out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} is negative; 0 is greedy")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is outside (0, 1]")

    def choose(self, logits: torch.Tensor, *, position: int) -> int:
        """The next token from logits [vocabulary]."""
        if self.temperature == 0:
            return int(logits.argmax())
        probabilities, tokens = (
            (logits.double() / self.temperature).softmax(-1).sort(descending=True, stable=True)
        )
        cumulated = probabilities.cumsum(-1)
        # The first token always stays; others while the mass before them is below top_p.
        keep = cumulated - probabilities < self.top_p
        cumulated = cumulated[: int(keep.sum())]
        zero = torch.zeros(1, dtype=torch.int64)
        draw = uniforms(self.seed, position, zero + _TOKEN_STREAM, zero, zero, 1).item()
        index = int(torch.searchsorted(cumulated, draw * float(cumulated[-1]), right=True))
        return int(tokens[min(index, len(cumulated) - 1)])
