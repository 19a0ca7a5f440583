"""Which parts of its stream a cache still holds, small enough to be kept for every turn."""

from __future__ import annotations

from cache import EvictingCache
from cache.budgets import ceil_blocks

PARTS = 32


def held_shares(cache: EvictingCache, parts: int = PARTS) -> list[float]:
    """The share still held of each of `parts` equal parts of the stream, oldest first.

    A share is of the part's blocks over all layers and heads, from 0 to 1. A stream of fewer
    blocks than `parts` has a share for each block; an empty one has none.
    """
    blocks = ceil_blocks(cache.seen, cache.pool.block_size)
    parts = min(parts, blocks)
    if not parts:
        return []
    ids = cache.block_ids  # [L, H_kv, N], -1 where a head holds fewer
    heads = ids.shape[0] * ids.shape[1]
    held = (ids[ids >= 0] * parts // blocks).bincount(minlength=parts).tolist()
    sizes = [0] * parts
    for block in range(blocks):
        sizes[block * parts // blocks] += 1
    return [round(count / (size * heads), 3) for count, size in zip(held, sizes, strict=True)]
