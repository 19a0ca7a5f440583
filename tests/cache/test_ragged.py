"""Caches whose layers and heads hold different numbers of tokens: as exact as the others.

Kept sets are those of the definitions in plain loops and fractions, logits those of full attention
under the replayed mask, and bytes follow what is held.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import method_oracles
import pytest
import torch
from cache_harness import (
    Run,
    logits_of,
    random_ids,
    replayed,
    run,
    tiny,
    turns_of,
)

from cache import (
    EvictingCache,
    generate,
    load_snapshot,
    make_pool,
    prefill,
    preset,
    save_snapshot,
)

TURNS = [(53, 9), (1, 4), (34, 7)]
MODELS = ["llama-g1-kv2", "llama-g3-kv2", "qwen2-g4-kv2"]
# name: (preset, what is changed)
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "pyramidkv": ("pyramidkv", {"window": 6}),
    "ada-snapkv": ("ada-snapkv", {"window": 6}),
    "ada-pyramidkv": ("ada-pyramidkv", {"window": 6}),
    "ada-nexus": ("ada-nexus", {"window": 6, "block_size": 4, "recent": 8}),
    "h2o-pyramid-blocks": (
        "h2o",
        {
            "layer_budgets": "pyramid",
            "block_size": 4,
            "sinks": 1,
            "recent": 8,
            "recent_share": 0.25,
        },
    ),
    "snapkv-reservoir-adaptive": (
        "snapkv",
        {"window": 6, "selection": "reservoir", "samples": 2, "head_budgets": "adaptive"},
    ),
    "nexus-pyramid": (
        "nexus",
        {"window": 6, "block_size": 4, "recent": 8, "layer_budgets": "pyramid"},
    ),
}
PYRAMIDS = [name for name in SETTINGS if "pyramid" in name]
ADAPTIVE = [name for name in SETTINGS if "ada" in name]


def config_of(name: str, **changes: Any) -> Any:
    base, own = SETTINGS[name]
    fixed = {"budget": {"kind": "tokens", "tokens": 32}, "scope": "prefill+decode", "seed": 3}
    return preset(base, **{**fixed, **own, **changes})


def uniform_of(name: str, **changes: Any) -> Any:
    return config_of(name, layer_budgets="uniform", head_budgets="uniform", **changes)


def lengths_of(result: Run) -> torch.Tensor:
    """Tokens that each layer and head must hold, from the last kept sets and what came since."""
    size, seen = result.cache.config.block_size, len(result.ids)
    last = result.records[-1]
    held = [
        [sum(min((block + 1) * size, last.seen) - block * size for block in head) for head in layer]
        for layer in result.kept[-1]
    ]
    return torch.tensor(held) + seen - last.seen


def assert_as_defined(model_name: str, config: Any, *, chunk: int = 16, **changes: Any) -> Run:
    pins = changes.get("pins", ())
    result = run(tiny(model_name), config, turns_of(*TURNS), chunk=chunk, **changes)
    logits, captured = replayed(tiny(model_name), result)
    assert len(result.records) >= 2
    torch.testing.assert_close(result.logits, logits, atol=1e-4, rtol=0)
    assert result.kept == method_oracles.expected_kept(result, captured, pins=pins)
    assert torch.equal(result.cache.lengths, lengths_of(result))
    assert result.cache.lengths.double().mean() == result.cache.resident
    return result


def spread(result: Run, axis: str) -> int:
    """Largest difference in blocks kept between layers, or between heads of a layer."""
    most = 0
    for kept in result.kept:
        sizes = torch.tensor([[len(head) for head in layer] for layer in kept])
        over = sizes.sum(1) if axis == "layers" else sizes.T
        most = max(most, int((over.amax(0) - over.amin(0)).max()))
    return most


@pytest.mark.parametrize("model_name", MODELS)
@pytest.mark.parametrize("name", SETTINGS)
def test_kept_sets_and_logits(name: str, model_name: str) -> None:
    result = assert_as_defined(model_name, config_of(name))
    assert {record.phase for record in result.records} == {"prefill", "decode"}
    assert (spread(result, "layers") > 2) == (name in PYRAMIDS)
    assert (spread(result, "heads") > 0) == (name in ADAPTIVE)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("prefill_eviction", ["end", "chunk"])
@pytest.mark.parametrize(("scope", "chunk"), [("prefill", 5), ("prefill+decode", 64)])
def test_scopes_and_chunks(name: str, scope: str, prefill_eviction: str, chunk: int) -> None:
    config = config_of(name, scope=scope, prefill_eviction=prefill_eviction)
    assert_as_defined("llama-g3-kv2", config, chunk=chunk)


@pytest.mark.parametrize(
    ("name", "model_name", "changes"),
    [
        ("ada-pyramidkv", "llama-g4-kv1", {}),  # one KV head: nobody to share with
        ("ada-pyramidkv", "llama-one-layer", {}),
        ("ada-nexus", "qwen2-g1-kv1", {"samples": 1}),
        ("pyramidkv", "qwen3-g4-kv2", {"pyramid_beta": 1.5, "block_size": 4}),
        ("pyramidkv", "qwen2-g4-kv2", {"pyramid_beta": 1}),
        ("pyramidkv", "llama-g3-kv2", {"budget": {"kind": "tokens", "tokens": 50}}),  # hits the cap
        ("ada-snapkv", "qwen3-g4-kv2", {"head_floor": 0.0}),
        ("ada-snapkv", "qwen3-g4-kv2", {"head_floor": 1.0}),
        ("ada-snapkv", "qwen2-g4-kv2", {"head_normalize": True, "pooling": "avg"}),
        ("ada-snapkv", "qwen2-g4-kv2", {"block_size": 4, "sinks": 2, "group": "max"}),
        ("ada-nexus", "qwen3-g4-kv2", {"head_floor": 0.0, "selection": "top_k"}),
        ("ada-nexus", "llama-g3-kv2", {"block_size": 1, "layer_budgets": "pyramid"}),
        (
            "ada-pyramidkv",
            "qwen2-g4-kv2",
            {"budget": {"kind": "density", "density": 0.4, "min_free": 2}},
        ),
        (
            "ada-nexus",
            "llama-g1-kv2",
            {"budget": {"kind": "density", "density": 0.5, "density_base": "present"}},
        ),
    ],
)
def test_options(name: str, model_name: str, changes: dict[str, Any]) -> None:
    assert_as_defined(model_name, config_of(name, **changes))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("morphkv", {"window": 6, "head_budgets": "adaptive"}),
        ("morphkv", {"window": 6, "fuse": "max", "layer_budgets": "pyramid", "block_size": 4}),
        ("h2o", {"recent": 4, "head_budgets": "adaptive"}),
        ("h2o", {"recent_share": 0.3, "recent": 2, "layer_budgets": "pyramid"}),
        ("streaming_llm", {"sinks": 2, "layer_budgets": "pyramid"}),
    ],
)
def test_other_methods(name: str, changes: dict[str, Any]) -> None:
    budget = {"kind": "tokens", "tokens": 32}
    config = preset(name, **{"budget": budget, "scope": "prefill+decode", **changes})
    result = assert_as_defined("llama-g3-kv2", config)
    axis = "layers" if "layer_budgets" in changes else "heads"
    assert spread(result, axis) > 0


@pytest.mark.parametrize("length", [1, 2, 9, 40])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_layers_of_unequal_lengths(length: int, implementation: str) -> None:
    """One mask cannot serve layers of unequal lengths: elsewhere several queries crash (fault 2).

    Whatever attention the model was loaded with, for one query and for several.
    """
    name, config = "llama-g3-kv2", config_of("ada-pyramidkv")
    model = tiny(name)
    model.set_attn_implementation(implementation)
    result = run(model, config, turns_of((60, 0)), chunk=60)
    held = result.cache.lengths
    assert held.sum(1).unique().numel() == 3
    assert int((held[:, 0] != held[:, 1]).sum()) > 0
    ids = random_ids(length, seed=5)
    result.logits = torch.cat([result.logits, logits_of(model, result.cache, ids)])
    result.ids += ids
    logits, _ = replayed(tiny(name), result)
    torch.testing.assert_close(result.logits, logits, atol=1e-4, rtol=0)
    assert torch.equal(result.cache.lengths, held + length)


def test_exact_to_the_last_bits_in_float64() -> None:
    for name in ("ada-pyramidkv", "ada-nexus"):
        config = config_of(name, prefill_eviction="chunk")
        model_name = "llama-g3-kv2"
        result = run(tiny(model_name).double(), config, turns_of(*TURNS, seed=5), chunk=9)
        logits, _ = replayed(tiny(model_name).double(), result)
        assert (result.logits - logits).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["ada-pyramidkv", "ada-nexus", "h2o-pyramid-blocks"])
def test_pins_stay_in_every_head(name: str) -> None:
    pins = [(9, 14), (30, 31)]
    config = config_of(name, budget={"kind": "tokens", "tokens": 44})
    result = assert_as_defined("llama-g3-kv2", config, pins=pins)
    size = config.block_size
    pinned = {token // size for start, stop in pins for token in range(start, stop)}
    for kept in result.kept:
        assert all(pinned <= set(head) for layer in kept for head in layer)
    with pytest.raises(ValueError, match="cannot be pinned"):
        result.cache.pin(15, 25)


# --- bytes --------------------------------------------------------------------------------------


def tensor_bytes(cache: EvictingCache) -> int:
    """Bytes of all storages that the cache can reach, each counted once."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    todo: list[Any] = [cache]
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, type | torch.nn.Module):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
            continue
        todo += thing.values() if isinstance(thing, dict) else []
        todo += thing if isinstance(thing, list | tuple | set) else []
        todo += vars(thing).values() if hasattr(thing, "__dict__") else []
        todo += [getattr(thing, slot) for slot in getattr(type(thing), "__slots__", ())]
    return sum(found.values())


