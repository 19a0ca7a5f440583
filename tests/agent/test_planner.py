"""What fits, held against pools and models that are really there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from model_fakes import write_tiny_gguf
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config
from typer.testing import CliRunner

from agent import doctor, hub, planner
from agent.attempt import cache_config, token_budget
from agent.int8_linear import quantize_linears
from agent.load_options import read_quantization, weight_bits
from agent.model_convert import load_gguf_tokenizer
from agent.models import config_of, resolve
from agent.planner import GIB, Room, bytes_per_token, cache_bytes, plan, tokens_in
from agent.run_command import _budget_words
from agent.run_options import OptionError, RunOptions, parse_options
from agent.weight_sizes import int8_weights, weights_of
from cache import EvictingCache, decode, make_pool, prefill, preset, preset_names
from cache.config import EvictingConfig, TokenBudget
from cache.ragged_store import SPARE
from cache.sampling import Sampling

EVICTING = [name for name in preset_names() if name != "dense" and not name.endswith("-paper")]


def tiny(**changes: Any) -> PreTrainedModel:
    torch.manual_seed(2)
    shape = {
        "vocab_size": 260,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }
    config = Qwen3Config(**{**shape, **changes})
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXUS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The tiny model as a folder, as from the hub."""
    where = tmp_path / "my-qwen"
    tiny().save_pretrained(where)
    load_gguf_tokenizer(write_tiny_gguf(tmp_path / "t.gguf")).save_pretrained(where)
    return where


def asked(model: Path | str, **changes: Any) -> RunOptions:
    values = {"instance": "any", "model": str(model), "dtype": "float32", "device": "cpu"}
    return parse_options({**values, **changes})


def ran(model: PreTrainedModel, config: EvictingConfig, chunk: int) -> list[int]:
    """Bytes held after each forward pass and its eviction."""
    cache, held = EvictingCache(model, config), []
    ids = torch.randint(260, (500,), generator=torch.Generator().manual_seed(1)).tolist()
    for _ in range(2):
        logits = prefill(
            model, cache, ids, chunk=chunk, on_chunk=lambda _: held.append(cache.nbytes)
        )
        replies = decode(model, cache, logits, sampling=Sampling(temperature=1.0))
        for _ in range(40):
            next(replies)
            held.append(cache.nbytes)
    assert cache.stats.evictions > 5
    return held


# -- bytes of caches -----------------------------------------------------------------------------


def test_bytes_of_a_token_are_those_of_a_pool() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny(num_key_value_heads=1, head_dim=24).to(dtype)
        pool = make_pool(model, preset("dense", block_size=8))
        pool.make_room(pool.take(), 80)
        assert pool.keys.nbytes + pool.values.nbytes == 80 * bytes_per_token(model.config, dtype)
    assert bytes_per_token(tiny().config, torch.float32) == 2 * 3 * 2 * 16 * 4


@pytest.mark.parametrize("name", EVICTING)
def test_a_budget_in_bytes_holds_throughout(name: str) -> None:
    model, size, chunk = tiny(), 300_000, 48
    config = preset(name, block_size=8, prefill_eviction="chunk")
    assert isinstance(config, EvictingConfig)
    tokens = tokens_in(size, model.config, torch.float32, config, chunk, reply=40)
    config = config.model_copy(update={"budget": TokenBudget(tokens=tokens)})
    held = ran(model, config, chunk)
    promised = cache_bytes(model.config, torch.float32, config, chunk, reply=40)
    assert max(held) <= promised <= size
    # Ragged pools may hold on to a quarter more than they need; what is promised counts that.
    # Where a reply is not cut, it may grow by a quarter beyond what it needs.
    exact = not config.ragged and config.scope != "prefill"
    assert max(held) > (0.97 if exact else 0.5) * size
    more = config.model_copy(update={"budget": TokenBudget(tokens=tokens + 8)})
    assert cache_bytes(model.config, torch.float32, more, chunk, reply=40) > size


def test_ragged_buffers_that_are_not_given_back_are_counted() -> None:
    """Layers that keep a little less than the mean hold on to their first buffers."""
    model, chunk = tiny(), 8
    budget = TokenBudget(tokens=160).model_dump()
    config = preset(
        "pyramidkv", block_size=8, pyramid_beta=1.4, budget=budget, prefill_eviction="chunk",
        scope="prefill+decode",
    )  # fmt: skip
    assert isinstance(config, EvictingConfig)
    promised = cache_bytes(model.config, torch.float32, config, chunk)
    assert promised / (1 + SPARE) < max(ran(model, config, chunk)) <= promised


