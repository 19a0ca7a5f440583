"""The methods in plain loops, from their definitions: token scores, and the kept sets of a run.

Everything is computed for one layer and KV head from rotated queries and keys captured in a full
pass, and from which keys each query could see. Nothing here imports `cache`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import allocation_oracles
import numpy as np
import oracles
from oracles import Captured, softmax


def attention_row(
    captured: Captured, layer: int, query_head: int, query: int, keys: Sequence[int]
) -> dict[int, float]:
    """Softmax of one query over those of `keys` that are not after it, by key."""
    group = captured.queries[layer].shape[0] // captured.keys[layer].shape[0]
    q = captured.queries[layer][query_head, query].double().numpy()
    seen = [key for key in keys if key <= query]
    k = captured.keys[layer][query_head // group].double().numpy()
    return dict(zip(seen, softmax(k[seen] @ q * captured.scaling[layer]).tolist(), strict=True))


def group_of(captured: Captured, layer: int, head: int) -> range:
    group = captured.queries[layer].shape[0] // captured.keys[layer].shape[0]
    return range(head * group, (head + 1) * group)


REDUCE: dict[str, Callable[[list[float]], float]] = {
    "mean": lambda xs: sum(xs) / len(xs),
    "max": max,
    "sum": sum,
}


def snapkv(
    captured: Captured, layer: int, head: int, present: list[int], seen: int, config: Any
) -> dict[int, float]:
    """Mean over the window's rows, reduced over the group, then pooled along what came before."""
    window = range(max(0, seen - config.window), seen)
    rows = {
        (h, q): attention_row(captured, layer, h, q, present)
        for h in group_of(captured, layer, head)
        for q in window
    }
    raw = {
        key: REDUCE[config.group](
            [
                sum(rows[h, q].get(key, 0.0) for q in window) / len(window)
                for h in group_of(captured, layer, head)
            ]
        )
        for key in present
    }
    before = [key for key in present if key < window.start]
    half = config.kernel // 2
    out = dict(raw)
    for i, key in enumerate(before):
        near = [raw[before[j]] for j in range(i - half, i + half + 1) if 0 <= j < len(before)]
        out[key] = max(near) if config.pooling == "max" else sum(near) / config.kernel
    return out


def h2o(
    captured: Captured, layer: int, head: int, present: list[int], seen: int, config: Any
) -> dict[int, float]:
    """Attention summed over every query so far, each over the keys that it could see."""

    def rows_of(query: int) -> list[dict[int, float]]:
        if (layer, head, query) not in captured.rows:  # evictions ask for the same rows again
            visible = [k for k in range(query + 1) if captured.visible[layer, head, query, k]]
            captured.rows[layer, head, query] = [
                attention_row(captured, layer, h, query, visible)
                for h in group_of(captured, layer, head)
            ]
        return captured.rows[layer, head, query]

    totals = dict.fromkeys(present, 0.0)
    for query in range(seen):
        rows = rows_of(query)
        for key in present:
            totals[key] += sum(row.get(key, 0.0) for row in rows) / len(rows)
    return totals


def morphkv(
    captured: Captured, layer: int, head: int, present: list[int], seen: int, config: Any
) -> dict[int, float]:
    """Logits summed over the group; each row's softmax over the keys before the window; fused."""
    window = range(max(0, seen - config.window), seen)
    old = [key for key in present if key < window.start]
    k = captured.keys[layer][head].double().numpy()
    rows = []
    for query in window:
        logits = [
            sum(
                float(k[key] @ captured.queries[layer][h, query].double().numpy())
                for h in group_of(captured, layer, head)
            )
            * captured.scaling[layer]
            for key in old
        ]
        rows.append(softmax(np.array(logits)) if old else np.zeros(0))
    fuse = np.sum if config.fuse == "sum" else np.max
    fused = fuse(np.stack(rows), axis=0)
    return {**dict.fromkeys(present, math.inf), **dict(zip(old, fused, strict=True))}


def streaming_llm(
    captured: Captured, layer: int, head: int, present: list[int], seen: int, config: Any
) -> dict[int, float]:
    """The newer, the better."""
    return {key: float(key) for key in present}


ORACLES = {"snapkv": snapkv, "h2o": h2o, "morphkv": morphkv, "streaming_llm": streaming_llm}