def talk(cache: EvictingCache, model: Any, turns: int) -> list[int]:
    sizes, unfed = [], list[int]()
    for turn in range(turns):
        length = 50 + (turn * 13) % 60  # always more than the budget
        said = generate(
            model, unfed + random_ids(length, seed=turn), cache, max_new_tokens=9, chunk=32
        )
        unfed = said[-1:]
        sizes.append(cache.nbytes)
    return sizes


@pytest.mark.parametrize("prefill_eviction", ["end", "chunk"])
@pytest.mark.parametrize("name", ["ada-snapkv", "ada-pyramidkv", "h2o-pyramid-blocks"])
def test_bytes_are_those_of_a_uniform_cache_and_stay(name: str, prefill_eviction: str) -> None:
    """Same budget, same memory: nothing is padded to the longest head.

    Slack: a layer's buffer is replaced only when it is a quarter larger than needed, so that a cut
    per block does not allocate; beside it each head has an index of 8 bytes.
    """
    changes: dict[str, Any] = {
        "prefill_eviction": prefill_eviction,
        "block_size": 4,
        "budget": {"kind": "tokens", "tokens": 96},
    }
    model = tiny("qwen2-g4-kv2")
    ragged = EvictingCache(model, config_of(name, **changes))
    uniform = EvictingCache(model, uniform_of(name, **changes))
    sizes, plain = talk(ragged, model, 20), talk(uniform, model, 20)
    assert ragged.stats.evictions > 40
    assert len(set(plain[2:])) == 1
    assert max(sizes[2:]) <= 1.25 * plain[-1]
    assert max(sizes[11:]) <= max(sizes[2:11]), "still growing"
    assert 0 <= tensor_bytes(ragged) - ragged.nbytes <= 8 * ragged.lengths.numel()
    assert ragged.stats.peak_tokens == uniform.stats.peak_tokens
    assert ragged.peak_bytes >= max(sizes)
    assert ragged.resident <= 96 + 4
    held = ragged.lengths
    assert int(held.amax() - held.amin()) >= 4
    if name in PYRAMIDS:  # as much for every head as for the longest one would be more
        width = model.config.hidden_size // model.config.num_attention_heads
        assert ragged.nbytes < held.numel() * int(held.amax()) * 2 * 4 * width