def test_bytes_of_an_even_cache_are_exact() -> None:
    model = tiny()
    for name in ("nexus", "h2o", "streaming_llm"):
        config = preset(name, budget=TokenBudget(tokens=128).model_dump(), prefill_eviction="chunk")
        assert isinstance(config, EvictingConfig)
        assert max(ran(model, config, 32)) == cache_bytes(model.config, torch.float32, config, 32)


def test_nothing_fits_in_nothing() -> None:
    config = preset("nexus")
    assert isinstance(config, EvictingConfig)
    assert tokens_in(1000, tiny().config, torch.float32, config, 256) == 0
    share = preset("nexus", budget={"kind": "density", "density": 0.2})
    assert isinstance(share, EvictingConfig)
    with pytest.raises(ValueError, match="density"):
        cache_bytes(tiny().config, torch.float32, share, 256)


# -- --cache-gib ---------------------------------------------------------------------------------


def test_cache_gib_becomes_tokens_of_the_model(folder: Path) -> None:
    gib = 300_000 / GIB
    reply = ("limits.new_tokens=40",)
    config = cache_config(
        asked(folder, cache_gib=gib, chunk=64, method="snapkv", overrides=reply), 0
    )
    tokens = token_budget(config)
    assert isinstance(config, EvictingConfig)
    assert tokens is not None
    assert _budget_words(config, 0.5) == f"a budget of {tokens:,} tokens (0.5 GiB)"
    assert 128 < tokens < 300_000 // bytes_per_token(tiny().config, torch.float32)
    assert max(ran(tiny(), config, 64)) <= 300_000
    # Half the bytes a token, nearly twice the tokens.
    halves = token_budget(cache_config(asked(folder, cache_gib=gib, dtype="bfloat16", chunk=64), 0))
    own = token_budget(cache_config(asked(folder, cache_gib=gib, chunk=64), 0))
    assert own is not None
    assert halves is not None
    assert 1.8 * own < halves < 2.6 * own


def test_cache_gib_reckons_with_what_is_overridden(folder: Path) -> None:
    sizes = [
        token_budget(cache_config(asked(folder, cache_gib=0.0004, overrides=more), 0))
        for more in ((), ("cache.window=64",))
    ]
    assert sizes[0] is not None
    assert sizes[1] is not None
    assert sizes[1] < sizes[0]


def test_too_small_a_size_says_what_would_do(folder: Path) -> None:
    with pytest.raises(OptionError, match=r"give at least (0\.\d+)") as caught:
        cache_config(asked(folder, cache_gib=1e-5), 0)
    assert "--cache-gib 1e-05 holds 0 tokens of my-qwen" in str(caught.value)
    enough = float(str(caught.value).rpartition(" ")[2])
    assert token_budget(cache_config(asked(folder, cache_gib=enough), 0))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"budget": 512}, "not with --budget"),
        ({"density": 0.5}, "not with --budget or --density"),
        ({"method": "dense"}, "dense evicts nothing"),
        ({"cache_gib": 0}, "cache-gib"),
    ],
)
def test_what_does_not_go_with_a_size_in_bytes(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        parse_options({"instance": "any", "cache_gib": 1.0, **changes})


# -- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_those_of_the_model(tied: bool, dtype: torch.dtype) -> None:
    model = tiny(tie_word_embeddings=tied).to(dtype)
    found = weights_of(model.config, dtype)
    real = sum(parameter.nbytes for parameter in model.parameters())
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert found.size - real == pytest.approx(buffers, abs=256)
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert found.exact


@pytest.mark.parametrize("tied", [True, False])
def test_int8_weights_are_those_of_the_layers(tied: bool) -> None:
    model = tiny(tie_word_embeddings=tied).float()
    found = int8_weights(model.config)
    quantize_linears(model)
    tensors = {t.data_ptr(): t.nbytes for t in [*model.parameters(), *model.buffers()]}
    assert found.size == pytest.approx(sum(tensors.values()), abs=256)


GROUP = {"weights": {"num_bits": 4, "type": "int"}, "targets": ["Linear"]}


@pytest.mark.parametrize(
    ("config", "bits"),
    [
        (read_quantization("4bit"), 4),
        (read_quantization("8bit"), 8),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, 3),
        ({"quant_method": "quanto", "weights": "int4"}, 4),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": GROUP}}, 4),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnly"}}}, 8),
        ({"quant_method": "something-new"}, None),
    ],
)  # fmt: skip
def test_bits_of_a_quantization_config(config: dict[str, Any], bits: float | None) -> None:
    assert weight_bits(config) == bits
    whole = weights_of(tiny().config, torch.bfloat16)
    found = weights_of(tiny().config, torch.bfloat16, config)
    linear = sum(
        module.weight.numel()
        for name, module in tiny().named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    )
    saved = (whole.size - found.size) / linear
    assert not found.exact
    assert saved == 0 if bits is None else 0 <= (2 - bits / 8) - saved <= 0.04


