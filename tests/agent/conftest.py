"""A real sandbox and a real chat for the agent's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import SOURCE
from scripted import ScriptedProtocol, byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from agent import attempt
from agent.tools import Workspace
from environments import Sandbox, SandboxSpec, bubblewrap, open_sandbox


@pytest.fixture(scope="session")
def bubblewrap_works() -> None:
    """Skip where bubblewrap cannot be used; its own tests say why."""
    why = bubblewrap.why_unusable()
    if why is not None:
        pytest.skip(why)


@pytest.fixture
def sandbox(bubblewrap_works: None) -> Iterator[Sandbox]:
    with open_sandbox(SandboxSpec(), "bubblewrap") as sandbox:
        yield sandbox


@pytest.fixture
def workspace(sandbox: Sandbox) -> Workspace:
    return Workspace(sandbox)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama and a tokenizer of bytes, as a user could have one."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    folder = tmp_path / "calc"
    folder.mkdir()
    (folder / "calc.py").write_text(SOURCE)
    return folder


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Replies by attempt, said by a script in the place of the model. Filled by the test."""
    scripts: list[list[str]] = []

    def protocol(name: str, model: object, chat: Any, config: object, **_: object) -> object:
        return ScriptedProtocol(chat, scripts.pop(0))

    monkeypatch.setattr(attempt, "make_protocol", protocol)
    return scripts
