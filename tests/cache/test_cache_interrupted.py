"""A forward pass that breaks off leaves the cache as it was."""

from __future__ import annotations

import pytest
import torch
from cache_harness import logits_of, random_ids, tiny
from test_batch_decode import facts, opened

from cache import EvictingCache, Sampling, decode, prefill, preset

SETTINGS = preset("nexus", budget={"kind": "tokens", "tokens": 47}, block_size=8, window=6)
NAME = "qwen2-g4-kv2"


class Boom(Exception):
    pass


def break_at(module):
    def boom(*_):
        raise Boom

    return module.register_forward_pre_hook(boom)


def state(cache):
    valid = cache.resident
    return (
        cache.seen,
        valid,
        cache.stats.evictions,
        cache.kept_blocks().tolist(),
        cache.pool.keys[:, cache.row, :, :valid].tolist(),
        cache.pool.values[:, cache.row, :, :valid].tolist(),
    )


PLACES = {
    "first layer": lambda model: model.model.layers[0],
    "middle layer": lambda model: model.model.layers[2],
    "middle mlp": lambda model: model.model.layers[1].mlp,
    "last layer": lambda model: model.model.layers[-1],
    "last projection": lambda model: model.model.layers[-1].self_attn.q_proj,
}


@pytest.mark.parametrize("count", [1, 5, 40])
@pytest.mark.parametrize("place", PLACES)
def test_cache_is_as_before_and_goes_on_as_if_nothing_happened(place, count):
    model = tiny(NAME)
    cache = EvictingCache(model, SETTINGS, record_kept=True)
    twin_model = tiny(NAME)
    twin = EvictingCache(twin_model, SETTINGS, record_kept=True)
    for each, owner in ((model, cache), (twin_model, twin)):
        prefill(each, owner, random_ids(100, seed=0), chunk=500)

    before = state(cache)
    hook = break_at(PLACES[place](model))
    for attempt in range(2):
        with pytest.raises(Boom):
            logits_of(model, cache, random_ids(count, seed=50 + attempt))
    hook.remove()
    assert state(cache) == before
    # What was kept for scoring is untouched too: the next decision is the undisturbed one.
    for length, seed in ((3, 1), (60, 2)):
        new = random_ids(length, seed=seed)
        assert torch.equal(logits_of(model, cache, new), logits_of(twin_model, twin, new))
        cache.evict("prefill")
        twin.evict("prefill")
    assert state(cache) == state(twin)
    assert cache.stats.evictions == 2


BEHIND = {
    "last mlp": lambda model: model.model.layers[-1].mlp,
    "last norm": lambda model: model.model.norm,
    "head": lambda model: model.lm_head,
}


@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.parametrize("place", BEHIND)
@pytest.mark.parametrize("method", ["nexus", "dense", "h2o", "ada-nexus"])
def test_a_pass_may_break_off_behind_the_last_attention_too(method, place, count):
    """All keys are written and all queries noted by then; none of it may count."""
    model = tiny(NAME)
    cache, logits = opened(model, method, prompt=100)
    twin = cache.fork()
    before = facts(cache)
    hook = break_at(BEHIND[place](model))
    for attempt in range(2):
        with pytest.raises(Boom):
            prefill(model, cache, random_ids(count, seed=50 + attempt))
        with pytest.raises(Boom):
            list(decode(model, cache, logits, sampling=Sampling()))
    hook.remove()
    assert facts(cache) == before
    for seed in (1, 2):
        both = []
        for each in (cache, twin):
            after = prefill(model, each, random_ids(30, seed=seed), chunk=7)
            steps = decode(model, each, after, sampling=Sampling())
            both.append((after.tolist(), [next(steps) for _ in range(9)]))
        assert both[0] == both[1]
    assert facts(cache) == facts(twin)
    assert cache.seen == 100 + 2 * (30 + 8)
    assert (cache.stats.evictions >= 2) == (method != "dense")


def test_eviction_after_a_broken_pass_scores_with_the_old_queries():
    """The broken pass's queries must not be in the window."""
    kept = []
    for broken in (False, True):
        model = tiny(NAME)
        cache = EvictingCache(model, SETTINGS)
        logits_of(model, cache, random_ids(100, seed=0))
        if broken:
            hook = break_at(model.model.layers[2])
            with pytest.raises(Boom):
                logits_of(model, cache, random_ids(9, seed=1))
            hook.remove()
        cache.evict("prefill")
        kept.append(cache.kept_blocks().tolist())
    assert kept[0] == kept[1]
