"""What a cache can say of itself."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch

from cache.config import Phase


@dataclass(frozen=True)
class EvictionRecord:
    """One eviction step.

    seen: tokens fed when it happened; before, after: blocks per layer and head; kept: int64
    [L, H_kv, after] ascending block ids, on the CPU, where recording is on.
    """

    step: int
    phase: Phase
    seen: int
    before: int
    after: int
    kept: torch.Tensor | None = field(default=None, repr=False)


@dataclass
class CacheStats:
    """Counters of one session, from its first token."""

    evictions: int = 0
    evicted_tokens: int = 0  # per layer and KV head
    peak_tokens: int = 0  # most slots held at once
    eviction_seconds: float = 0.0  # wall time in `evict`, host side
    records: list[EvictionRecord] = field(default_factory=list)  # where recording is on

    def counters(self) -> dict[str, Any]:
        """All but the records, as plain data."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "records"}
