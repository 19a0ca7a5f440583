"""Tiny random models, and runs through an `EvictingCache` that keep all logits."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache as memoize
from typing import Any

import oracles
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from cache import EvictingCache, preset_names
from cache.config import Phase

VOCABULARY = 61
# Presets whose machinery differs: the paper's settings of the others change numbers only.
PRESETS = [name for name in preset_names() if not name.endswith("-paper")] + ["nexus-paper"]
# name: (config class, query heads, KV heads, layers); its place here seeds its weights: append
SHAPES: dict[str, tuple[type, int, int, int]] = {
    "llama-g1-kv2": (LlamaConfig, 2, 2, 3),
    "llama-g4-kv1": (LlamaConfig, 4, 1, 3),
    "llama-one-layer": (LlamaConfig, 4, 2, 1),
    "qwen2-g1-kv1": (Qwen2Config, 1, 1, 3),
    "qwen2-g4-kv2": (Qwen2Config, 8, 2, 4),
    "qwen3-g1-kv2": (Qwen3Config, 2, 2, 3),
    "qwen3-g4-kv2": (Qwen3Config, 8, 2, 3),
    "llama-g3-kv2": (LlamaConfig, 6, 2, 3),
}


@memoize
def _original(name: str) -> PreTrainedModel:
    kind, heads, kv_heads, layers = SHAPES[name]
    torch.manual_seed(list(SHAPES).index(name))
    hidden = 48 if heads % 3 == 0 else 32
    config = kind(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=8 if kind is Qwen3Config else hidden // heads,
        max_position_embeddings=8192,
        initializer_range=0.25,  # attention far from uniform, so that what left is missed
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):  # zero at birth: Qwen2's would go untested
                parameter.normal_(std=0.3)
    return model.float().eval()


def tiny(name: str) -> PreTrainedModel:
    """A fresh copy of the named random float32 model: what is attached to it stays with it."""
    return copy.deepcopy(_original(name))


def random_ids(count: int, seed: int, vocabulary: int = VOCABULARY) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (count,), generator=generator).tolist()


@dataclass
class Turn:
    """New tokens fed in chunks, then tokens fed one at a time as if they had been generated."""

    fed: list[int]
    decoded: list[int]


def turns_of(*lengths: tuple[int, int], seed: int = 0, vocabulary: int = VOCABULARY) -> list[Turn]:
    return [
        Turn(
            random_ids(fed, 1000 * seed + 2 * i, vocabulary),
            random_ids(decoded, 1000 * seed + 2 * i + 1, vocabulary),
        )
        for i, (fed, decoded) in enumerate(lengths)
    ]


@dataclass
class Run:
    """What a run of forward passes did: logits [T, vocabulary] of all T tokens fed."""

    cache: EvictingCache
    ids: list[int] = field(default_factory=list)
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    passes: list[tuple[str, int, bool]] = field(default_factory=list)

    @property
    def records(self) -> list[Any]:
        return self.cache.stats.records

    @property
    def kept(self) -> list[list[list[list[int]]]]:
        """[evictions][L][H_kv], each as many blocks as that head kept."""
        return [oracles.kept_sets(record.kept) for record in self.records]


def cache_argument(model: PreTrainedModel, cache: Any) -> dict[str, Any]:
    names = inspect.signature(model.forward).parameters
    return {"cache" if "cache" in names else "past_key_values": cache}


@torch.no_grad()
def logits_of(model: PreTrainedModel, cache: Any, ids: Sequence[int]) -> torch.Tensor:
    """One forward pass; logits [q, vocabulary]."""
    return model(
        input_ids=torch.tensor([list(ids)]), use_cache=True, **cache_argument(model, cache)
    ).logits[0]


def run(
    model: PreTrainedModel,
    config: Any,
    turns: Sequence[Turn],
    *,
    chunk: int,
    pool: Any = None,
    pins: Sequence[tuple[int, int]] = (),
    after_pass: Callable[[EvictingCache, str], None] | None = None,
) -> Run:
    """Feed `turns` as a session does: evict after each chunk and each token."""
    cache = EvictingCache(model, config, pool=pool, record_kept=True)
    for start, stop in pins:
        cache.pin(start, stop)
    out, parts = Run(cache), []

    def feed(ids: list[int], phase: Phase, last: bool) -> None:
        parts.append(logits_of(model, cache, ids))
        cache.evict(phase, last_chunk=last)
        out.ids += ids
        out.passes.append((phase, len(ids), last))
        if after_pass is not None:
            after_pass(cache, phase)

    for turn in turns:
        for start in range(0, len(turn.fed), chunk):
            feed(turn.fed[start : start + chunk], "prefill", start + chunk >= len(turn.fed))
        for token in turn.decoded:
            feed([token], "decode", True)
    out.logits = torch.cat(parts)
    return out


def replayed(model: PreTrainedModel, run: Run) -> tuple[torch.Tensor, oracles.Captured]:
    """The oracle's logits for what `run` fed and kept; `model` is a fresh copy."""
    visible = oracles.visible_keys(
        run.records,
        tokens=len(run.ids),
        block_size=run.cache.config.block_size,
        layers=model.config.num_hidden_layers,
        heads=model.config.num_key_value_heads,
    )
    return oracles.replay(model, run.ids, visible)


def expected_kept(
    run: Run, captured: oracles.Captured, pins: Sequence[tuple[int, int]] = ()
) -> list[list[list[list[int]]]]:
    """Kept sets [evictions][L][H_kv][B] by brute force: what the cache must have recorded."""
    config = run.cache.config
    layers = len(captured.keys)
    heads = captured.keys[0].shape[0]
    size = config.block_size
    held: list[list[list[int]]] = [[[] for _ in range(heads)] for _ in range(layers)]
    known, out = 0, []  # blocks that have been dealt out to `held`
    schedule = oracles.expected_schedule(config, run.passes, pins)
    for step, due in enumerate(schedule):
        blocks = -(-due.seen // size)
        for layer in range(layers):
            for head in range(heads):
                held[layer][head] += range(known, blocks)
            held[layer] = oracles.nexus_step(
                captured,
                layer,
                held[layer],
                seen=due.seen,
                step=step,
                count=due.count,
                forced=oracles.forced_blocks(config, due.seen, pins),
                config=config,
            )
        known = blocks
        out.append([[list(head) for head in layer] for layer in held])
    return out
