"""GGUF to safetensors: the same weights and tokens, made once, and never half there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from model_fakes import Told, write_tiny_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from agent import digests, model_convert
from agent.gguf_header import read_header
from agent.model_convert import converted, load_gguf_model, load_gguf_tokenizer
from agent.model_errors import BadModelFile, FullDisk
from agent.models import load
from cache.support import UnsupportedModel

TEXTS = [
    "def f(x):\n    return x  # 12 345\n",
    "<|im_start|>user\nabab <|im_end|>",
    "naïve ✓ \t\r\n  \u00a0 e\u0301 🙂 日本",
    "    1\n      22\n",
    "",
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEXUS_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_converted_form_is_the_same_model(tmp_path: Path, tied: bool) -> None:
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf", tied=tied)
    folder = converted(gguf, digests.of_file(gguf), tmp_path / "converted")
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    source = load_gguf_model(gguf, torch.bfloat16)
    assert saved.config.tie_word_embeddings is tied
    assert saved.config.eos_token_id == source.config.eos_token_id
    weights = source.state_dict()
    assert weights.keys() == saved.state_dict().keys()
    for name, tensor in saved.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    ids = torch.arange(20)[None]
    assert torch.equal(saved(ids).logits, source(ids).logits)


def test_the_tokenizer_and_its_template_survive(tmp_path: Path) -> None:
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf")
    folder = converted(gguf, digests.of_file(gguf), tmp_path / "converted")
    saved, source = AutoTokenizer.from_pretrained(folder), load_gguf_tokenizer(gguf)
    for text in TEXTS:
        assert saved(text).input_ids == source(text).input_ids
        assert saved.decode(saved(text).input_ids) == text
    assert saved.get_vocab() == source.get_vocab()
    messages = [{"role": "user", "content": "ab"}]
    shown = saved.apply_chat_template(messages, tokenize=False)
    assert shown == "<|im_start|>ab<|im_end|>"
    control = saved.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    ids = saved(shown).input_ids
    assert [ids[0], ids[-1]] == control


def test_it_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf")
    told = Told()
    first = load(str(gguf), progress=told)
    assert told.said == ["converting tiny.gguf to safetensors (once)"]

    def never(*_: object) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(model_convert, "load_gguf_model", never)
    second = load(str(gguf))
    assert (second.path, second.sha256) == (first.path, first.sha256)
    assert second.sha256 == digests.of_file(gguf)


def test_another_file_of_the_same_name_is_converted_anew(tmp_path: Path) -> None:
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf")
    before = load(str(gguf))
    write_tiny_gguf(gguf, tied=True)
    after = load(str(gguf))
    assert before.path != after.path
    assert after.model.config.tie_word_embeddings


def test_a_failed_conversion_leaves_nothing_and_a_killed_one_is_made_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf")
    root = tmp_path / "converted"

    def half(_weights: object, target: Path, **_: object) -> None:
        target.write_bytes(b"half")
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(model_convert, "save_file", half)
        with pytest.raises(OSError, match="No space left"):
            converted(gguf, "a" * 64, root)
    assert [p.name for p in root.iterdir() if p.is_dir()] == []
    # What a process that was killed in mid-conversion leaves:
    left = root / ".tiny-aaaaaaaaaaaa.partial"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    folder = converted(gguf, "a" * 64, root)
    assert not left.exists()
    AutoModelForCausalLM.from_pretrained(folder)


def test_a_full_disk_is_seen_before_the_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1))
    with pytest.raises(FullDisk, match="converted form of tiny"):
        converted(gguf, "a" * 64, tmp_path / "converted")
    assert [p.name for p in (tmp_path / "converted").iterdir() if p.is_dir()] == []


def test_an_architecture_the_cache_cannot_serve_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf", architecture="gemma2")
    with pytest.raises(UnsupportedModel, match=r"tiny\.gguf .*caps its attention scores"):
        converted(gguf, "a" * 64, tmp_path / "converted")
    assert [p.name for p in (tmp_path / "converted").iterdir() if p.is_dir()] == []


@pytest.mark.parametrize("keep", [0, 3, 30, 4000, -1000], ids=str)
def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, keep: int) -> None:
    gguf = write_tiny_gguf(tmp_path / "tiny.gguf")
    gguf.write_bytes(gguf.read_bytes()[:keep])
    with pytest.raises(BadModelFile, match=r"tiny\.gguf is (not a GGUF|damaged or cut|cut) ?"):
        converted(gguf, "a" * 64, tmp_path / "converted")


def test_the_header_is_read_right(tmp_path: Path) -> None:
    """Against the gguf package, which reads the whole file."""
    import gguf as package

    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    reader = package.GGUFReader(path)
    header = read_header(path)
    assert header.elements == sum(int(tensor.n_elements) for tensor in reader.tensors)
    plain = {
        key: field.contents()
        for key, field in reader.fields.items()
        if not key.startswith("GGUF.") and field.types[0] != package.GGUFValueType.ARRAY
    }
    assert header.metadata == pytest.approx(plain)


def test_one_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    gguf = write_tiny_gguf(tmp_path / "big-00001-of-00003.gguf")
    with pytest.raises(BadModelFile, match="one of 3 parts"):
        converted(gguf, "a" * 64, tmp_path / "converted")
