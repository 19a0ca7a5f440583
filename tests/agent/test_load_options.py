"""Loading over devices and in fewer bits, and what is refused before anything is fetched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_fakes import write_llama
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from agent import hub, models
from agent.load_options import QUANTIZATIONS, method_name, read_device_map, read_quantization
from agent.model_errors import CannotQuantize
from agent.models import choose_precision, load
from agent.run_options import OptionError, parse_options

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXUS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    shape = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 260}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return write_llama(tmp_path / "my-llama", shape | heads)


def carry(folder: Path, quantization: dict[str, Any]) -> Path:
    """Make of a folder one whose weights are said to be quantised."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def quantiser(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A method of transformers that needs no package: it halves the weights of the first layer."""
    seen: dict[str, Any] = {}
    for table in (AUTO_QUANTIZER_MAPPING, AUTO_QUANTIZATION_CONFIG_MAPPING):
        monkeypatch.setitem(table, "halves", None)
        del table["halves"]

    @register_quantization_config("halves")
    class Config(QuantizationConfigMixin):
        def __init__(self, bits: int = 8, **_: Any) -> None:
            self.quant_method, self.bits = "halves", bits

    @register_quantizer("halves")
    class Quantizer(HfQuantizer):
        requires_calibration = False

        def validate_environment(self, *_: Any, **kwargs: Any) -> None:
            seen.setdefault("device_maps", []).append(kwargs.get("device_map"))

        def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
            with torch.no_grad():
                model.model.layers[0].mlp.up_proj.weight /= 2
            return model

        def is_serializable(self, *_: Any, **__: Any) -> bool:
            return True

        @property
        def is_trainable(self) -> bool:
            return False

    return seen


def weight(model: Any) -> torch.Tensor:
    found: torch.Tensor = model.model.layers[0].mlp.up_proj.weight
    return found


# -- --device-map --------------------------------------------------------------------------------


def test_a_device_map_loads_the_same_model(llama: Path, tmp_path: Path) -> None:
    plain = load(str(llama), dtype="float32", device="cpu")
    file = tmp_path / "map.json"
    file.write_text(json.dumps({"model": "cpu", "lm_head": "cpu"}))
    ids = torch.arange(9)[None]
    for device_map in ("auto", "balanced", "sequential", str(file)):
        loaded = load(str(llama), dtype="float32", device_map=device_map)
        assert torch.equal(loaded.model(ids).logits, plain.model(ids).logits)
        assert loaded.precision == "float32"
    cpu = torch.device("cpu")
    assert (loaded.device, loaded.devices, loaded.where) == (cpu, (cpu,), "cpu")


@pytest.mark.parametrize(("place", "name"), [(97, "cuda:97"), ("cuda:98", "cuda:98"), ("no", "no")])
def test_a_map_to_a_device_that_is_not_there(
    place: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "pull", lambda *_: pytest.fail("it was fetched"))
    file = tmp_path / "map.json"
    file.write_text(json.dumps({"model": "cpu", "lm_head": place}))
    with pytest.raises(ValueError, match=f"device '{name}' cannot be used"):
        load("smollm2-135m", dtype="float32", device_map=str(file))


def test_what_is_asked_of_transformers(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    real = models.AutoModelForCausalLM.from_pretrained

    def noted(folder: Path, **how: Any) -> Any:
        asked.update(how)
        return real(folder, **how)

    monkeypatch.setattr(models.AutoModelForCausalLM, "from_pretrained", noted)
    for device_map in (None, "balanced"):
        load(str(llama), dtype="float32", device_map=device_map)
        assert asked["device_map"] == device_map


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "neither auto, balanced, balanced_low_0, sequential nor a JSON file"),
        ("{", "cannot be read as JSON"),
        ("[1]", "holds no JSON object"),
        ("{}", "is no device map"),
        ('{"model": [0]}', "is no device map"),
        ('{"model": true}', "is no device map"),
    ],
)
def test_what_is_no_device_map(text: str | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "map.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(OptionError, match=words) as caught:
        parse_options({"instance": "any", "device_map": str(file)})
    assert str(caught.value).startswith(f"--device-map {file}" if text else "--device-map '")


def test_one_device_and_several_are_not_both_named(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="--device names one device, --device-map several"):
        parse_options({"instance": "any", "device": "cpu", "device_map": "auto"})
    file = tmp_path / "map.json"
    file.write_text('{"model": 0, "lm_head": "cuda:1"}')
    assert read_device_map(str(file)) == {"model": 0, "lm_head": "cuda:1"}


# -- --quantize ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("4bit", "bitsandbytes-4bit"),
        ("8bit", "bitsandbytes-8bit"),
        (GPTQ, "gptq-4bit"),
        ({"model_type": "llama", "quantization_config": GPTQ}, "gptq-4bit"),  # a config.json
        ({"quant_method": "aqlm", "nbits_per_codebook": 16}, "aqlm"),
    ],
)
def test_what_quantize_means(value: Any, name: str, tmp_path: Path) -> None:
    if not isinstance(value, str):
        (tmp_path / "q.json").write_text(json.dumps(value))
        value = str(tmp_path / "q.json")
    assert method_name(read_quantization(value)) == name
    assert parse_options({"instance": "any", "quantize": value}).quantize == value
    read_quantization("4bit").clear()
    assert QUANTIZATIONS["4bit"]


