"""Small tokenizers and chat templates for the tests of the bridge, and what they should write.

Each template comes with a function that writes a whole conversation in its format by hand, thoughts
kept: the independent reference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

Turns = Sequence[tuple[str, str]]  # role, content

CORPUS = [
    "def f(x):\n    return x\n\n\n    if x:\n        pass\n\n",
    "the user and the assistant think\n\nabout the tool response\n\n\n  of the system, in turn\n",
    "Exit code: 0\n\n    12 | line\t\tof code\r\n\r\nis n't it , so .  \n \n",
] * 40

CHATML_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML_MARKS = (
    "<think>",
    "</think>",
    "<tool_response>",
    "</tool_response>",
    "<tool_call>",
    "</tool_call>",
)

# With no system message it writes one of its own, as Qwen2.5's and SmolLM2's do.
CHATML = """
{%- for m in messages -%}
{%- if loop.first and m.role != 'system' -%}
<|im_start|>system\nAlways be brief.<|im_end|>\n{% endif -%}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
""".replace("system\\n", "system\n")

# Keeps an empty thought in turns after the last question only, as Qwen3.5's does.
THINKS_SINCE = """
{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' and loop.index0 > ns.last and '<think>' not in m.content -%}
{{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' + m.content + '<|im_end|>\n' -}}
{%- elif m.role == 'tool' -%}
{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' -}}
{%- else -%}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""

# Drops the thoughts of all turns before the last question, as Qwen3's does; wraps tool output.
STRIPS_THOUGHTS = """
{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' -}}
{%- elif m.role == 'assistant' and loop.index0 < ns.last -%}
{{- '<|im_start|>assistant\n' + m.content.split('</think>')[-1].lstrip('\n') + '<|im_end|>\n' -}}
{%- else -%}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""

# Writes the tools it is given behind the system message, and has a switch for thoughts.
KNOWS_TOOLS = """
{%- for m in messages -%}
{%- if loop.first and tools -%}
{{- '<|im_start|>system\n' + m.content + '\n\nTools:' -}}
{%- for tool in tools -%}{{- '\n' + (tool | tojson) -}}{%- endfor -%}
{{- '\nCall one by <tool_call>{"name": ...}</tool_call>.<|im_end|>\n' -}}
{%- elif m.role == 'tool' -%}
{{- '<|im_start|>user\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' -}}
{%- else -%}
{{- '<|im_start|>' + m.role + '\n' + m.content.split('</think>')[-1] + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}
{{- '<think>\n\n</think>\n\n' -}}
{%- endif -%}
{%- endif -%}
"""

# As above, but the tools stand before the newest message of the user, wherever that is.
MOVES_TOOLS = """
{%- for m in messages -%}
{%- if loop.last and tools -%}
{{- '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' -}}
{%- endif -%}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""

# Starts the model inside a thought, and writes an empty one into past turns that have none.
OPENS_THOUGHT = """
{%- for m in messages -%}
{%- if m.role == 'assistant' and '</think>' not in m.content -%}
{{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' + m.content + '<|im_end|>\n' -}}
{%- else -%}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>\n' -}}{%- endif -%}
"""

# Strips contents and has no ChatML tokens, as Llama 3's; tool output is written as JSON.
LLAMA_SPECIALS = ("<|begin|>", "<|eot|>", "<|start_header|>", "<|end_header|>")
LLAMA_LIKE = """
{{- '<|begin|>' -}}
{%- for m in messages -%}
{%- set said = (m.content | tojson) if m.role == 'tool' else (m.content | trim) -%}
{{- '<|start_header|>' + m.role + '<|end_header|>\n\n' + said + '<|eot|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header|>assistant<|end_header|>\n\n' -}}
{%- endif -%}
"""

# Writes the number of messages into the first one: every turn changes what came before.
REWRITES_THE_PAST = """
{%- for m in messages -%}
{{- '<|im_start|>' + m.role -}}
{%- if loop.first -%}{{- ' of ' ~ messages | length -}}{%- endif -%}
{{- '\n' + m.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


@functools.cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return str(tokenizer.to_str())


def build(
    template: str | None,
    specials: Sequence[str | AddedToken] = CHATML_SPECIALS,
    marks: Sequence[str] = CHATML_MARKS,
    eos: str | None = None,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with merges over blanks and newlines, and this template."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_trained()))
    tokens = [t if isinstance(t, AddedToken) else AddedToken(t, special=True) for t in specials]
    tokenizer.add_tokens(tokens, special_tokens=True)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in marks])
    tokenizer.chat_template = template
    if eos:
        tokenizer.eos_token = eos
    return tokenizer


def _chatml(turns: Turns) -> str:
    return "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in turns)


def write_chatml(turns: Turns) -> str:
    return _chatml(turns) + "<|im_start|>assistant\n"


def write_wrapped(turns: Turns) -> str:
    wrapped = [
        ("user", f"<tool_response>\n{said}\n</tool_response>") if role == "tool" else (role, said)
        for role, said in turns
    ]
    return write_chatml(wrapped)


def write_opened(turns: Turns) -> str:
    opened = [(role, f"<think>\n{said}" if role == "assistant" else said) for role, said in turns]
    return write_chatml(opened) + "<think>\n"


def write_llama(turns: Turns) -> str:
    body = "".join(
        f"<|start_header|>{role}<|end_header|>\n\n"
        f"{said if role == 'assistant' else said.strip()}<|eot|>"
        for role, said in turns
    )
    return f"<|begin|>{body}<|start_header|>assistant<|end_header|>\n\n"


@dataclass(frozen=True)
class Sample:
    """A tokenizer, how its conversations are written, and the roles it can be bridged with."""

    tokenizer: Callable[[], PreTrainedTokenizerFast]
    write: Callable[[Turns], str]
    roles: tuple[str, ...]
    source: str = "template"


SAMPLES = {
    "chatml": Sample(lambda: build(CHATML), write_chatml, ("user", "tool")),
    "strips thoughts": Sample(lambda: build(STRIPS_THOUGHTS), write_wrapped, ("user", "tool")),
    "thinks since": Sample(lambda: build(THINKS_SINCE), write_wrapped, ("user", "tool")),
    "opens thought": Sample(lambda: build(OPENS_THOUGHT), write_opened, ("user", "tool")),
    "llama": Sample(lambda: build(LLAMA_LIKE, LLAMA_SPECIALS, ()), write_llama, ("user",)),
    "fallback": Sample(lambda: build(REWRITES_THE_PAST), write_chatml, ("user",), "chatml"),
    "no template": Sample(lambda: build(None), write_chatml, ("user",), "chatml"),
}