@pytest.mark.parametrize("name", SETTINGS)
def test_bytes_fall_with_the_cut(name: str) -> None:
    model = tiny("qwen2-g4-kv2")
    cache = EvictingCache(model, config_of(name))
    prefill(model, cache, random_ids(600, seed=1), chunk=100)
    assert cache.stats.peak_tokens == 600
    slots = 2 * 4 * 4 * 600 * cache.lengths.numel()  # keys and values of 4 floats
    assert cache.peak_bytes >= slots
    assert cache.nbytes < slots / 6
    assert int(cache.lengths.sum()) == 32 * cache.lengths.numel()


# --- life ---------------------------------------------------------------------------------------


def started(name: str, model: Any, **changes: Any) -> EvictingCache:
    cache = EvictingCache(model, config_of(name, **changes))
    cache.pin(8, 10)
    generate(model, random_ids(50, seed=1), cache, max_new_tokens=9, chunk=16)
    assert cache.stats.evictions > 0
    return cache


def go_on(cache: EvictingCache, model: Any) -> tuple[list[int], list[Any], list[Any]]:
    """What it says, and what it keeps and scores while it does."""
    ids = generate(model, random_ids(21, seed=2), cache, max_new_tokens=14, chunk=16)
    logits = logits_of(model, cache, random_ids(3, seed=3))
    return ids, logits.tolist(), [cache.kept_blocks().tolist(), cache.lengths.tolist()]


