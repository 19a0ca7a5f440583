"""Token scores of the rival methods in plain loops, from their definitions (see the papers named).

Everything is computed for one layer and KV head from rotated queries and keys captured in a full
pass, and from which keys each query could see. Nothing here imports `cache`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from oracles import Captured, softmax


def attention_row(
    captured: Captured, layer: int, query_head: int, query: int, keys: Sequence[int]
) -> dict[int, float]:
    """Softmax of one query over those of `keys` that are not after it, by key."""
    group = captured.queries[layer].shape[0] // captured.keys[layer].shape[0]
    q = captured.queries[layer][query_head, query].double().numpy()
    seen = [key for key in keys if key <= query]
    k = captured.keys[layer][query_head // group].double().numpy()
    logits = np.array([float(k[key] @ q) * captured.scaling[layer] for key in seen])
    return dict(zip(seen, softmax(logits), strict=True))


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
    totals = dict.fromkeys(present, 0.0)
    for query in range(seen):
        visible = [k for k in range(query + 1) if captured.visible[layer, head, query, k]]
        rows = [
            attention_row(captured, layer, h, query, visible)
            for h in group_of(captured, layer, head)
        ]
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


def expected_kept(run: Any, captured: Captured) -> list[list[list[list[int]]]]:
    """Kept blocks [evictions][L][H_kv][B]: forced ones, then the largest sums of token scores."""
    config = run.cache.config
    size, oracle = config.block_size, ORACLES[config.method]
    layers, heads = len(captured.keys), captured.keys[0].shape[0]
    held = [[[] for _ in range(heads)] for _ in range(layers)]
    known, out = 0, []
    for record in run.records:
        blocks = -(-record.seen // size)
        recent = config.recent if config.recent is not None else max(config.window, size)
        for layer in range(layers):
            for head in range(heads):
                mine = held[layer][head] + list(range(known, blocks))
                present = [
                    t for b in mine for t in range(b * size, (b + 1) * size) if t < record.seen
                ]
                scores = oracle(captured, layer, head, present, record.seen, config)
                forced = {
                    b
                    for b in mine
                    if b < config.sinks
                    or any(t >= record.seen - recent for t in range(b * size, (b + 1) * size))
                }
                total = {
                    b: sum(scores[t] for t in range(b * size, (b + 1) * size) if t in scores)
                    for b in mine
                }
                free = sorted(set(mine) - forced, key=lambda b: (total[b], b), reverse=True)
                chosen = forced | set(free[: record.after - len(forced)])
                held[layer][head] = sorted(chosen)
        known = blocks
        out.append([[list(head) for head in layer] for layer in held])
    return out
