"""How many blocks a layer may keep."""

from __future__ import annotations

import math

from cache.config import DensityBudget, TokenBudget


def ceil_blocks(tokens: int, block_size: int) -> int:
    """Blocks that `tokens` touch: the one rounding rule of store and readers."""
    return -(-tokens // block_size)


def check_token_budget(budget: TokenBudget, forced: int, block_size: int) -> None:
    """Raise ValueError if a fixed budget cannot hold the blocks that must stay."""
    blocks = budget.tokens // block_size
    if blocks < max(forced, 1):
        raise ValueError(
            f"a budget of {budget.tokens} tokens is {blocks} blocks of {block_size}, fewer than "
            f"the {max(forced, 1)} that must stay (sinks, recent window, pinned spans: "
            f"{max(forced, 1) * block_size} tokens); raise the budget to at least that, or pin less"
        )


def blocks_to_keep(
    budget: TokenBudget | DensityBudget,
    *,
    base: int,
    forced: int,
    block_size: int,
) -> int:
    """B, the blocks kept in all, forced ones included.

    base: tokens that a density refers to. Raises ValueError (see `check_token_budget`).
    """
    if isinstance(budget, TokenBudget):
        check_token_budget(budget, forced, block_size)
        return budget.tokens // block_size
    share = math.floor(budget.density * ceil_blocks(base, block_size) + 0.5)
    return max(share, forced + budget.min_free, ceil_blocks(budget.min_tokens, block_size))
