"""What the cache must do, written from the definitions alone, slowly and without its code.

Three oracles: full-sequence eager attention under the mask that the recorded kept sets replay; one
Nexus eviction step in plain Python loops; Philox4x32-10 with Python's integers. Nothing here
imports `cache`.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface

REPLAY = "test_replayed_mask"


# --- replayed mask ----------------------------------------------------------------------------


def kept_sets(kept: torch.Tensor) -> list[list[list[int]]]:
    """Kept blocks [L][H_kv][...] of a record, without the -1 in front of heads that kept fewer.

    Raises AssertionError when a head is not ascending, or padded elsewhere than in front.
    """
    out = [[[b for b in head if b != -1] for head in layer] for layer in kept.tolist()]
    for layer, lists in zip(kept.tolist(), out, strict=True):
        for padded, ids in zip(layer, lists, strict=True):
            assert padded == [-1] * (len(padded) - len(ids)) + sorted(set(ids)), padded
    return out


def visible_keys(
    records: Sequence[Any], *, tokens: int, block_size: int, layers: int, heads: int
) -> torch.Tensor:
    """Bool [L, H_kv, T, T]: which key each query may see, given the recorded evictions.

    A key whose block left in an eviction after `seen` tokens is invisible to queries with index
    >= `seen`. Raises AssertionError when a kept set is no ascending subset of what was there.
    """
    gone_at = [[[tokens + 1] * tokens for _ in range(heads)] for _ in range(layers)]
    for record in records:
        assert record.kept.shape[:2] == (layers, heads), record.kept.shape
        kept = kept_sets(record.kept)
        for layer in range(layers):
            for head in range(heads):
                ids, gone = kept[layer][head], gone_at[layer][head]
                # All tokens of a block leave at once, so its first one speaks for it.
                blocks = range(-(-record.seen // block_size))
                held = {block for block in blocks if gone[block * block_size] > record.seen}
                assert set(ids) <= held, f"blocks {set(ids) - held} came back from the dead"
                for block in held - set(ids):
                    start, stop = block * block_size, min((block + 1) * block_size, tokens)
                    gone[start:stop] = [record.seen] * (stop - start)
    query = torch.arange(tokens)
    causal = query[None, :] <= query[:, None]
    return causal & (query[:, None] < torch.tensor(gone_at)[:, :, None, :])


@dataclass
class Captured:
    """Rotated queries [H_q, T, D] and keys [H_kv, T, D] and q.k factor, by layer."""

    visible: torch.Tensor
    queries: dict[int, torch.Tensor] = field(default_factory=dict)
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    scaling: dict[int, float] = field(default_factory=dict)
    rows: dict[Any, Any] = field(default_factory=dict)  # what an oracle need not compute twice


_replaying: list[Captured] = []


def _replayed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    assert attention_mask is None
    captured = _replaying[-1]
    layer = module.layer_idx
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    captured.queries[layer] = query[0]
    captured.keys[layer] = key[0]
    captured.scaling[layer] = factor
    group = query.shape[1] // key.shape[1]
    outputs = []
    for head in range(query.shape[1]):
        scores = (query[0, head] @ key[0, head // group].T) * factor
        scores = scores.masked_fill(~captured.visible[layer, head // group], -math.inf)
        outputs.append(scores.softmax(-1) @ value[0, head // group])
    return torch.stack(outputs, dim=1)[None], None


@contextmanager
def _replay(visible: torch.Tensor) -> Iterator[Captured]:
    captured = Captured(visible)
    _replaying.append(captured)
    try:
        yield captured
    finally:
        _replaying.pop()


@torch.no_grad()
def replay(model: Any, ids: Sequence[int], visible: torch.Tensor) -> tuple[torch.Tensor, Captured]:
    """Logits [T, vocabulary] of one full pass without a cache under `visible`, and its q and k.

    `model` must be another object than the one that the cache under test is attached to.
    """
    AttentionInterface.register(REPLAY, _replayed_attention)
    model.set_attn_implementation(REPLAY)
    with _replay(visible) as captured:
        logits = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
    assert len(captured.keys) == model.config.num_hidden_layers
    return logits, captured


# --- one Nexus step ---------------------------------------------------------------------------


def softmax(logits: np.ndarray) -> np.ndarray:
    """Softmax in float64."""
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def attention_rows(
    queries: np.ndarray,
    query_index: Sequence[int],
    keys: np.ndarray,
    blocks: Sequence[int],
    *,
    seen: int,
    block_size: int,
    scaling: float,
    heads: str,
) -> list[list[list[float]]]:
    """Rows a(q) as [H'][W][N], step 1, for one layer with one set of `blocks` (ascending).

    queries [H_q, W, D]; keys [H_kv, T_all, D], all tokens by index, of which those in `blocks` are
    present. For `kv_head` give one KV head with its group.
    """
    h_q, window, _ = queries.shape
    h_kv = keys.shape[0]
    present = [
        j
        for block in blocks
        for j in range(block * block_size, (block + 1) * block_size)
        if j < seen
    ]

    def row(q: np.ndarray, index: int, k: np.ndarray) -> list[float]:
        legal = [j for j in present if j <= index]
        weights = dict(zip(legal, softmax(k[legal] @ q * scaling).tolist(), strict=True))
        sums = dict.fromkeys(blocks, 0.0)
        for j, weight in weights.items():
            sums[j // block_size] += weight
        total = sum(sums.values())
        return [sums[block] / total for block in blocks]

    if heads == "layer_mean":
        mean_q, mean_k = queries.mean(0), keys.mean(0)
        return [[row(mean_q[i], query_index[i], mean_k) for i in range(window)]]
    group = h_q // h_kv
    per_head = [
        [row(queries[h, i], query_index[i], keys[h // group]) for i in range(window)]
        for h in range(h_q)
    ]
    if heads == "layer_attention":
        return [np.mean(per_head, axis=0).tolist()]
    return [np.mean(per_head[k * group : (k + 1) * group], axis=0).tolist() for k in range(h_kv)]


def walk_rows(window: int, steps: int, which: str) -> list[int]:
    """Indices of the rows that the walk takes, oldest first."""
    if which == "all":
        return list(range(window))
    if steps == 0:
        return []
    if which == "newest":
        return list(range(window - steps, window))
    if steps == 1:
        return [0]
    return [round(i * (window - 1) / (steps - 1)) for i in range(steps)]


def walk(rows: Sequence[Sequence[float]]) -> list[float]:
    """C of Eq. 4, not normalised."""
    total = [0.0] * len(rows[0])
    for row in rows:
        gamma = 1 + sum(a * c for a, c in zip(row, total, strict=True))
        total = [c + gamma * a for a, c in zip(row, total, strict=True)]
    return total


def weights(rows: Sequence[Sequence[float]], config: Any) -> list[float]:
    """w of Eq. 2 and 5 from rows [W][N]."""
    count, blocks = len(rows), len(rows[0])
    direct = [sum(row[j] for row in rows) / count for j in range(blocks)]
    chosen = [rows[i] for i in walk_rows(count, config.walk_steps, config.walk_rows)]
    walked = walk(chosen) if chosen and config.walk_steps else [0.0] * blocks
    norm = sum(walked)
    walked = [c / norm for c in walked] if norm else walked
    rank = [j / (blocks - 1) if blocks > 1 else 0.0 for j in range(blocks)]
    return [
        direct[j] + config.walk_weight * walked[j] + config.recency_tiebreak * rank[j]
        for j in range(blocks)
    ]


_WIDE = decimal.Context(prec=40, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX)


def priority(weight: float, uniforms: Sequence[float]) -> decimal.Decimal:
    """Mean of u^(1/w), in 40 digits and with exponents that cannot underflow (Eq. 6)."""
    if weight == 0:
        return decimal.Decimal(0)
    exponent = _WIDE.divide(1, decimal.Decimal(weight))
    total = decimal.Decimal(0)
    for u in uniforms:
        total = _WIDE.add(total, _WIDE.power(decimal.Decimal(float(u)), exponent))
    return _WIDE.divide(total, len(uniforms))


def keep(
    priorities: Sequence[Any], blocks: Sequence[int], forced: set[int], count: int
) -> list[int]:
    """The kept blocks, ascending: forced ones, then the largest priorities."""
    free = [(p, block) for p, block in zip(priorities, blocks, strict=True) if block not in forced]
    free.sort(reverse=True)
    return sorted([b for b in blocks if b in forced] + [b for _, b in free[: count - len(forced)]])


def nexus_step(
    captured: Captured,
    layer: int,
    present: Sequence[Sequence[int]],
    *,
    seen: int,
    step: int,
    count: int,
    forced: set[int],
    config: Any,
) -> list[list[int]]:
    """Kept sets [H_kv][count] of one layer.

    present: blocks held by each KV head, ascending.
    """
    index = list(range(max(0, seen - config.window), seen))
    queries = captured.queries[layer][:, index].double().numpy()
    keys = captured.keys[layer].double().numpy()
    scaling = captured.scaling[layer]
    h_kv, group = keys.shape[0], queries.shape[0] // keys.shape[0]

    def decide(q: np.ndarray, k: np.ndarray, blocks: Sequence[int], head: int) -> list[int]:
        (rows,) = attention_rows(
            q,
            index,
            k,
            blocks,
            seen=seen,
            block_size=config.block_size,
            scaling=scaling,
            heads=config.heads,
        )
        values: list[Any] = weights(rows, config)
        if config.selection == "reservoir":
            values = [
                priority(w, uniforms(config, layer, head, block, step))
                for w, block in zip(values, blocks, strict=True)
            ]
        return keep(values, blocks, forced, count)

    if config.heads == "kv_head":
        return [
            decide(queries[h * group : (h + 1) * group], keys[h : h + 1], present[h], h)
            for h in range(h_kv)
        ]
    for blocks in present:
        assert list(blocks) == list(present[0]), "heads of a layer that decides as one differ"
    kept = decide(queries, keys, present[0], 0)
    return [list(kept) for _ in range(h_kv)]


# --- budget, forced blocks, schedule ----------------------------------------------------------


def forced_blocks(config: Any, seen: int, pins: Sequence[tuple[int, int]] = ()) -> set[int]:
    """Blocks that stay without a draw after `seen` tokens, by walking over all tokens."""
    recent = config.recent if config.recent is not None else max(config.window, config.block_size)
    forced = set()
    for token in range(seen):
        block = token // config.block_size
        pinned = any(start <= token < stop for start, stop in pins)
        if block < config.sinks or token >= seen - recent or pinned:
            forced.add(block)
    return forced


def budget_blocks(config: Any, *, base: int, forced: int) -> int:
    """B: blocks kept in all."""
    size, budget = config.block_size, config.budget
    if budget.kind == "tokens":
        return budget.tokens // size
    share = math.floor(budget.density * math.ceil(base / size) + 0.5)
    return max(share, forced + budget.min_free, math.ceil(budget.min_tokens / size))


@dataclass
class Expected:
    """One eviction that must happen: after `seen` tokens, down to `count` blocks."""

    seen: int
    phase: str
    count: int


def expected_schedule(
    config: Any, passes: Sequence[tuple[str, int, bool]], pins: Sequence[tuple[int, int]] = ()
) -> list[Expected]:
    """Evictions of a run of forward passes (phase, tokens, last chunk of its turn)."""
    size = config.block_size
    out: list[Expected] = []
    seen, resident, first_prompt, fixed = 0, 0, None, None
    for phase, tokens, last in passes:
        seen, resident = seen + tokens, resident + tokens
        if phase == "prefill" and last and first_prompt is None:
            first_prompt = seen
        base = {
            "seen": seen,
            "present": resident,
            "first_prompt": first_prompt if first_prompt is not None else seen,
        }
        if phase == "prefill":
            count = budget_blocks(
                config,
                base=base[getattr(config.budget, "density_base", "seen")],
                forced=len(forced_blocks(config, seen, pins)),
            )
            fixed = count
            due = last or config.prefill_eviction == "chunk"
        else:
            assert fixed is not None
            count = max(fixed, len(forced_blocks(config, seen, pins)))
            due = config.scope == "prefill+decode" and seen % size == 0
        if due and math.ceil(resident / size) > count:
            out.append(Expected(seen, phase, count))
            tail = seen % size
            resident = count * size - (size - tail if tail else 0)
    return out


# --- Philox -----------------------------------------------------------------------------------


def philox4x32(counter: Sequence[int], key: Sequence[int]) -> tuple[int, ...]:
    """Ten rounds of Philox4x32 (Salmon et al. 2011) with Python's unbounded integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (p1 >> 32) ^ c1 ^ k0,
            p1 & 0xFFFFFFFF,
            (p0 >> 32) ^ c3 ^ k1,
            p0 & 0xFFFFFFFF,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def uniforms(config: Any, layer: int, head: int, block: int, step: int) -> list[float]:
    """The n uniforms of one block in one eviction step.

    Counter (block, step, layer * 2^16 + head, pair), key the two halves of the seed; two words make
    one uniform of 53 bits, in the middle of its interval. Recorded runs depend on this layout.
    """
    key = (config.seed % 2**32, config.seed >> 32)
    out: list[float] = []
    for pair in range(-(-config.samples // 2)):
        w0, w1, w2, w3 = philox4x32((block, step, layer * 2**16 + head, pair), key)
        out += [((high * 2**32 + low) // 2**11 + 0.5) / 2**53 for high, low in ((w0, w1), (w2, w3))]
    return out[: config.samples]
