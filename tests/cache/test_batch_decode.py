"""A batch of sessions decodes as each one does alone."""

from __future__ import annotations

import copy
import inspect
import textwrap
from typing import Any

import pytest
import torch
from cache_harness import random_ids, tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from cache import EvictingCache, PoolFull, Sampling, decode, make_pool, prefill, preset
from cache.batch_decode import BatchDecoder
from cache.generate import forward
from cache.support import UnsupportedModel


def tokens(count: int) -> dict[str, Any]:
    return {"kind": "tokens", "tokens": count}


CONFIGS = {
    "nexus": preset("nexus", budget=tokens(47), block_size=8, window=6),
    "dense": preset("dense"),
    "snapkv": preset("snapkv", budget=tokens(40)),
    "h2o": preset("h2o", budget=tokens(30)),
    "ada-nexus": preset("ada-nexus", budget=tokens(64), block_size=8, window=6),
    "seed": preset("nexus", budget=tokens(47), block_size=8, window=6, seed=5),
}
# By group size, one, three and four query heads to a KV head, and by family.
MODELS = ("llama-g1-kv2", "llama-g3-kv2", "qwen2-g4-kv2", "qwen3-g4-kv2")


def opened(
    model: PreTrainedModel, name: str, *, prompt: int, seed: int = 0, pool: Any = None
) -> tuple[EvictingCache, torch.Tensor]:
    cache = EvictingCache(model, CONFIGS[name], pool=pool, record_kept=True)
    return cache, prefill(model, cache, random_ids(prompt, seed=seed), chunk=32)


def facts(cache: EvictingCache) -> tuple[Any, ...]:
    """All that a pass or an eviction may change."""
    state = cache.state()
    content = {name: tensor.tolist() for name, tensor in state.tensors.items()}
    counters = {**state.stats, "eviction_seconds": None}
    return state.seen, state.policy, counters, state.scaling, content


