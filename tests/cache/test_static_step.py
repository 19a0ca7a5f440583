"""A step of static shapes is the step that it stands for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cache_harness import random_ids, tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_batch_decode import CONFIGS, Boom, close, facts, opened
from test_ragged_attention import kernel

from cache import Pool, make_pool, prefill, static_step
from cache.batch_attention import attend_rows, varlen_rows
from cache.batch_decode import BatchDecoder
from cache.static_step import can_capture

UNIFORM = ["nexus", "dense", "snapkv", "seed"]


def pool_for(model: Any, name: str, rows: int) -> Pool:
    pool = make_pool(model, CONFIGS[name], rows=rows)
    assert isinstance(pool, Pool)
    return pool


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    data=st.data(),
    shape=st.sampled_from(["llama-g3-kv2", "qwen2-g1-kv1", "qwen3-g4-kv2"]),
    name=st.sampled_from([*UNIFORM, "h2o"]),
)
def test_equal_to_the_normal_path_as_rows_come_go_and_grow(data, shape, name):
    """Rows that are not fed, that are free, and that are given back and taken anew in between."""
    model = tiny(shape)
    pool = pool_for(model, name, rows=4)
    static, normal = BatchDecoder(model, pool, static=True), BatchDecoder(model)
    caches = [
        opened(model, name, prompt=data.draw(st.integers(1, 70)), seed=i, pool=pool)[0]
        for i in range(3)
    ]
    twins = [cache.fork() for cache in caches]
    for at in range(data.draw(st.integers(1, 30))):
        here = data.draw(st.lists(st.sampled_from([0, 1, 2]), min_size=1, unique=True))
        fed = random_ids(len(here), seed=at)
        logits = static.advance([caches[i] for i in here], fed)
        assert close(logits, normal.advance([twins[i] for i in here], fed))
        if data.draw(st.integers(0, 5)) == 0:
            i = data.draw(st.sampled_from([0, 1, 2]))
            caches[i].close()
            twins[i].close()
            caches[i], _ = opened(model, name, prompt=11 + at, seed=at, pool=pool)
            twins[i] = caches[i].fork()
    for cache, twin in zip(caches, twins, strict=True):
        assert (cache.seen, cache.resident) == (twin.seen, twin.resident)
        assert cache.stats.evictions == twin.stats.evictions
        assert torch.equal(cache.kept_blocks(), twin.kept_blocks())
        state, other = cache.state(), twin.state()
        assert state.scaling == other.scaling
        assert state.tensors.keys() == other.tensors.keys()
        for plane in state.tensors:
            assert close(state.tensors[plane].float(), other.tensors[plane].float())


def test_256_greedy_tokens_through_a_capacity_that_grows():
    model = tiny("qwen2-g4-kv2")
    pool = pool_for(model, "dense", rows=3)
    static, normal = BatchDecoder(model, pool, static=True), BatchDecoder(model)
    sessions = [opened(model, "dense", prompt=5 + 40 * i, seed=i, pool=pool) for i in range(3)]
    caches = [cache for cache, _ in sessions]
    twins = [cache.fork() for cache in caches]
    ids = [int(logits.argmax()) for _, logits in sessions]
    begun = pool.capacity
    for _ in range(256):
        logits, expected = static.step(caches, ids), normal.step(twins, ids)
        assert logits.argmax(-1).tolist() == expected.argmax(-1).tolist()
        ids = logits.argmax(-1).tolist()
    assert pool.capacity > begun
    step = static._static
    assert step is not None
    assert 2 <= step.captures <= 8  # once, and again for each new capacity


def test_what_new_memory_holds_is_not_seen():
    """A pool's fresh slots may hold NaN, before the first step and after growing."""
    model = tiny("llama-g4-kv1")
    pool = pool_for(model, "dense", rows=2)
    cache, _ = opened(model, "dense", prompt=30, pool=pool)
    twin = cache.fork()
    static, normal = BatchDecoder(model, pool, static=True), BatchDecoder(model)

    def poison() -> None:
        for plane in (pool.keys, pool.values):
            plane[:, cache.row, :, cache.resident :] = torch.nan
            plane[:, 1 - cache.row] = torch.nan

    poison()
    for at in range(60):
        if pool.capacity - cache.resident == 0:
            pool.make_room(cache.row, 1, headroom=0.5)
            poison()
        assert close(static.step([cache], [at]), normal.step([twin], [at]))


