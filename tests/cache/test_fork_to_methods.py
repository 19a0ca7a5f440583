"""One prefill serves many methods: a fork with another config is that method's own run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_harness import PRESETS, random_ids, tiny

from cache import (
    DenseConfig,
    EvictingCache,
    Sampling,
    decode,
    make_pool,
    prefill,
    preset,
)
from cache.generate import forward

MODEL = "qwen2-g4-kv2"
NAMES = [name for name in PRESETS if name not in ("dense", "nexus-paper")]
IDS = random_ids(90, 1)


def config(name: str) -> Any:
    size = 1 if name == "snapkv" else 4
    return preset(
        name,
        block_size=size,
        budget={"kind": "tokens", "tokens": 48},
        scope="prefill+decode",
        prefill_eviction="end",
    )


def continued(cache: EvictingCache, logits: torch.Tensor) -> tuple[list[int], Any]:
    steps = decode(cache._model, cache, logits, sampling=Sampling())
    return [next(steps) for _ in range(20)], cache.kept_blocks().tolist()


@pytest.mark.parametrize("start", ["dense", "ada-snapkv"])
def test_every_method_goes_on_from_one_prefill_as_from_its_own(start: str) -> None:
    model = tiny(MODEL)
    configs = [config(name) for name in NAMES]
    first = DenseConfig() if start == "dense" else config(start)
    template = EvictingCache(model, first, forks=configs)
    with torch.inference_mode():
        for at in range(0, len(IDS), 32):  # by hand, since `prefill` would cut
            logits = forward(model, template, torch.tensor(IDS[at : at + 32]))
    for each in configs:
        twin = template.fork(config=each)
        with torch.inference_mode():
            twin.evict("prefill")
        assert twin.stats.evictions == 1
        own = EvictingCache(model, each)
        expected = prefill(model, own, IDS, chunk=32)
        assert torch.equal(expected, logits)
        assert continued(twin, logits) == continued(own, expected), each.method
        twin.close()
    assert (template.seen, template.resident, template.stats.evictions) == (90, 90, 0)


def test_a_fork_that_cannot_take_over_is_refused() -> None:
    model = tiny(MODEL)
    cache = EvictingCache(model, config("nexus"))
    prefill(model, cache, IDS, chunk=32)
    with pytest.raises(ValueError, match=r"1 evictions have happened.*before the first"):
        cache.fork(config=config("snapkv"))
    plain = EvictingCache(model, DenseConfig())
    prefill(model, plain, IDS, chunk=32)
    for name in ("snapkv", "h2o"):
        with pytest.raises(ValueError, match="name its config in `forks`"):
            plain.fork(config=config(name))
    assert plain.fork(config=config("streaming_llm")).seen == 90


def test_a_pool_of_another_kind_is_refused() -> None:
    model = tiny(MODEL)
    pool = make_pool(model, config("nexus"))
    for other, what in (("ada-nexus", "ragged"), ("snapkv", "block_size"), ("h2o", "with_sums")):
        with pytest.raises(ValueError, match=f"the pool was made for {what}"):
            EvictingCache(model, config(other), pool=pool)
    assert pool.take() == 0  # nothing was taken