def close(logits: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal up to the order of sums in the linear layers."""
    return bool((logits - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_kept_sets_equal_solo_passes(name):
    """Sessions of all methods at once, in pools of their own, with prompts of different lengths."""
    model = tiny(name)
    starts = [(each, 21 + 17 * i, i) for i, each in enumerate(CONFIGS)]
    batch = [opened(model, each, prompt=n, seed=seed)[0] for each, n, seed in starts]
    alone = [opened(model, each, prompt=n, seed=seed)[0] for each, n, seed in starts]
    fed = [random_ids(80, seed=100 + i) for i in range(len(batch))]
    decoder = BatchDecoder(model)
    for at in range(80):
        logits = decoder.advance(batch, [ids[at] for ids in fed])
        assert logits.shape == (len(batch), model.config.vocab_size)
        assert logits.dtype == torch.float32
        for row, cache, ids in zip(logits, alone, fed, strict=True):
            with torch.inference_mode():
                assert close(row, forward(model, cache, torch.tensor([ids[at]])))
            cache.evict("decode")
    for cache, twin in zip(batch, alone, strict=True):
        assert [r.step for r in cache.stats.records] == [r.step for r in twin.stats.records]
        for one, other in zip(cache.stats.records, twin.stats.records, strict=True):
            assert torch.equal(one.kept, other.kept)
        assert (cache.seen, cache.resident) == (twin.seen, twin.resident)
        assert cache.stats.peak_tokens == twin.stats.peak_tokens
    evictions = {each: cache.stats.evictions for each, cache in zip(CONFIGS, batch, strict=True)}
    assert evictions["dense"] == 0
    assert min(evictions[each] for each in ("nexus", "h2o", "ada-nexus")) >= 7


def test_256_tokens_of_each_are_those_of_its_solo_run():
    model = tiny("qwen2-g4-kv2")
    samplings = [Sampling(0.8 * (i % 2), 0.95, seed=i) for i in range(len(CONFIGS))]
    expected = []
    for i, name in enumerate(CONFIGS):
        cache, logits = opened(model, name, prompt=20 + 9 * i, seed=i)
        steps = decode(model, cache, logits, sampling=samplings[i])
        expected.append([next(steps) for _ in range(256)])
    sessions = [opened(model, name, prompt=20 + 9 * i, seed=i) for i, name in enumerate(CONFIGS)]
    assert sample(BatchDecoder(model), sessions, samplings, 256) == expected


def sample(
    decoder: BatchDecoder,
    sessions: list[tuple[EvictingCache, torch.Tensor]],
    samplings: list[Sampling],
    count: int,
) -> list[list[int]]:
    caches = [cache for cache, _ in sessions]
    logits: Any = [logits for _, logits in sessions]
    drawn: list[list[int]] = [[] for _ in caches]
    for _ in range(count):
        for i, cache in enumerate(caches):
            drawn[i].append(samplings[i].choose(logits[i], position=cache.seen))
        if len(drawn[0]) < count:
            logits = decoder.advance(caches, [ids[-1] for ids in drawn])
    return drawn


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    data=st.data(),
    name=st.sampled_from(MODELS),
    names=st.lists(st.sampled_from(list(CONFIGS)), min_size=2, max_size=4),
)
def test_who_else_is_in_the_batch_changes_nothing(data, name, names):
    """Rows come, go and change places at any step; at a fixed width nothing differs by a bit."""
    model = tiny(name)
    decoder = BatchDecoder(model, width=4)
    sessions: list[tuple[EvictingCache, EvictingCache]] = []
    for i, each in enumerate(names):
        prompt = data.draw(st.integers(1, 60))
        cache, _ = opened(model, each, prompt=prompt, seed=i)
        sessions.append((cache, cache.fork()))
    everyone = list(range(len(sessions)))
    subsets = st.lists(st.sampled_from(everyone), min_size=1, unique=True)
    for at in range(data.draw(st.integers(1, 25))):
        here = data.draw(subsets)
        fed = random_ids(len(here), seed=at)
        logits = decoder.advance([sessions[i][0] for i in here], fed)
        for i, token, row in zip(here, fed, logits, strict=True):
            assert torch.equal(decoder.advance([sessions[i][1]], [token])[0], row)
    for cache, twin in sessions:
        assert facts(cache) == facts(twin)


@pytest.mark.parametrize("name", ["nexus", "dense", "ada-nexus"])
def test_rows_of_one_pool_that_grows_in_mid_batch(name):
    """Room for one row moves the content of all; a row that stays out keeps what it holds."""
    model = tiny("llama-g4-kv1")
    pool = make_pool(model, CONFIGS[name], rows=3)
    mine = [opened(model, name, prompt=9 + i, seed=i, pool=pool)[0] for i in range(3)]
    others = [cache.fork() for cache in mine]
    with pytest.raises(PoolFull):
        mine[0].fork(pool=pool)
    decoder = BatchDecoder(model, pool, width=4)
    alone = BatchDecoder(model, width=4)
    for at in range(120):
        here = [0, 1, 2] if at % 3 else [2, 0]
        fed = random_ids(3, seed=at)
        logits = decoder.advance([mine[i] for i in here], [fed[i] for i in here])
        for row, i in zip(logits, here, strict=True):
            assert torch.equal(alone.advance([others[i]], [fed[i]])[0], row)
    assert all((cache.stats.evictions >= 3) == (name != "dense") for cache in mine)


class Boom(Exception):
    pass


@pytest.mark.parametrize("place", ["first mlp", "last projection", "last mlp", "head"])
def test_a_pass_that_breaks_off_leaves_every_cache_as_it_was(place):
    model = tiny("qwen2-g4-kv2")
    caches = [opened(model, name, prompt=40, seed=i)[0] for i, name in enumerate(CONFIGS)]
    twins = [cache.fork() for cache in caches]
    before = [facts(cache) for cache in caches]
    layers = model.model.layers
    module = {
        "first mlp": layers[0].mlp,
        "last projection": layers[-1].self_attn.o_proj,
        "last mlp": layers[-1].mlp,
        "head": model.lm_head,
    }[place]

    def boom(*_: Any) -> None:
        raise Boom

    decoder = BatchDecoder(model)
    hook = module.register_forward_pre_hook(boom)
    for _ in range(2):
        with pytest.raises(Boom):
            decoder.step(caches, random_ids(len(caches), seed=1))
    hook.remove()
    assert [facts(cache) for cache in caches] == before
    for at in range(12):
        fed = random_ids(len(caches), seed=at)
        assert torch.equal(decoder.advance(caches, fed), decoder.advance(twins, fed))
    assert [facts(cache) for cache in caches] == [facts(cache) for cache in twins]


def test_step_evicts_nothing_and_prefill_goes_on_from_it():
    model = tiny("qwen2-g4-kv2")
    cache, twin = (opened(model, "nexus", prompt=40)[0] for _ in range(2))
    other, _ = opened(model, "h2o", prompt=50)
    decoder = BatchDecoder(model)
    ids = random_ids(30, seed=7)
    for token in ids:
        decoder.step([cache, other], [token, 1])
        with torch.inference_mode():
            forward(model, twin, torch.tensor([token]))
    assert cache.resident == twin.resident > 47
    assert cache.stats.evictions == twin.stats.evictions
    more = random_ids(20, seed=8)
    assert close(prefill(model, cache, more, chunk=7), prefill(model, twin, more, chunk=7))
    assert cache.kept_blocks().tolist() == twin.kept_blocks().tolist()


def test_what_cannot_be_fed_together_is_refused():
    model, stranger = tiny("qwen2-g4-kv2"), tiny("qwen2-g4-kv2")
    pool = make_pool(model, CONFIGS["nexus"], rows=1)
    inside, _ = opened(model, "nexus", prompt=5, pool=pool)
    outside, _ = opened(model, "nexus", prompt=5)
    foreign, _ = opened(stranger, "nexus", prompt=5)
    decoder = BatchDecoder(model)
    with pytest.raises(ValueError, match="0 caches and 0 tokens"):
        decoder.step([], [])
    with pytest.raises(ValueError, match="2 caches and 1 tokens"):
        decoder.step([inside, outside], [1])
    with pytest.raises(ValueError, match="twice"):
        decoder.step([inside, inside], [1, 2])
    with pytest.raises(ValueError, match="another model"):
        decoder.step([inside, foreign], [1, 2])
    with pytest.raises(ValueError, match="another pool"):
        BatchDecoder(model, pool).step([inside, outside], [1, 2])
    with pytest.raises(ValueError, match="2 caches are more than the width of 1"):
        BatchDecoder(model, width=1).step([inside, outside], [1, 2])
    before = facts(inside)
    outside.close()
    with pytest.raises(RuntimeError, match="closed"):
        decoder.step([inside, outside], [1, 2])
    assert facts(inside) == before
    model.set_attn_implementation("sdpa")
    with pytest.raises((RuntimeError, ValueError)):
        decoder.step([inside], [1])
    assert facts(inside) == before


def test_a_rotation_that_depends_on_the_longest_row_is_refused():
    model = copy.deepcopy(tiny("llama-g1-kv2"))
    model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(UnsupportedModel, match="rope_type 'dynamic'"):
        BatchDecoder(model)


@pytest.mark.model
@pytest.mark.parametrize(
    ("sessions", "count"), [(4, 20), pytest.param(8, 256, marks=pytest.mark.slow)]
)
def test_a_real_models_tokens_are_those_of_its_solo_runs(sessions, count):
    from agent.models import load

    loaded = load("smollm2-135m", dtype="float32", device="cpu")
    model = loaded.model
    text = loaded.tokenizer(inspect.getsource(textwrap)).input_ids
    configs = list(CONFIGS.values())[:4]
    made = []
    for i in range(sessions):
        cache = EvictingCache(model, configs[i % len(configs)])
        logits = prefill(model, cache, text[37 * i : 50 * i + 40], chunk=64)
        made.append((cache, logits))
    twins = [(cache.fork(), logits) for cache, logits in made]
    samplings = [Sampling(0.6 * (i % 2), 0.95, seed=i) for i in range(sessions)]
    ids = sample(BatchDecoder(model, width=sessions), made, samplings, count)
    for (cache, logits), sampling, drawn in zip(twins, samplings, ids, strict=True):
        steps = decode(model, cache, logits, sampling=sampling)
        assert [next(steps) for _ in range(count)] == drawn
    assert all(cache.stats.evictions for cache, _ in made if cache.config.method == "h2o")
