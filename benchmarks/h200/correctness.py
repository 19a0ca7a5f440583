"""Whether results on the device are right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from agent.bench.contestants import NotHere
from benchmarks.h200.work import Work
from cache import EvictingCache, make_pool, prefill, preset, preset_names, ragged_attention
from cache.batch_decode import BatchDecoder
from cache.generate import forward


def correct(work: Work) -> None:
    """Every method on the device against the CPU; variable-length kernel and batches against the
    plain ways."""
    small = small_model()
    there = small_model().to(device=work.device)
    ids = torch.randint(97, (360,), generator=torch.Generator().manual_seed(1)).tolist()
    names = [name for name in preset_names() if not name.endswith("-paper")] + ["nexus-paper"]
    for name in names:
        with work.noted(f"{name}, float32"):
            here, other = (_played(model, name, ids) for model in (small, there))
            work.tell("same", what=f"{name}, float32: device against CPU", **compared(here, other))
    if work.device.type == "cuda":
        half = small_model().to(device=work.device, dtype=torch.bfloat16)
        for name in ("dense", "nexus", "snapkv", "morphkv", "ada-nexus"):
            with work.noted(f"{name}, bfloat16"):
                here, other = _played(small, name, ids), _played(half, name, ids)
                work.tell(
                    "same",
                    what=f"{name}, bfloat16 on the device against float32 on the CPU",
                    **compared(here, other, half=True),
                )
        with work.noted("variable-length attention"):
            _varlen(work, half, ids)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.05)):
        if work.device.type == "cpu" and dtype is torch.bfloat16:
            continue
        for fixed in (False, True):
            with work.noted(f"batched decode, {dtype}, fixed {fixed}"):
                batched_is_solo(work, there.to(dtype=dtype), dtype, tolerance, fixed=fixed)


@dataclass
class Played:
    """What a small model did: logits of every token written, and what each cut kept."""

    logits: torch.Tensor
    kept: list[torch.Tensor]


def small_model() -> Any:
    """Large enough for every kernel, small enough for a CPU; attention far from uniform."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        initializer_range=0.2,
        max_position_embeddings=4096,
    )
    return AutoModelForCausalLM.from_config(config).float().eval().requires_grad_(False)


def _config(name: str) -> Any:
    if name == "dense":
        return preset(name)
    budget = {"kind": "tokens", "tokens": 192}
    return preset(name, budget=budget, scope="prefill+decode", prefill_eviction="chunk")


@torch.inference_mode()
def _played(model: PreTrainedModel, name: str, ids: list[int]) -> Played:
    cache = EvictingCache(model, _config(name), record_kept=True)
    prefill(model, cache, ids[:300], chunk=100)
    logits = []
    for token in ids[300:]:
        logits.append(forward(model, cache, torch.tensor([token], device=model.device)).cpu())
        cache.evict("decode")
    kept = [record.kept for record in cache.stats.records if record.kept is not None]
    return Played(torch.stack(logits), kept)


def compared(here: Played, there: Played, *, half: bool = False) -> dict[str, Any]:
    """Relative distance of logits, and cuts that kept the same.

    Right is: all cuts and logits the same but for rounding. In half precision (`half`) scores that
    are a rounding apart can change places, and what is kept then differs: there the first logits
    decide.
    """
    same = sum(
        a.shape == b.shape and bool((a == b).all())
        for a, b in zip(here.kept, there.kept, strict=False)
    )
    distance = _distance(there.logits, here.logits)
    first = _distance(there.logits[:1], here.logits[:1])
    equal = len(here.kept) == len(there.kept) == same
    return {
        "distance": distance,
        "first": first,
        "cuts": len(here.kept),
        "same_cuts": same,
        "ok": first < 0.1 if half else equal and distance < 1e-3,
    }


def _distance(found: torch.Tensor, reference: torch.Tensor) -> float:
    """|found - reference| / |reference|; NaN never passes a comparison."""
    return float((found.double() - reference.double()).norm() / reference.double().norm())


def _varlen(work: Work, model: PreTrainedModel, ids: list[int]) -> None:
    """Heads of different lengths in one kernel, against one head after the other."""
    kernel = ragged_attention.varlen_kernel()
    if kernel is None:
        raise NotHere("this torch has no variable-length attention that reads segments in place")
    fast = _played(model, "ada-nexus", ids)
    with patch.object(ragged_attention, "varlen_kernel", lambda: None):
        plain = _played(model, "ada-nexus", ids)
    what = "ada-nexus, bfloat16: variable-length kernel against one head after the other"
    work.tell("same", what=what, **compared(plain, fast, half=True))


@torch.inference_mode()
def batched_is_solo(
    work: Work, model: PreTrainedModel, dtype: torch.dtype, tolerance: float, *, fixed: bool
) -> None:
    """Four sessions of different lengths as one batch, and each by itself."""
    config, lengths = _config("nexus"), (40, 130, 201, 333)
    random = torch.Generator().manual_seed(2)
    prompts = [torch.randint(97, (n,), generator=random).tolist() for n in lengths]
    written = torch.randint(97, (40, len(lengths)), generator=random).tolist()
    pool = make_pool(model, config, rows=len(lengths))
    together = [EvictingCache(model, config, pool=pool, record_kept=True) for _ in lengths]
    alone = [EvictingCache(model, config, record_kept=True) for _ in lengths]
    for caches in (together, alone):
        for cache, prompt in zip(caches, prompts, strict=True):
            prefill(model, cache, prompt, chunk=64)
    decoder, worst, first = BatchDecoder(model, pool, static=fixed), 0.0, 0.0
    for tokens in written:
        batch = decoder.step(together, tokens).cpu()
        solo = torch.stack(
            [
                forward(model, cache, torch.tensor([token], device=model.device)).cpu()
                for cache, token in zip(alone, tokens, strict=True)
            ]
        )
        worst = max(worst, _distance(batch, solo))
        first = first or worst
        for cache in (*together, *alone):
            cache.evict("decode")
    pairs = [
        bool((a.kept == b.kept).all())
        for one, two in zip(together, alone, strict=True)
        for a, b in zip(one.stats.records, two.stats.records, strict=True)
        if a.kept is not None and b.kept is not None
    ]
    half = dtype is not torch.float32  # what stays may differ after the first step
    work.tell(
        "same",
        what=f"{len(lengths)} sessions as one batch against each alone, {dtype}"
        + (", fixed shapes (one graph on CUDA)" if fixed else ""),
        distance=worst,
        first=first,
        cuts=len(pairs),
        same_cuts=sum(pairs),
        ok=first < tolerance and (half or (all(pairs) and worst < tolerance)),
    )
