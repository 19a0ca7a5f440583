"""Against transformers itself: dense equals DynamicCache, positions go on, nothing is fed twice."""

from __future__ import annotations

import accelerate
import pytest
import torch
from cache_harness import (
    VOCABULARY,
    cache_argument,
    logits_of,
    random_ids,
    replayed,
    run,
    tiny,
    turns_of,
)
from transformers import DynamicCache

from cache import EvictingCache, Sampling, decode, generate, prefill, preset, replay

MODELS = ["llama-g1-kv2", "llama-g4-kv1", "qwen2-g4-kv2", "qwen3-g4-kv2"]
UNLIMITED = [
    preset("dense"),
    preset("nexus", budget={"kind": "tokens", "tokens": 100_000}, block_size=8),
    # A density fixes what stays while a turn decodes: unlimited only under scope prefill.
    preset("nexus", budget={"kind": "density", "density": 1.0}, block_size=8, scope="prefill"),
]
TIGHT = preset("nexus", budget={"kind": "tokens", "tokens": 47}, block_size=8, window=6)


def greedy_reference(model, ids: list[int], count: int) -> list[int]:
    """transformers' own greedy continuation with its own cache."""
    out = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=count,
        pad_token_id=0,
    )
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize("settings", UNLIMITED, ids=["dense", "tokens", "density"])
@pytest.mark.parametrize("name", MODELS)
def test_an_unlimited_budget_is_dynamic_cache(name, settings):
    reference, cache = tiny(name), DynamicCache()
    result = run(tiny(name), settings, turns_of((61, 5), (50, 4)), chunk=20)
    expected = logits_of(reference, cache, result.ids)
    assert (result.logits - expected).abs().max() < 1e-4
    assert result.cache.stats.evictions == 0  # and it says so (fault 16)
    assert result.cache.resident == result.cache.seen == len(result.ids)


@pytest.mark.parametrize("settings", UNLIMITED, ids=["dense", "tokens", "density"])
@pytest.mark.parametrize("name", MODELS)
def test_an_unlimited_budget_gives_transformers_greedy_ids_over_three_turns(name, settings):
    model = tiny(name)
    cache = EvictingCache(model, settings)
    history, unfed = [], []
    for turn in range(3):
        new = random_ids(30 + 7 * turn, seed=turn)
        history += new
        reply = generate(model, unfed + new, cache, max_new_tokens=12, chunk=16)
        assert reply == greedy_reference(tiny(name), history, 12)
        history += reply
        unfed = reply[-1:]
        assert cache.seen == len(history) - 1


def test_tight_budgets_count_their_evictions_and_say_what_left():
    """A wrapper that never evicts must not pass for one that does (fault 16)."""
    model = tiny("qwen2-g4-kv2")
    cache = EvictingCache(model, TIGHT, record_kept=True)
    generate(model, random_ids(100, seed=0), cache, max_new_tokens=30)
    assert cache.stats.evictions == len(cache.stats.records) > 1
    assert cache.stats.evicted_tokens == cache.seen - cache.resident > 50
    assert cache.kept_blocks().shape == (4, 2, cache.blocks)


def test_positions_go_on_from_tokens_seen():
    """Shrunk caches of others restart at their length (fault 1)."""
    model = tiny("llama-g4-kv1")
    cache = EvictingCache(model, TIGHT)
    prefill(model, cache, random_ids(100, seed=0))
    assert cache.resident == 4 * 8 + 4
    assert cache.get_seq_length() == cache.seen == 100
    assert cache.get_query_offset() == cache.resident
    assert cache.get_mask_sizes(7) == (cache.resident + 7, 0)

    positions = []
    model.model.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: positions.append(kwargs["position_ids"].flatten().tolist()),
        with_kwargs=True,
    )
    logits_of(model, cache, random_ids(3, seed=1))
    assert positions == [[100, 101, 102]]


def test_prefill_and_decode_do_what_single_passes_with_evict_do():
    """The library's own loop against the plain one of the harness, ids, logits and kept sets."""
    name = "qwen3-g4-kv2"
    turns = turns_of((90, 0), (70, 0), seed=3)
    model = tiny(name)
    cache = EvictingCache(model, TIGHT, record_kept=True)
    logits, replies = [], []
    for turn in turns:
        logits.append(prefill(model, cache, turn.fed, chunk=32))
        steps = decode(model, cache, logits[-1], sampling=Sampling())
        turn.decoded = [next(steps) for _ in range(20)]
        replies.append(turn.decoded)
        # The last sampled id has not been fed: it opens the next turn.
        turn.decoded = turn.decoded[:-1]
        assert cache.seen == sum(len(t.fed) + len(t.decoded) for t in turns[: len(replies)])
    plain = run(tiny(name), TIGHT, turns, chunk=32)
    assert plain.kept == [record.kept.tolist() for record in cache.stats.records]
    ends = [90 - 1, 90 + 19 + 70 - 1]
    for own, end, reply in zip(logits, ends, replies, strict=True):
        assert (own - plain.logits[end]).abs().max() < 1e-5
        assert plain.logits[end : end + 20].argmax(-1).tolist() == reply


