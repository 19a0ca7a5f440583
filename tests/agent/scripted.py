"""A model whose replies are written down, and a chat over a small tokenizer made on the spot."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from agent.chat import Chat
from agent.protocol import Reply
from agent.session import TurnStats
from agent.token_log import TokenLog

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def byte_tokenizer() -> PreTrainedTokenizerBase:
    """One id a byte, and ChatML's control tokens: a real tokenizer that needs no download."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: number for number, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    fast.chat_template = CHATML
    return fast


def byte_chat() -> Chat:
    return Chat(byte_tokenizer(), name="bytes")


class ScriptedProtocol:
    """Says the given texts one after the other, then goes on with the last.

    Each is cut at `max_new_tokens` and by `stop_text`, as a model's reply is; a text that was not
    cut ends with the chat's close token. A script may also hold functions: they are called and
    their result is said (or what they raise is raised). What was fed is kept in `fed`.
    """

    name = "scripted"

    def __init__(self, chat: Chat, script: Iterable[str | Callable[[], str]]) -> None:
        self.chat = chat
        self.fed: list[str] = []
        self.calls = 0
        self._script = _endless(script)
        self._seen = 0

    def reply(
        self,
        log: TokenLog,
        *,
        max_new_tokens: int,
        stop_text: Callable[[str], bool] | None = None,
        on_text: Callable[[str], None] | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> Reply:
        self.calls += 1
        began = time.perf_counter()
        new = log.ids[self._seen :]
        self.fed.append(self.chat.text(new))
        said = next(self._script)
        text = said if isinstance(said, str) else said()
        whole = [*self.chat.encode(text), self.chat.close_id]
        ids, finish = whole[:max_new_tokens], "stop" if len(whole) <= max_new_tokens else "length"
        # Looking after every id is what a model does; every close bracket is enough for a script.
        for at, char in enumerate(self.chat.text([i]) for i in ids):
            if char == ">" and stop_text is not None and stop_text(self.chat.text(ids[: at + 1])):
                ids, finish = ids[: at + 1], "stop_text"
                break
        if on_text is not None:
            on_text(self.chat.text(ids))
        fed, self._seen = len(new), len(log) + len(ids)
        spent = time.perf_counter() - began
        stats = TurnStats(
            fed=fed,
            sampled=len(ids),
            seen=len(log) + len(ids) - 1,
            resident=len(log) + len(ids) - 1,
            peak_tokens=len(log) + len(ids) - 1,
            cache_bytes=0,
            peak_bytes=0,
            evictions=0,
            evicted_tokens=0,
            prefill_seconds=0.0,
            decode_seconds=spent,
            eviction_seconds=0.0,
        )
        return Reply(tuple(ids), self.chat.text(ids), finish, stats)  # type: ignore[arg-type]

    def save(self, path: Path, *, model_id: str) -> bool:
        return False

    def resume(self, log: TokenLog, saved: Iterable[Path], **_: object) -> int:
        self._seen = len(log)
        return 0

    def close(self) -> None:
        pass


def _endless(script: Iterable[str | Callable[[], str]]) -> Iterator[str | Callable[[], str]]:
    last: str | Callable[[], str] = ""
    for item in script:
        last = item
        yield item
    while True:
        yield last


def xml(name: str, thought: str = "", /, **arguments: str) -> str:
    """A call in the `xml_calls` syntax."""
    lines = [f"<parameter={key}>\n{value}\n</parameter>" for key, value in arguments.items()]
    return "\n".join([*([thought] if thought else []), f"<function={name}>", *lines, "</function>"])