def test_rows_that_are_full_and_not_fed_keep_their_last_token():
    model = tiny("llama-g4-kv1")
    pool = pool_for(model, "dense", rows=2)
    full, _ = opened(model, "dense", prompt=3, pool=pool)
    fed, _ = opened(model, "dense", prompt=3, pool=pool)
    prefill(model, full, random_ids(pool.capacity - 3, seed=1))
    assert full.resident == pool.capacity
    before = facts(full)
    BatchDecoder(model, pool, static=True).step([fed], [1])
    assert facts(full) == before


@pytest.mark.parametrize("place", ["mlp", "head"])
def test_a_pass_that_breaks_off_leaves_every_row_as_it_was(place):
    model = tiny("qwen2-g4-kv2")
    pool = pool_for(model, "nexus", rows=2)
    caches = [opened(model, "nexus", prompt=40 + i, seed=i, pool=pool)[0] for i in range(2)]
    twins = [cache.fork() for cache in caches]
    before = [facts(cache) for cache in caches]
    module = model.lm_head if place == "head" else model.model.layers[1].mlp

    def boom(*_: Any) -> None:
        raise Boom

    decoder = BatchDecoder(model, pool, static=True)
    hook = module.register_forward_pre_hook(boom)
    with pytest.raises(Boom):
        decoder.step(caches, [1, 2])
    hook.remove()
    assert [facts(cache) for cache in caches] == before
    for at in range(20):
        assert close(
            decoder.advance(caches, [at, at]), BatchDecoder(model).advance(twins, [at, at])
        )
    assert all(cache.stats.evictions >= 2 for cache in caches)


def test_heads_that_differ_have_no_static_shapes():
    model = tiny("qwen2-g4-kv2")
    with pytest.raises(ValueError, match="static shapes need a pool"):
        BatchDecoder(model, make_pool(model, CONFIGS["ada-nexus"]), static=True)
    with pytest.raises(ValueError, match="static shapes need a pool"):
        BatchDecoder(model, static=True)


@pytest.mark.parametrize("group", [1, 3])
def test_attention_of_rows_equals_loops_and_the_kernels_arguments_say_the_same(group):
    rows, heads, slots, dim, value_dim = 3, 2, 20, 8, 6
    torch.manual_seed(group)
    query = torch.randn(rows, heads * group, 1, dim)
    keys, values = torch.randn(rows, heads, slots, dim), torch.randn(rows, heads, slots, value_dim)
    counts = torch.tensor([1, 20, 7])
    expected = torch.empty(rows, heads * group, 1, value_dim)
    for row, count in enumerate(counts.tolist()):
        for head in range(heads * group):
            own = keys[row, head // group, :count].double()
            weights = ((own @ query[row, head, 0].double()) * 0.3).softmax(0)
            expected[row, head, 0] = weights @ values[row, head // group, :count].double()
    got = attend_rows(query, keys, values, counts, 0.3)
    assert got.shape == expected.shape
    assert (got - expected).abs().max() < 1e-5
    got = varlen_rows(kernel, query, keys, values, counts, 0.3)
    assert got.shape == expected.shape
    assert (got - expected).abs().max() < 1e-5


def test_which_models_are_captured_as_a_graph(monkeypatch: pytest.MonkeyPatch):
    """On one GPU, with layers of torch's own and nothing that moves tensors between them."""
    assert not can_capture(tiny("llama-g4-kv1"))
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(static_step, "all_devices", lambda model: (gpu,))
    assert can_capture(tiny("llama-g4-kv1"))
    quantised, hooked, stretched = (tiny("llama-g4-kv1") for _ in range(3))
    quantised.hf_quantizer = object()
    hooked.model.layers[1]._hf_hook = object()
    stretched.config.rope_parameters["rope_type"] = "dynamic"
    assert not any(can_capture(model) for model in (quantised, hooked, stretched))
    monkeypatch.setattr(static_step, "all_devices", lambda model: (gpu, torch.device("cuda", 1)))
    assert not can_capture(tiny("llama-g4-kv1"))
