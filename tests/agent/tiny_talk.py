"""Tiny random models, a chat whose texts are ids, and conversations that need no agent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from agent.chat import Chat
from agent.protocol import Reply
from agent.token_log import TokenLog
from cache import AnyConfig, Sampling, preset

VOCABULARY = 211
STOP = 7


class FakeChat:
    """Stands where Chat stands: ids are their own text."""

    stop_ids = frozenset({STOP})

    def text(self, ids: Collection[int]) -> str:
        return " ".join(map(str, ids))


CHAT = cast(Chat, FakeChat())


@dataclass(frozen=True)
class Recorder(Sampling):
    """Greedy sampling that remembers the logits it saw."""

    logits: list[torch.Tensor] = field(default_factory=list)

    def choose(self, logits: torch.Tensor, *, position: int) -> int:
        self.logits.append(logits.clone())
        return super().choose(logits, position=position)


def tiny(family: str, **changes: Any) -> Any:
    """A random model in float32. `initializer_range` far above 0.02 makes attention uneven."""
    torch.manual_seed(1)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1 if family == "llama" else 4,
        "max_position_embeddings": 8192,
        **changes,
    }
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape)).eval()
    return Qwen2ForCausalLM(Qwen2Config(**shape)).eval()


def talk(
    protocol: Any,
    *,
    turns: int,
    prompt: int = 150,
    observation: int = 60,
    new_tokens: int = 12,
    pinned: bool = True,
    after: Callable[[int, TokenLog, Reply], None] | None = None,
) -> TokenLog:
    """A conversation whose injected ids depend on the turn alone."""
    log = TokenLog()
    generator = torch.Generator().manual_seed(3)

    def some(count: int) -> Sequence[int]:
        return torch.randint(8, VOCABULARY, (count,), generator=generator).tolist()

    log.append(some(prompt), role="user", kind="injected", turn=0, pinned=pinned)
    for turn in range(1, turns + 1):
        reply = protocol.reply(log, max_new_tokens=new_tokens)
        log.append(reply.ids, role="assistant", kind="sampled", turn=turn)
        if after is not None:
            after(turn, log, reply)
        log.append(some(observation), role="user", kind="injected", turn=turn)
    return log


def nexus(tokens: int, **changes: Any) -> AnyConfig:
    return preset("nexus", budget={"kind": "tokens", "tokens": tokens}, **changes)