# -- the plan ------------------------------------------------------------------------------------


def rooms(*gib: float) -> list[Room]:
    return [
        Room(f"cuda:{n}", int(2 * g * GIB), int(g * GIB), GIB // 1000) for n, g in enumerate(gib)
    ]


def test_a_plan_adds_up(folder: Path) -> None:
    found = plan(asked(folder, budget=256, chunk=64), context=1000, on=rooms(0.01))
    assert found.left == int(0.01 * GIB) - GIB // 1000 - found.weights
    assert found.dense == 1000 * found.per_token
    assert found.sessions == found.left // found.budget_bytes > 1
    assert found.largest_budget > 256 * found.sessions * 0.9
    config = cache_config(asked(folder, budget=found.largest_budget, chunk=64), 0)
    assert isinstance(config, EvictingConfig)
    assert cache_bytes(config_of(resolve(str(folder))), torch.float32, config, 64) <= found.left
    assert plan(asked(folder), on=rooms(0.01)).context == 4096


def test_a_plan_over_devices(folder: Path) -> None:
    weights = plan(asked(folder), on=rooms(1)).weights / GIB
    two = plan(asked(folder, chunk=64), on=rooms(0.8 * weights + 0.001, 0.8 * weights + 0.001))
    assert two.spread
    assert two.left > 0
    assert not plan(asked(folder), on=rooms(1, 1)).spread
    none = plan(asked(folder), on=rooms(0.5 * weights))
    assert (none.left < 0, none.largest_budget, none.sessions) == (True, 0, 0)
    last = doctor.plan_rows(none)[-1]
    assert last.state == "missing"
    assert "--quantize 4bit" in last.remedy


def test_memory_is_that_of_the_cgroup(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:  1000 kB\nMemAvailable:  800 kB\n")
    assert planner._memory(tmp_path) == (1000 * 1024, 800 * 1024)
    group = tmp_path / "sys/fs/cgroup"
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1\n")
    assert planner._memory(tmp_path) == (1000 * 1024, 800 * 1024)
    (group / "memory.max").write_text("512000\n")
    (group / "memory.current").write_text("500000\n")
    assert planner._memory(tmp_path) == (512000, 12000)


# -- agent doctor --model ------------------------------------------------------------------------


def told(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(doctor.doctor)
    return CliRunner().invoke(app, ["--device", "cpu", *arguments])


def test_doctor_says_what_fits(folder: Path) -> None:
    result = told("--model", str(folder), "--dtype", "float32", "--budget", "512", "--json")
    data = json.loads(result.stdout)
    assert (result.exit_code, data["usable"]) == (0, True)
    assert data["plan"]["per_token"] == bytes_per_token(tiny().config, torch.float32)
    assert data["plan"]["budget"] == 512
    shown = told("--model", str(folder), "--dtype", "float32", "--cache-gib", "0.001").stdout
    assert "1 KiB of keys and values in float32; 1,398,101 tokens in a GiB" in shown
    assert "take 0.00 GiB (nexus, chunks of 256):" in shown


def test_doctor_knows_models_that_are_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of the catalogue without the hub, and published shapes that are in no catalogue."""
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "local_snapshot", lambda repo: None)
    for name, per_token in (("smollm2-135m", 46080), ("qwen3-8b", 294912), ("qwen3-32b", 524288)):
        result = told("--model", name, "--dtype", "float32", "--json")
        assert json.loads(result.stdout)["plan"]["per_token"] == per_token
    result = told("--model", "owner/model")
    assert result.exit_code == 1
    assert "its config cannot be had" in " ".join(result.stderr.split())


def test_doctor_ends_with_1_where_a_budget_does_not_fit(folder: Path) -> None:
    result = told("--model", str(folder), "--budget", "999999999", "--json")
    assert result.exit_code == 1
    last = json.loads(result.stdout)["rows"][-1]
    assert "--budget" in last["remedy"]
    assert told("--model", str(folder), "--quantize", "5bit").exit_code == 2


@pytest.mark.model
def test_the_small_models_as_published_and_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from agent.bench.shapes import shape_config
    from agent.models import load

    monkeypatch.undo()  # the user's own folder of models
    loaded = load("smollm2-135m", dtype="bfloat16", device="cpu")
    published = shape_config("smollm2-135m")
    for config in (published, loaded.model.config):
        found = weights_of(config, torch.bfloat16)
        assert found.size == sum(p.nbytes for p in loaded.model.parameters()) + 256  # rotary
        assert bytes_per_token(config, torch.bfloat16) == 23040
    assert published.max_position_embeddings == loaded.model.config.max_position_embeddings