@pytest.mark.parametrize("budget", ["tokens", "density"])
@pytest.mark.parametrize("name", SETTINGS)
def test_copies_go_on_with_the_same_ids(name: str, budget: str, tmp_path: Path) -> None:
    model = tiny("llama-g3-kv2")
    changes: dict[str, Any] = {}
    if budget == "density":
        changes["budget"] = {"kind": "density", "density": 0.5, "density_base": "first_prompt"}
    cache = started(name, model, **changes)
    twin = cache.fork()
    generate(model, random_ids(40, seed=9), twin, max_new_tokens=5, chunk=8)  # elsewhere
    twin.close()
    other = cache.fork()
    save_snapshot(cache, tmp_path / "cache.st")
    loaded = load_snapshot(tmp_path / "cache.st", model)
    expected = go_on(started(name, model, **changes), model)
    assert go_on(cache, model) == expected
    assert go_on(other, model) == expected
    assert go_on(loaded, model) == expected


def test_a_copy_shares_no_memory() -> None:
    cache = started("ada-nexus", tiny("llama-g3-kv2"))
    twin = cache.fork()
    mine, others = cache.pool, twin.pool
    before = twin.state()
    kept = {name: tensor.clone() for name, tensor in before.tensors.items()}
    logits_of(cache._model, cache, random_ids(30, seed=4))
    cache.evict("prefill")
    assert mine is not others
    for name, tensor in twin.state().tensors.items():
        assert torch.equal(tensor, kept[name]), name


def test_sessions_of_one_pool_do_not_see_each_other() -> None:
    """Nothing of one session may leak into another (fault 9), and rows come back empty."""
    settings = config_of("ada-pyramidkv", prefill_eviction="chunk")
    name = "llama-g3-kv2"
    alone = run(tiny(name), settings, turns_of(*TURNS), chunk=20)
    model = tiny(name)
    pool = make_pool(model, settings, rows=2)
    other = EvictingCache(model, settings, pool=pool)
    stream = iter(random_ids(10_000, seed=99))

    def disturb(cache: EvictingCache, phase: str) -> None:
        logits_of(model, other, [next(stream) for _ in range(7)])
        other.evict("prefill")

    beside = run(model, settings, turns_of(*TURNS), chunk=20, pool=pool, after_pass=disturb)
    assert other.stats.evictions > 5
    assert beside.kept == alone.kept
    assert (beside.logits - alone.logits).abs().max() < 1e-5
    held = pool.nbytes
    other.close()
    assert pool.nbytes < held
    with pytest.raises(RuntimeError, match="closed"):
        logits_of(model, other, [1])
    fresh = run(model, settings, turns_of(*TURNS), chunk=20, pool=pool)
    assert fresh.kept == alone.kept
    assert torch.equal(fresh.logits, beside.logits)


@pytest.mark.parametrize("name", SETTINGS)
def test_reset_is_as_good_as_new(name: str) -> None:
    model = tiny("llama-g3-kv2")
    cache = started(name, model)
    cache.reset()
    assert (cache.seen, cache.resident, cache.stats.evictions) == (0, 0, 0)
    assert int(cache.lengths.abs().sum()) == 0
    fresh = EvictingCache(model, config_of(name))
    ids = random_ids(77, seed=6)
    assert torch.equal(prefill(model, cache, ids), prefill(model, fresh, ids))
    assert torch.equal(cache.kept_blocks(), fresh.kept_blocks())


class Boom(Exception):
    pass


@pytest.mark.parametrize("count", [1, 5, 40])
@pytest.mark.parametrize("name", ["ada-pyramidkv", "ada-nexus", "h2o-pyramid-blocks"])
def test_a_pass_that_breaks_off_leaves_it_as_it_was(name: str, count: int) -> None:
    model = tiny("llama-g3-kv2")
    cache = started(name, model)
    twin = cache.fork()

    def content(cache: EvictingCache) -> list[Any]:
        state = cache.state()
        tensors = {key: tensor.tolist() for key, tensor in state.tensors.items()}
        return [tensors, state.seen, state.stats["evictions"], cache.lengths.tolist()]

    before = content(cache)

    def boom(*_: Any) -> None:
        raise Boom

    for place in (model.model.layers[0], model.model.layers[1].mlp, model.model.layers[2]):
        hook = place.register_forward_pre_hook(boom)
        with pytest.raises(Boom):
            logits_of(model, cache, random_ids(count, seed=50))
        hook.remove()
        assert content(cache) == before
    # What was kept for scoring is untouched too: the next decisions are the undisturbed ones.
    for length, seed in ((3, 1), (60, 2)):
        ids = random_ids(length, seed=seed)
        assert torch.equal(logits_of(model, cache, ids), logits_of(model, twin, ids))
        cache.evict("prefill")
        twin.evict("prefill")
    assert content(cache) == content(twin)


def test_one_decision_per_layer_is_refused_where_heads_differ() -> None:
    for heads in ("layer_mean", "layer_attention"):
        with pytest.raises(ValueError, match=rf"(?s)adaptive.*{heads}|{heads}.*adaptive"):
            preset("ada-nexus", heads=heads)