def test_what_is_no_quantization_config(tmp_path: Path) -> None:
    (tmp_path / "q.json").write_text('{"bits": 4}')
    with pytest.raises(OptionError, match=r"q\.json is no quantization_config"):
        parse_options({"instance": "any", "quantize": str(tmp_path / "q.json")})
    with pytest.raises(OptionError, match="--quantize '5bit' is neither 4bit, 8bit nor"):
        parse_options({"instance": "any", "quantize": "5bit"})


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ("4bit", "--quantize 4bit (bitsandbytes-4bit) cannot be used here: "),
        (AWQ, "(awq-4bit) cannot be used here: it takes calibration"),
        (GPTQ, "(gptq-4bit) cannot be used here: "),
        ({"quant_method": "torchao", "quant_type": 5}, "torchao"),
        ({"quant_method": "magic"}, "magic: Unknown quantization type"),
        ({"quant_method": "fp8"}, "(fp8-8bit) cannot be used here: "),
    ],
)
def test_what_is_missing_is_said_before_anything_is_fetched(
    quantization: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "pull", lambda *_: pytest.fail("it was fetched"))
    monkeypatch.setattr(
        "transformers.quantizers.quantizer_bnb_4bit.is_bitsandbytes_available", bool
    )
    value = quantization
    if not isinstance(value, str):
        (tmp_path / "q.json").write_text(json.dumps(value))
        value = str(tmp_path / "q.json")
    with pytest.raises(CannotQuantize) as caught:
        load("smollm2-135m", dtype="float32", device="cpu", quantize=value)
    assert words in str(caught.value)
    assert "pip install" in str(caught.value) or quantization != "4bit"


def test_a_quantised_checkpoint_is_refused_before_its_weights_are_fetched(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry(llama, GPTQ)
    with pytest.raises(CannotQuantize, match=r"my-llama \(gptq-4bit\) cannot be used here: "):
        load(str(llama))
    monkeypatch.setattr(hub, "require_reachable", lambda: None)
    monkeypatch.setattr(hub, "config_file", lambda repo: llama / "config.json")
    monkeypatch.setattr(hub, "snapshot", lambda repo: pytest.fail("it was fetched"))
    monkeypatch.setattr(hub, "snapshot_bytes", lambda repo: pytest.fail("it was fetched"))
    with pytest.raises(CannotQuantize, match=r"owner/model \(gptq-4bit\)"):
        load("owner/model")


def test_weights_are_quantised_as_they_are_loaded(
    llama: Path, quantiser: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A CPU whose default is int8, which is a form of its own.
    monkeypatch.setattr(models, "_cpu_has", lambda *names: "avx512_vnni" in names)
    plain = load(str(llama), dtype="float32", device="cpu")
    (tmp_path / "q.json").write_text('{"quant_method": "halves", "bits": 6}')
    loaded = load(str(llama), device="cpu", quantize=str(tmp_path / "q.json"))
    assert torch.equal(weight(loaded.model), weight(plain.model) / 2)
    assert (loaded.precision, loaded.dtype) == ("halves-6bit", torch.float32)
    assert quantiser["device_maps"] == [None, {"": torch.device("cpu")}]
    assert plain.precision == "float32"
    with pytest.raises(ValueError, match="int8 is a form of its own"):
        load(str(llama), dtype="int8", device="cpu", quantize="8bit")


def test_a_checkpoint_that_is_quantised_loads_as_it_is(
    llama: Path, quantiser: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_cpu_has", lambda *names: "avx512_vnni" in names)
    carry(llama, {"quant_method": "halves", "bits": 8})
    loaded = load(str(llama), device="cpu")
    assert (loaded.precision, loaded.dtype) == ("halves-8bit", torch.float32)
    (tmp_path / "q.json").write_text('{"quant_method": "halves"}')
    with pytest.raises(CannotQuantize, match="is quantised already"):
        load(str(llama), device="cpu", quantize=str(tmp_path / "q.json"))


def test_the_default_precision_beside_quantised_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_cpu_has", lambda *names: "avx512_vnni" in names)
    cpu = torch.device("cpu")
    assert choose_precision("auto", cpu) == "int8"
    assert choose_precision("auto", cpu, plain=True) == "float32"


@pytest.mark.parametrize(("quantize", "share"), [("4bit", 0.3), ("8bit", 0.5)])
def test_bitsandbytes_where_it_is_installed(llama: Path, quantize: str, share: float) -> None:
    pytest.importorskip("bitsandbytes")
    plain = load(str(llama), dtype="bfloat16", device="cpu")
    loaded = load(str(llama), dtype="bfloat16", device="cpu", quantize=quantize)
    assert loaded.precision == f"bitsandbytes-{quantize}"
    held = weight(loaded.model)
    assert held.nbytes < 1.1 * share * weight(plain.model).nbytes
    ids = torch.arange(9)[None]
    mine, theirs = loaded.model(ids).logits.float(), plain.model(ids).logits.float()
    assert torch.nn.functional.cosine_similarity(mine, theirs, dim=-1).min() > 0.9
    assert not torch.equal(mine, theirs)
