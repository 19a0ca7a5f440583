"""On a device neither an eviction step nor a static decode step makes the host wait.

No GPU is needed: the model stands on a pretended device (see `pretend_devices`), which sees every
operation, also those that would copy to it, read from it, or ask for a shape.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from cache_harness import tiny
from pretend_devices import FIRST, Trace, place, pretended_devices, traced

from cache import EvictingCache, Pool, preset
from cache.config import EvictingConfig
from cache.generate import forward
from cache.static_step import StaticStep

UNIFORM = [
    "nexus", "snapkv", "h2o", "morphkv", "streaming_llm", "random", "topk", "nexus-paper",
]  # fmt: skip


@pytest.fixture(autouse=True)
def on_a_device() -> Iterator[None]:
    with pretended_devices():
        yield


def cache_of(
    name: str, shape: str = "qwen3-g4-kv2", layers: str = "000", tokens: int = 20
) -> EvictingCache:
    model = place(tiny(shape), layers)
    window = {"window": 4} if preset(name).window else {}
    config = preset(
        name, block_size=4, sinks=1, recent=4, samples=2, scope="prefill+decode",
        prefill_eviction="chunk", budget={"kind": "tokens", "tokens": tokens}, **window,
    )  # fmt: skip
    assert isinstance(config, EvictingConfig)
    return EvictingCache(model, config)


def feed(cache: EvictingCache, count: int) -> None:
    assert cache.model is not None
    forward(cache.model, cache, torch.tensor([i % 50 for i in range(count)], device=FIRST))


@pytest.mark.parametrize("name", UNIFORM)
def test_no_eviction_makes_the_host_wait(name: str) -> None:
    cache = cache_of(name)
    cache.pin(2, 5)
    feed(cache, 30)
    cache.evict("prefill")
    evictions = 0
    for _ in range(12):
        feed(cache, 1)
        with traced() as trace:
            record = cache.evict("decode")
        if record is not None:
            evictions += 1
            assert record.after < record.before
        assert trace.waits == []
    assert evictions == 2


def test_only_many_pinned_spans_are_copied_to_the_device() -> None:
    cache = cache_of("streaming_llm", tokens=60)
    feed(cache, 60)
    waits = []
    for _ in range(6):
        feed(cache, 8)
        cache.pin(cache.seen - 6, cache.seen - 5)
        with traced() as trace:
            cache.evict("prefill")
        waits.append(trace.waits)
    assert waits[:3] == [[], [], []]
    assert waits[-1] == ["_to_copy"]


@pytest.mark.parametrize("name", UNIFORM)
def test_launches_do_not_depend_on_layers_heads_or_length(name: str) -> None:
    def launches(tokens: int, *shape: str) -> int:
        cache = cache_of(name, *shape)
        feed(cache, tokens)
        with traced() as trace:
            assert cache.evict("prefill") is not None
        return trace.launches.total()

    few = launches(30)
    assert launches(90) == few
    assert launches(30, "qwen2-g4-kv2", "0000") == few
    assert launches(30, "llama-g4-kv1", "000") == few
    assert launches(30, "llama-one-layer", "0") == few
    assert launches(30, "qwen3-g4-kv2", "001") <= 2 * few  # two devices: once on each


def test_the_trace_sees_what_it_is_for() -> None:
    here = torch.arange(4, device=FIRST)
    for read in (
        lambda: int(here[1]),
        lambda: here.tolist(),
        lambda: here.nonzero(),
        lambda: here[here > 1],
        lambda: torch.tensor([1, 2], device=FIRST),
        lambda: here.cpu(),
        lambda: bool((here > 1).any()),
    ):
        with traced() as trace:
            read()
        assert trace.waits, read
    with traced() as trace:
        (here + 1)[:2].clone()
    assert (trace.waits, trace.launches) == ([], {"add": 1, "clone": 1})


@pytest.mark.parametrize("name", ["dense", "nexus", "snapkv", "h2o"])
def test_a_static_step_is_always_the_same_launches_and_waits_for_nothing(name: str) -> None:
    """What a CUDA graph may record, and what a replay of it may stand for."""
    cache = cache_of(name) if name != "dense" else dense_cache()
    cache.reserve(60)  # the pool's tensors stay what they are
    feed(cache, 10)
    assert cache.model is not None
    assert isinstance(cache.pool, Pool)
    step = StaticStep(cache.model, cache.pool)
    traces: list[Trace] = []
    whole = step._pass

    def watched() -> torch.Tensor:
        with traced() as trace:
            logits = whole()
        traces.append(trace)
        return logits

    step._pass = watched  # type: ignore[method-assign]
    for token in range(20):
        with traced() as trace:
            step.step([cache], [token])
        assert trace.waits == ["copy_"]  # what is fed, and where
        cache.evict("decode")
    assert cache.seen == 30
    assert [trace.waits for trace in traces] == [[]] * 20
    first, *later = [trace.launches for trace in traces]
    assert len(first) > 5
    assert all(launches == later[0] for launches in later)


def dense_cache() -> EvictingCache:
    return EvictingCache(place(tiny("qwen3-g4-kv2"), "000"), preset("dense", block_size=4))
