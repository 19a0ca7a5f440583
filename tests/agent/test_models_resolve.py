"""What `--model` takes, and how it answers what it does not take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from model_fakes import Told, write_llama, write_tiny_gguf
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM
from typer.testing import CliRunner

from agent import digests, hub
from agent.catalogue import CATALOGUE, GgufEntry
from agent.cli_models import models_app
from agent.model_errors import BadModelFile, FetchError, UnknownModel
from agent.models import choose_device, choose_precision, load, pull, resolve
from cache.support import UnsupportedModel

_TINY = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 260,
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXUS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder as from the hub: a random Llama with a tokenizer, in two files of weights."""
    folder = write_llama(tmp_path / "my-llama", _TINY, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The hub is at an address that refuses, and nothing was fetched from it before."""
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


def test_catalogue_names_in_any_case() -> None:
    source = resolve("SmolLM2-135M")
    assert (source.kind, source.name) == ("catalogue", "smollm2-135m")


def test_an_unknown_name_lists_the_names() -> None:
    with pytest.raises(UnknownModel) as caught:
        resolve("qwen9")
    assert "'qwen9'" in str(caught.value)
    assert all(name in str(caught.value) for name in CATALOGUE)


@pytest.mark.parametrize("name", ["./nothing", "/no/such/model.gguf", "missing.gguf", "~/nothing"])
def test_a_path_that_is_not_there_is_no_hub_id(name: str) -> None:
    with pytest.raises(UnknownModel, match="there is no file or folder"):
        resolve(name)


@pytest.mark.parametrize("name", ["owner/a--b", "owner/a..b", "owner/a.", "owner/a-", "o/a.git"])
def test_a_name_that_no_repository_can_have_is_unknown(name: str) -> None:
    with pytest.raises(UnknownModel, match=name):
        resolve(name)


def test_hub_ids() -> None:
    assert resolve("Qwen/Qwen3-0.6B").repo == "Qwen/Qwen3-0.6B"
    assert resolve("deepswe-preview").repo == "agentica-org/DeepSWE-Preview"


def test_a_folder_is_loaded_as_it_is(llama: Path) -> None:
    loaded = load(str(llama), dtype="float32", device="cpu")
    assert (loaded.name, loaded.path) == ("my-llama", llama)
    assert (loaded.dtype, loaded.device) == (torch.float32, torch.device("cpu"))
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    reference = LlamaForCausalLM.from_pretrained(llama, dtype=torch.float32)
    ids = torch.arange(12)[None]
    assert torch.equal(loaded.model(ids).logits, reference(ids).logits)


def test_a_folders_sum_is_that_of_its_files(llama: Path) -> None:
    """As `sha256sum config.json *.safetensors | sha256sum` has it, and it follows a change."""
    names = sorted(["config.json", *(p.name for p in llama.glob("*.safetensors"))])
    listed = subprocess.run(["sha256sum", *names], cwd=llama, capture_output=True, check=True)
    whole = subprocess.run(["sha256sum"], input=listed.stdout, capture_output=True, check=True)
    before = digests.of_folder(llama)
    assert before == whole.stdout.split()[0].decode()
    weights = next(llama.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    assert digests.of_folder(llama) != before


def test_a_sum_is_not_worked_out_twice(llama: Path) -> None:
    told = Told()
    digests.of_folder(llama, told)
    assert told.marks
    again = Told()
    digests.of_folder(llama, again)
    assert again.marks == []


def test_a_missing_file_of_weights_is_named(llama: Path) -> None:
    next(llama.glob("*.safetensors")).unlink()
    with pytest.raises(BadModelFile, match="some of those that its index names"):
        resolve(str(llama))


def test_pickled_weights_are_never_read(llama: Path) -> None:
    for path in llama.glob("model*"):
        path.unlink()
    (llama / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(BadModelFile, match="can run code"):
        resolve(str(llama))


def test_code_of_a_model_folder_never_runs(llama: Path, tmp_path: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    config["model_type"] = "mine"
    config["auto_map"] = {"AutoConfig": "evil.Mine", "AutoModelForCausalLM": "evil.Mine"}
    (llama / "config.json").write_text(json.dumps(config))
    (llama / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(BadModelFile):
        load(str(llama))
    assert not (tmp_path / "ran").exists()


def test_a_folder_of_gguf_files_says_to_name_one(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(BadModelFile, match=r"tiny\.gguf"):
        resolve(str(tmp_path))
    assert resolve(str(path)).kind == "gguf"


def test_another_file_is_refused(llama: Path) -> None:
    with pytest.raises(BadModelFile, match="name its folder"):
        resolve(str(next(llama.glob("*.safetensors"))))


def test_an_architecture_the_cache_cannot_serve(tmp_path: Path) -> None:
    folder = tmp_path / "windowed"
    MistralForCausalLM(MistralConfig(**_TINY, sliding_window=8)).save_pretrained(folder)
    with pytest.raises(UnsupportedModel, match=r"windowed.*sliding_window 8"):
        load(str(folder))


def test_without_the_hub_the_message_names_what_there_is(no_hub: None) -> None:
    with pytest.raises(FetchError) as caught:
        pull(resolve("owner/model"))
    message = str(caught.value)
    assert "the hub cannot be reached (connection refused)" in message
    assert "owner/model was not fetched before" in message
    names = [name for name, entry in CATALOGUE.items() if isinstance(entry, GgufEntry)]
    assert all(name in message for name in names)


def test_what_was_fetched_before_does_without_the_hub(
    no_hub: None, llama: Path, tmp_path: Path
) -> None:
    """In the hub client's own layout: refs/main names a commit, snapshots/<commit> holds files."""
    store = tmp_path / "hub" / "models--owner--model"
    (store / "refs").mkdir(parents=True)
    (store / "refs" / "main").write_text("c" * 40)
    (store / "snapshots").mkdir()
    llama.rename(store / "snapshots" / ("c" * 40))
    told = Told()
    files = pull(resolve("owner/model"), told)
    assert files.folder == store / "snapshots" / ("c" * 40)
    assert len(told.said) == 1
    assert "as it was fetched before" in told.said[0]
    next(files.folder.glob("*.safetensors")).unlink()  # a fetch that was broken off
    with pytest.raises(FetchError):
        pull(resolve("owner/model"))


@pytest.mark.parametrize(
    ("name", "precision"),
    [("bf16", "bfloat16"), ("float16", "float16"), ("fp32", "float32"), ("int8", "int8")],
)
def test_precisions_by_name(name: str, precision: str) -> None:
    assert choose_precision(name, torch.device("cpu")) == precision


def test_auto_on_the_cpu_follows_its_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split())
    expected = "float32"
    if flags & {"avx512_vnni", "avx_vnni"}:
        expected = "int8"
    if flags & {"amx_bf16", "avx512_bf16"}:
        expected = "bfloat16"
    assert choose_precision("auto", torch.device("cpu")) == expected
    for names, found in (
        ({"avx512_bf16", "avx512_vnni"}, "bfloat16"),
        ({"avx512_vnni"}, "int8"),
        ({"avx2"}, "float32"),
    ):
        given = dict.fromkeys(names, True)
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda given=given: given)
        assert choose_precision("auto", torch.device("cpu")) == found


