"""One eviction step: which pages of a session's row stay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cache.allocation import head_counts, layer_counts
from cache.config import EvictingConfig
from cache.methods import Method, Observation
from cache.policy import Policy
from cache.pools import AnyPool
from cache.query_window import QueryWindow
from cache.selection import keep_largest, priorities
from cache.store import Held

# Layers are scored in groups whose logits and keys stay below this many float32 values: 256 MB
# where a launch costs more than memory, 16 MB on a CPU, where fresh pages do.
_GROUP_VALUES, _GROUP_VALUES_CPU = 1 << 26, 1 << 22


@dataclass(frozen=True, slots=True)
class Moment:
    """When a step happens: tokens seen, its number, B (mean blocks that stay), where the newest
    queries are, and the factor of q.k in each layer."""

    seen: int
    step: int
    target: int
    window: QueryWindow
    scaling: tuple[float, ...]


def cut(pool: AnyPool, row: int, method: Method[Any], policy: Policy, moment: Moment) -> None:
    """Evict from `row` down to `moment.target` blocks per layer and head, on average."""
    lengths = pool.lengths(row)
    config: EvictingConfig = policy.config
    forced = policy.forced_count(moment.seen)
    present = (-(-lengths // pool.block_size)).sum(-1).tolist()
    per_layer = layer_counts(
        config, target=moment.target, forced=forced, present=present, heads=lengths.shape[1]
    )
    keep: list[torch.Tensor] = []
    counts: list[list[int]] = []
    for layers in _groups(lengths, pool, moment, config.window):
        held = pool.held(row, layers)
        parts = per_layer[layers.start : layers.stop]
        kept, numbers = _decide(held, method, policy, moment, parts, padded=pool.ragged)
        keep.append(kept)
        counts += numbers
    pool.compact(row, keep, counts)


def _groups(lengths: torch.Tensor, pool: AnyPool, moment: Moment, window: int) -> Iterator[range]:
    """Consecutive layers to be scored together: those of one device, and one at a time where
    lengths can differ."""
    per_layer = 0
    if not pool.ragged:
        per_key = lengths.shape[1] * pool.key_dim
        if window:
            per_key += moment.window.heads * min(window, moment.seen)
        per_layer = per_key * max(1, int(lengths[0, 0]))
    for place in pool.places:
        values = _GROUP_VALUES_CPU if place.device.type == "cpu" else _GROUP_VALUES
        width = max(1, values // per_layer) if per_layer else 1
        for first in place.layers[::width]:
            yield range(first, min(first + width, place.layers.stop))


def _decide(
    held: Held,
    method: Method[Any],
    policy: Policy,
    moment: Moment,
    per_layer: Sequence[int],
    *,
    padded: bool,
) -> tuple[torch.Tensor, list[list[int]]]:
    """Pages that stay, bool [l, H, P] in page order, and their numbers per layer and head."""
    config = policy.config
    layers = range(held.first_layer, held.first_layer + held.keys.shape[0])
    heads = held.keys.shape[1]
    queries = moment.window.newest(moment.seen, config.window, layers)
    observation = Observation(
        queries=queries if queries is not None else held.keys.new_empty(len(per_layer), 0, 0, 0),
        keys=held.keys,
        block_ids=held.block_ids,
        scaling=_factors(moment.scaling[layers.start : layers.stop], held.keys.device),
        block_size=policy.block_size,
        seen=moment.seen,
        step=moment.step,
        room=per_layer[0] // heads - policy.old_forced_count(moment.seen),
        sums=held.sums,
        padded=padded,
    )
    ordered = observation.sorted_block_ids
    weights = method.weights(observation)
    ranked = priorities(
        weights, ordered, config, step=moment.step, first_layer=held.first_layer
    ).expand_as(ordered)
    forced = policy.forced_mask(ordered, moment.seen)
    counts = [[blocks // heads] * heads for blocks in per_layer]
    if config.head_budgets == "adaptive":
        must = policy.forced_count(moment.seen)
        candidates = (ordered >= 0) & ~forced
        counts = [
            [must + free for free in _free_counts(*pair, blocks - must * heads, config)]
            for pair, blocks in zip(zip(weights, candidates, strict=True), per_layer, strict=True)
        ]
    ranked = ranked.masked_fill(ordered < 0, float("-inf"))
    keep = keep_largest(ranked, forced, counts)
    return torch.zeros_like(keep).scatter_(-1, observation.order, keep), counts


def _factors(scaling: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """The factors as a tensor; where they are equal, as they mostly are, without a copy from the
    host, which would have to wait for the device."""
    if len(set(scaling)) == 1:
        return torch.full((len(scaling),), scaling[0], device=device)
    return torch.tensor(scaling, device=device)


def _free_counts(
    weights: torch.Tensor, candidates: torch.Tensor, total: int, config: EvictingConfig
) -> list[int]:
    scores = weights.expand(candidates.shape)
    return head_counts(
        scores, candidates, total, floor=config.head_floor, normalize=config.head_normalize
    )