def block_weights(
    captured: Captured,
    layer: int,
    held: Sequence[Sequence[int]],
    seen: int,
    room: int,
    config: Any,
) -> list[dict[int, float]]:
    """By head, a weight for each block that it holds: what heads are compared by.

    Nexus's own; for the others sums of token scores, a layer's heads adding up to 1 on average.
    room: blocks that each head of the layer keeps on average beyond sinks and pins, of which H2O
    gives the newest ones a share.
    """
    size = config.block_size
    if config.method == "nexus":
        window = range(max(0, seen - config.window), seen)
        keys = captured.keys[layer].double().numpy()
        queries = captured.queries[layer][:, list(window)].double().numpy()
        per_head = config.heads == "kv_head"
        out = []
        for head, blocks in enumerate(held if per_head else held[:1]):
            group = group_of(captured, layer, head) if per_head else range(len(queries))
            (rows,) = oracles.attention_rows(
                queries[group],
                window,
                keys[head : head + 1] if per_head else keys,
                blocks,
                seen=seen,
                block_size=size,
                scaling=captured.scaling[layer],
                heads=config.heads,
            )
            out.append(dict(zip(blocks, oracles.weights(rows, config), strict=True)))
        return out if per_head else out * len(held)
    sums = []
    for head, blocks in enumerate(held):
        present = [t for b in blocks for t in range(b * size, (b + 1) * size) if t < seen]
        scores = ORACLES[config.method](captured, layer, head, present, seen, config)
        sums.append({b: sum(scores[t] for t in present if t // size == b) for b in blocks})
    mass = sum(x for own in sums for x in own.values() if x < math.inf) / len(sums)
    sums = [{b: x / mass for b, x in own.items()} for own in sums] if mass else sums
    if config.method == "h2o":
        newest = math.floor(room * allocation_oracles.decimal(config.recent_share))
        for own in sums:
            for block in sorted(own)[len(own) - newest :]:
                own[block] += 1  # more than all attention there is
    return sums


def expected_kept(
    run: Any,
    captured: Captured,
    *,
    pins: Sequence[tuple[int, int]] = (),
    layers: Collection[int] | None = None,
) -> list[list[list[list[int]]]]:
    """Kept blocks [evictions][L][H_kv]: forced ones, then the best of what the budget leaves.

    layers: those that are worked out; the others are empty lists.
    """
    config = run.cache.config
    count, heads = len(captured.keys), captured.keys[0].shape[0]
    adaptive = getattr(config, "head_budgets", "uniform") == "adaptive"
    held: list[list[list[int]]] = [[[] for _ in range(heads)] for _ in range(count)]
    known, out, present = 0, [], [0] * count
    for step, due in enumerate(oracles.expected_schedule(config, run.passes, pins)):
        blocks = -(-due.seen // config.block_size)
        forced = oracles.forced_blocks(config, due.seen, pins)
        held = [[own + list(range(known, blocks)) for own in layer] for layer in held]
        present = [kept + heads * (blocks - known) for kept in present]
        known = blocks
        free = allocation_oracles.layer_free(
            config,
            target=due.count,
            forced=len(forced),
            present=present,
            heads=heads,
        )
        present = [heads * len(forced) + chosen for chosen in free]
        for layer in range(count) if layers is None else layers:
            target = len(forced) + free[layer] // heads
            size = config.block_size
            recent = config.recent if config.recent is not None else max(config.window, size)
            first = max(0, due.seen - recent) // size
            old = sum(block < first for block in forced)  # sinks and pins
            weights = block_weights(captured, layer, held[layer], due.seen, target - old, config)
            candidates = [{b: w for b, w in own.items() if b not in forced} for own in weights]
            quota = [free[layer] // heads] * heads
            if adaptive:
                quota = allocation_oracles.head_free(
                    candidates,
                    free[layer],
                    alpha=config.head_floor,
                    normalize=config.head_normalize,
                )
            for head, own in enumerate(candidates):
                ranked = _priorities(config, own, layer, head, step)
                best = sorted(own, key=lambda b: (ranked[b], b), reverse=True)
                held[layer][head] = sorted({*forced, *best[: quota[head]]})
        out.append(
            [
                [list(own) for own in layer] if layers is None or index in layers else []
                for index, layer in enumerate(held)
            ]
        )
    return out


def _priorities(
    config: Any, weights: dict[int, float], layer: int, head: int, step: int
) -> dict[int, Any]:
    if config.selection == "top_k":
        return weights
    if getattr(config, "heads", "kv_head") != "kv_head":
        head = 0
    return {
        block: oracles.priority(w, oracles.uniforms(config, layer, head, block, step))
        for block, w in weights.items()
    }
