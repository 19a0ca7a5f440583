"""SmolLM2 as it is fetched, converted and loaded for real."""

from __future__ import annotations

import time

import pytest
import torch
from tokenizers import pre_tokenizers

from agent import model_convert
from agent.catalogue import GgufEntry, find
from agent.model_convert import load_gguf_model, load_gguf_tokenizer
from agent.model_store import gguf_folder, stored
from agent.models import LoadedModel, load

pytestmark = pytest.mark.model

PROMPT = [{"role": "user", "content": "Write a Python function that adds two numbers."}]


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load("smollm2-135m", dtype="bfloat16", device="cpu")


def test_it_comes_with_the_sum_of_its_makers(smollm2: LoadedModel) -> None:
    entry = find("smollm2-135m")
    assert isinstance(entry, GgufEntry)
    assert smollm2.sha256 == entry.sha256
    assert (gguf_folder() / entry.file).stat().st_size == entry.size
    here = stored(entry)
    assert here is not None
    assert here.converted
    assert here.folder == smollm2.path


def test_logits_equal_those_of_the_gguf_file(smollm2: LoadedModel) -> None:
    entry = find("smollm2-135m")
    assert isinstance(entry, GgufEntry)
    source = load_gguf_model(gguf_folder() / entry.file, torch.bfloat16)
    ids = smollm2.tokenizer("def add(a, b):\n    return a", return_tensors="pt").input_ids
    with torch.inference_mode():
        assert torch.equal(smollm2.model(ids).logits, source(ids).logits)


def test_tokens_equal_those_of_the_gguf_file(smollm2: LoadedModel) -> None:
    entry = find("smollm2-135m")
    assert isinstance(entry, GgufEntry)
    source = load_gguf_tokenizer(gguf_folder() / entry.file)
    saved = smollm2.tokenizer
    assert saved.get_vocab() == source.get_vocab()
    assert saved.all_special_tokens == source.all_special_tokens
    assert saved.chat_template == source.chat_template
    texts = [
        "def f(x):\n\treturn x[1:20]  # 3.14159\n\n\n",
        "for i in range(100):\n    12345\n      7\n",
        "<|im_start|>user\nhi<|im_end|>\n<file_sep> <repo_name>x",
        "naïve ✓ \u00a0\u2003 e\u0301 🙂🏽 日本語 \x00\x7f",
    ]
    for text in texts:
        ids = saved(text).input_ids
        assert ids == source(text).input_ids
        assert saved.decode(ids) == text


def test_digits_are_cut_out_before_spaces_are_joined(smollm2: LoadedModel) -> None:
    """SmolLM2's own rule, by hand: each digit alone, then GPT-2's rule for what is between."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    rest = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    text = "x =\n    12  3"
    pieces = [
        piece
        for part, _ in digits.pre_tokenize_str(text)
        for piece, _ in rest.pre_tokenize_str(part)
    ]
    assert pieces == ["x", "Ġ=", "ĊĠĠĠĠ", "1", "2", "ĠĠ", "3"]
    assert smollm2.tokenizer.tokenize(text) == pieces  # all of them are in its vocabulary


def test_the_chat_template_makes_it_answer(smollm2: LoadedModel) -> None:
    tokenizer = smollm2.tokenizer
    shown = tokenizer.apply_chat_template(PROMPT, tokenize=False, add_generation_prompt=True)
    assert shown.endswith("<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer(shown, return_tensors="pt", add_special_tokens=False)
    out = smollm2.model.generate(**ids, max_new_tokens=24, do_sample=False)
    assert "def " in tokenizer.decode(out[0, ids.input_ids.shape[1] :])


def test_the_second_load_takes_seconds_and_converts_nothing(
    smollm2: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("converted again")

    monkeypatch.setattr(model_convert, "load_gguf_model", never)
    started = time.process_time()
    again = load("smollm2-135m", dtype="bfloat16", device="cpu")
    assert time.process_time() - started < 10
    assert again.path == smollm2.path