def test_int8_is_refused_away_from_the_cpu() -> None:
    with pytest.raises(ValueError, match="int8 is for CPUs, not cuda; choose auto or bfloat16"):
        choose_precision("int8", torch.device("cuda"))


def test_a_dtype_or_device_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="'int3' is not known; choose from auto, bfloat16"):
        choose_precision("int3", torch.device("cpu"))
    with pytest.raises(ValueError, match="device 'nonsense' cannot be used"):
        choose_device("nonsense")


def test_list_shows_what_is_here() -> None:
    result = CliRunner().invoke(models_app, ["list", "--json"])
    assert result.exit_code == 0
    rows = {row["name"]: row for row in json.loads(result.stdout)}
    assert list(rows) == list(CATALOGUE)
    assert all(row["folder"] is None for row in rows.values() if row["without_hub"])
    table = CliRunner().invoke(models_app, ["list"])
    assert all(name in table.stdout for name in CATALOGUE)


def test_pull_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    result = CliRunner().invoke(models_app, ["pull", str(path)])
    assert result.exit_code == 0, result.output
    assert f"sha256 {digests.of_file(path)}" in result.stdout
    wrong = CliRunner().invoke(models_app, ["pull", "qwen9"])
    assert wrong.exit_code == 1
    assert "no model is named 'qwen9'" in wrong.stderr


def test_the_command_line_is_quick() -> None:
    """`agent --help` must not wait for torch: nothing weighty at import."""
    code = (
        "import sys, agent.cli_models, agent.doctor; "
        "print(sorted({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
