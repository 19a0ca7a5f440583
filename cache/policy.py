"""When a session evicts, how many blocks it keeps, and which ones are not up for choice."""

from __future__ import annotations

from typing import Any

import torch

from cache.budgets import blocks_to_keep, ceil_blocks, check_token_budget
from cache.config import DensityBudget, EvictingConfig, Phase, TokenBudget

_FEW_RUNS = 4


class Policy:
    """Schedule, budget and forced blocks of one session; knows no keys or values.

    Blocks are numbered by the index their tokens entered with, index // block_size. Forced are the
    sinks, the blocks of pinned spans, and those that hold one of the newest `recent_tokens`.
    """

    def __init__(self, config: EvictingConfig) -> None:
        self.config = config
        self.block_size = config.block_size
        self._pinned: set[int] = set()
        self._first_prompt: int | None = None
        self._decode_blocks: int | None = None  # B while a turn decodes

    @property
    def token_ceiling(self) -> int | None:
        """Most tokens held between forward passes under a token budget and `prefill+decode`."""
        budget = self.config.budget
        if not isinstance(budget, TokenBudget):
            return None
        return (budget.tokens // self.block_size + 1) * self.block_size

    def due(self, phase: Phase, seen: int, *, last_chunk: bool) -> bool:
        """Whether the schedule lets an eviction happen now."""
        if phase == "prefill":
            return last_chunk or self.config.prefill_eviction == "chunk"
        # While decoding, a decision falls when a block has filled: one step per block.
        return self.config.scope == "prefill+decode" and seen % self.block_size == 0

    def pin(self, start: int, stop: int) -> None:
        """Keep the blocks of tokens start .. stop - 1 from now on.

        Raises ValueError when a token budget could then not hold all that must stay.
        """
        pinned = self._pinned | set(range(start // self.block_size, self._ceil(stop)))
        if isinstance(self.config.budget, TokenBudget):
            # The recent window can straddle one block more than it fills.
            recent = (self.config.recent_tokens + 2 * self.block_size - 2) // self.block_size
            forced = len(pinned | set(range(self.config.sinks))) + recent
            check_token_budget(self.config.budget, forced, self.block_size)
        self._pinned = pinned

    def forced_count(self, seen: int) -> int:
        """Blocks that must stay, after `seen` tokens."""
        return self.old_forced_count(seen) + self._ceil(seen) - self._recent_from(seen)

    def old_forced_count(self, seen: int) -> int:
        """Those of them that are not among the recent ones: sinks and pinned blocks."""
        first = self._recent_from(seen)
        return sum(block < first for block in self._always())

    def forced_mask(self, block_ids: torch.Tensor, seen: int) -> torch.Tensor:
        """Bool, shape of `block_ids`: which of them must stay."""
        forced = block_ids >= self._recent_from(seen)
        runs = _runs(self._always())
        if len(runs) > _FEW_RUNS:
            always = torch.tensor(sorted(self._always()), device=block_ids.device)
            return forced | torch.isin(block_ids, always)
        for start, stop in runs:  # without a copy from the host, which waits for the device
            forced = forced | ((block_ids >= start) & (block_ids < stop))
        return forced

    def target(self, phase: Phase, *, seen: int, resident: int, last_chunk: bool) -> int:
        """B, the blocks to keep now. A density's B is fixed by the prompt while a turn decodes.

        Raises ValueError when a token budget cannot hold the forced blocks.
        """
        budget = self.config.budget
        if phase == "prefill" and last_chunk and self._first_prompt is None:
            self._first_prompt = seen
        if (
            phase == "decode"
            and isinstance(budget, DensityBudget)
            and self._decode_blocks is not None
        ):
            # What must stay can outgrow a B that a short prompt fixed; it stays all the same.
            return max(self._decode_blocks, self.forced_count(seen))
        base = seen
        if isinstance(budget, DensityBudget):
            if budget.density_base == "present":
                base = resident
            elif budget.density_base == "first_prompt" and self._first_prompt is not None:
                base = self._first_prompt
        self._decode_blocks = blocks_to_keep(
            budget, base=base, forced=self.forced_count(seen), block_size=self.block_size
        )
        return self._decode_blocks

    def state(self) -> dict[str, Any]:
        """What was decided so far, as plain data."""
        return {
            "pinned": sorted(self._pinned),
            "first_prompt": self._first_prompt,
            "decode_blocks": self._decode_blocks,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what another session's policy decided."""
        self._pinned = set(state["pinned"])
        self._first_prompt, self._decode_blocks = state["first_prompt"], state["decode_blocks"]

    def _always(self) -> set[int]:
        return self._pinned | set(range(self.config.sinks))

    def _recent_from(self, seen: int) -> int:
        return max(0, seen - self.config.recent_tokens) // self.block_size

    def _ceil(self, tokens: int) -> int:
        return ceil_blocks(tokens, self.block_size)


def _runs(numbers: set[int]) -> list[tuple[int, int]]:
    """The numbers as [start, stop) of what follows one another, ascending."""
    starts = sorted(n for n in numbers if n - 1 not in numbers)
    stops = sorted(n + 1 for n in numbers if n + 1 not in numbers)
    return list(zip(starts, stops, strict=True))
