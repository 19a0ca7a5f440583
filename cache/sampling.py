"""Choosing the next token: greedy, or by a draw that depends on the seed and position alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cache.philox import uniform

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
        probabilities = (logits.double() / self.temperature).softmax(-1)
        # All tokens less likely than this weigh less than 1 - top_p together: the set that is kept
        # has none of them, and what is not sorted is most of a vocabulary. (Half: for rounding.)
        least = (1 - self.top_p) / (2 * len(logits))
        tokens = (probabilities >= least).nonzero().squeeze(-1)
        probabilities, order = probabilities[tokens].sort(descending=True, stable=True)
        cumulated = probabilities.cumsum(-1)
        # The first token always stays; others while the mass before them is below top_p.
        keep = cumulated - probabilities < self.top_p
        cumulated = cumulated[: int(keep.sum())]
        target = self.draw(position) * float(cumulated[-1])
        index = int(torch.searchsorted(cumulated, target, right=True))
        return int(tokens[order[min(index, len(cumulated) - 1)]])

    def draw(self, position: int) -> float:
        """The uniform that decides the token at `position`."""
        return uniform(self.seed, position, _TOKEN_STREAM, 0, 0)


def choose_rows(
    logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]
) -> list[int]:
    """The next token of each row of `logits` [B, vocabulary], by its own options and position."""
    if logits.is_cuda:
        return choose_at_once(logits, samplings, positions).tolist()
    rows = zip(samplings, logits, positions, strict=True)
    return [sampling.choose(row, position=position) for sampling, row, position in rows]


def choose_at_once(
    logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]
) -> torch.Tensor:
    """The same as int64 [B] on the device of `logits`, without waiting for it."""
    if all(each.temperature == 0 for each in samplings):  # nothing to draw, nor to sort for it
        return logits.argmax(-1)
    pairs = list(zip(samplings, positions, strict=True))
    # Greedy rows are divided by 1, and what is drawn for them is not looked at.
    options = [(each.temperature or 1.0, each.top_p, each.draw(at)) for each, at in pairs]
    columns = torch.tensor(options, dtype=torch.float64).to(logits.device, non_blocking=True)
    temperature, top_p, draw = columns.unsqueeze(-1).unbind(1)
    greedy = torch.tensor([each.temperature == 0 for each, _ in pairs])
    probabilities, tokens = (
        (logits.double() / temperature).softmax(-1).sort(descending=True, stable=True)
    )
    cumulated = probabilities.cumsum(-1)
    # At least the first; with NaNs none would, and an index of -1 is the end of a CUDA process.
    last = ((cumulated - probabilities < top_p).sum(-1, keepdim=True) - 1).clamp_min(0)
    target = draw * cumulated.gather(-1, last)
    index = torch.searchsorted(cumulated, target, right=True).minimum(last)
    drawn = tokens.gather(-1, index).squeeze(-1)
    return torch.where(greedy.to(logits.device, non_blocking=True), logits.argmax(-1), drawn)