@pytest.mark.parametrize("offloaded", [False, True])
def test_what_was_sampled_once_is_fed_again_with_its_evictions(offloaded, tmp_path):
    """Also where the weights are elsewhere until they are needed: ids go where they compute."""
    model = tiny("qwen3-g4-kv2")
    if offloaded:
        devices = {"model.embed_tokens": "disk", "model.layers": "disk", "model.norm": "cpu"}
        devices |= {"model.rotary_emb": "cpu", "lm_head": "disk"}
        model = accelerate.dispatch_model(model, devices, main_device="cpu", offload_dir=tmp_path)
        assert model.device.type == "meta"
    cache = EvictingCache(model, TIGHT)
    logits = prefill(model, cache, random_ids(90, seed=4), chunk=32)
    twin, told = cache.fork(), []
    steps = decode(model, cache, logits, sampling=Sampling(0.9, seed=4))
    ids = [next(steps) for _ in range(40)]
    replay(model, twin, ids[:-1], on_token=told.append)
    assert told == list(range(1, 40))
    assert (twin.seen, twin.stats.evictions) == (cache.seen, cache.stats.evictions) == (129, 5)
    mine, theirs = twin.state(), cache.state()
    assert mine.policy == theirs.policy
    assert all(torch.equal(mine.tensors[name], theirs.tensors[name]) for name in theirs.tensors)


def test_prefill_names_what_is_wrong():
    model = tiny("llama-g4-kv1")
    cache = EvictingCache(model, TIGHT)
    with pytest.raises(ValueError, match="no new ids"):
        prefill(model, cache, [])
    with pytest.raises(ValueError, match="at least one token, not 0"):
        prefill(model, cache, [1], chunk=0)


def test_stop_ids_end_a_reply_and_are_part_of_it():
    model = tiny("llama-g4-kv1")
    ids = random_ids(40, seed=8)
    free = generate(model, ids, EvictingCache(model, TIGHT), max_new_tokens=20)
    stop = free[7]
    reply = generate(
        model, ids, EvictingCache(model, TIGHT), max_new_tokens=20, stop_ids=frozenset({stop})
    )
    assert reply == free[: free.index(stop) + 1]


@pytest.mark.parametrize("fed_by", ["prefill", "forward"])
def test_transformers_generate_goes_on_from_an_evicted_cache(fed_by):
    """generate() on a cut DynamicCache feeds seen tokens again (fault 1); here only new ones."""
    name = "qwen2-g4-kv2"
    model = tiny(name)
    cache = EvictingCache(model, TIGHT, record_kept=True)
    ids = random_ids(100, seed=5)
    if fed_by == "prefill":
        prefill(model, cache, ids)
    else:
        logits_of(model, cache, ids)
        cache.evict("prefill")
    assert cache.stats.evictions == 1
    resident = cache.resident

    fed = []
    model.get_input_embeddings().register_forward_pre_hook(
        lambda module, args: fed.extend(args[0].flatten().tolist())
    )
    new = random_ids(8, seed=6)
    out = model.generate(
        torch.tensor([ids + new]),
        attention_mask=torch.ones(1, 108, dtype=torch.long),
        do_sample=False,
        max_new_tokens=6,
        pad_token_id=0,
        **cache_argument(model, cache),
    )[0].tolist()
    assert fed == out[100:-1]
    assert cache.seen == len(out) - 1
    assert cache.resident == resident + 13

    # And what it generated is what the replayed oracle says.
    class Fed:
        records = cache.stats.records
        ids = out

    Fed.cache = cache
    expected, _ = replayed(tiny(name), Fed)
    assert expected[107:-1].argmax(-1).tolist() == out[108:]


def test_a_cache_filled_in_inference_mode_can_be_used_outside_and_back():
    name = "llama-g1-kv2"
    model = tiny(name)
    cache = EvictingCache(model, TIGHT)
    ids = random_ids(130, seed=5)
    with torch.inference_mode():
        first = logits_of(model, cache, ids[:60])
        cache.evict("prefill")
    with torch.no_grad():
        second = logits_of(model, cache, ids[60:130])
        cache.evict("prefill")
    with torch.inference_mode():
        third = logits_of(model, cache, ids[:9])
        cache.evict("prefill")
    again = tiny(name)
    plain = EvictingCache(again, TIGHT)
    for part, expected in ((ids[:60], first), (ids[60:], second), (ids[:9], third)):
        assert torch.equal(logits_of(again, plain, part), expected)
        plain.evict("prefill")


def test_a_batch_and_beams_are_refused_by_name():
    model = tiny("llama-g4-kv1")
    cache = EvictingCache(model, TIGHT)
    with pytest.raises(ValueError, match="batch of 2"), torch.no_grad():
        model(torch.tensor([[1, 2], [3, 4]]), use_cache=True, **cache_argument(model, cache))
    with pytest.raises(NotImplementedError, match="cropped"):
        cache.crop(3)
    with pytest.raises(NotImplementedError, match="one sequence"):
        cache.reorder_cache(torch.tensor([0]))
    assert cache.seen == 0


def test_other_models_keep_their_attention():
    """Attaching is per model: nothing global changes."""
    other = tiny("llama-g4-kv1")
    before = logits_of(other, DynamicCache(), random_ids(20, seed=0))
    EvictingCache(tiny("llama-g4-kv1"), TIGHT)
    assert other.config._attn_implementation == "eager"
    assert torch.equal(before, logits_of(other, DynamicCache(), random_ids(20, seed=0)))
    assert before.shape == (20, VOCABULARY)
