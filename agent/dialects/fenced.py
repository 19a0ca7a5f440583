"""Calls written as a fenced block whose first line names the tool: the shortest form there is.

    ```edit shop/money.py 3 4
    new lines
    ```

A tool may have tags of its own besides its name: where `python` is one of `define`, the code block
that a small model writes anyway is the call.

The words after the name are the arguments, in the order of the tool's form (required ones first)
or as `key=value`; the lines of the block are the argument named `text` or `command`, as they are.
A model that has seen Markdown closes such a block reliably, where it forgets tags.

How a turn is read:

- The first block whose first word is a tool's name or tag is the call; other blocks are part of the
  thought. What follows the call is kept as `ignored` and never run.
- A tool without arguments may also be named alone: in a block of another tag, as a block of one
  line, or as the last line of a reply without any block.
- The block ends at a line that is a fence of at least as many backticks and nothing else, so that a
  longer fence holds text with shorter ones.
- Nothing between `<think>` and `</think>` is a call, nor anything after a `<think>` left open.
- A block that is not closed is an error, never a guess.
- With `only`, a reply is read to its end, and a second block that names a tool is an error.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.dialects.base import (
    Call,
    FormatError,
    FormatErrorKind,
    ParsedTurn,
    ToolForm,
    by_name,
)

BODIES = ("text", "command")  # parameters that are written as the block's lines

_FENCE = re.compile(r"^[ ]{0,3}(?P<ticks>`{3,})[ \t]*(?P<info>[^`\n]*)$", re.MULTILINE)
_BARE = re.compile(r"(?:.*\n)?\s*(?P<call>`{0,3}(?P<name>[A-Za-z_]\w*)`{0,3})[.!]?\s*", re.DOTALL)
_KEYED = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Block:
    """A fenced block: its first line's words, its lines; `end` is None when it is not closed."""

    start: int
    end: int | None
    info: str
    body: str


class FencedCalls:
    """The dialect. `forms` are the tools a call may name; `tags` further first words for a tool,
    of which the first is the one that calls are written with.

    `opens_in_thought`: the generation prompt already ends with `<think>`, so a turn starts inside
    a thought.
    """

    name = "fenced"

    def __init__(
        self,
        forms: Sequence[ToolForm],
        *,
        tags: Mapping[str, Sequence[str]] | None = None,
        only: bool = False,
        opens_in_thought: bool = False,
    ) -> None:
        self._forms = by_name(forms)
        self._tag = {form.name: form.name for form in forms}
        self._by_tag = dict(self._forms)
        for tool, words in (tags or {}).items():
            for word in words:
                if self._by_tag.setdefault(word, self._forms[tool]) is not self._forms[tool]:
                    raise ValueError(f"two tools share the tag {word!r}")
            if words:
                self._tag[tool] = words[0]
        for form in forms:
            bodies = [name for name in form.parameters if name in BODIES]
            if len(bodies) > 1:
                raise ValueError(f"tool {form.name!r} has two parameters for one block: {bodies}")
        self._only = only
        self._opens_in_thought = opens_in_thought

    @property
    def format_help(self) -> str:
        return (
            "A call is a block between two lines of three backticks. Its first line is the name of "
            "the function and its arguments; the lines of the block are the text or command, "
            "exactly as they should be. Every reply has one such block, at its end."
        )

    def stop(self, text: str) -> bool:
        # Only a line that is over is a closing fence: "```" may yet become "```python".
        if self._only or not text.endswith("\n") or text.count("```") < 2:
            return False
        block = self._call_block(text)
        return block is not None and block.end is not None

    def parse(self, text: str) -> ParsedTurn:
        block = self._call_block(text)
        if block is None:
            return ParsedTurn(text.strip(), error=self._no_call(text))
        thought = text[: block.start].strip()
        if block.end is None:
            name = _first_word(block.info)
            problem = (
                f"The block of {name} is not closed, so nothing was run. "
                "If the reply was too long, do the work in smaller steps."
            )
            tool = self._by_tag[name].name
            return ParsedTurn(thought, error=self._error(FormatErrorKind.UNCLOSED, problem, tool))
        ignored = text[block.end :].strip()
        if self._only and self._call_block(text, block.end) is not None:
            problem = "The reply holds more than one call, so none of them was run."
            error = self._error(
                FormatErrorKind.AMBIGUOUS, problem, self._by_tag[_first_word(block.info)].name
            )
            return ParsedTurn(thought, error=error, ignored=ignored)
        call = self._call(block, text[block.start : block.end])
        if isinstance(call, FormatError):
            return ParsedTurn(thought, error=call, ignored=ignored)
        return ParsedTurn(thought, call=call, ignored=ignored)

    def render(self, call: Call) -> str:
        form = self._forms.get(call.name)
        if form is None:
            raise ValueError(f"{call.name!r} is none of the tools: {', '.join(self._forms)}")
        words, given = [self._tag[call.name]], dict(call.arguments)
        body = next((given.pop(name) for name in BODIES if name in given), None)
        gap = False
        for key in self._words(form):
            if key not in given:
                gap = True
                continue
            value = given.pop(key)
            quoted = shlex.quote(value)
            words.append(f"{key}={quoted}" if gap or _KEYED.fullmatch(value) else quoted)
        if given:
            raise ValueError(f"{call.name} has no parameter {', '.join(given)}")
        longest = max((len(ticks) for ticks in re.findall(r"`{3,}", body or "")), default=2)
        fence = "`" * (longest + 1)
        lines = [f"{fence}{' '.join(words)}", *([] if body is None else [body]), fence]
        text = "\n".join(lines)
        back = self.parse(text).call
        if back is None or (back.name, dict(back.arguments)) != (call.name, dict(call.arguments)):
            raise ValueError(f"the call of {call.name!r} cannot be written as a block: {text!r}")
        return text

    # Reading

    def _call_block(self, text: str, start: int = 0) -> _Block | None:
        """The first block from `start` on, outside thoughts, that names a tool."""
        position = text.rfind("</think>") + len("</think>") if "</think>" in text else 0
        position = max(position, start)
        if not position and self._opens_in_thought:
            return None
        thinking = text.find("<think>", position)
        limit = len(text) if thinking < 0 else thinking
        while True:
            opening = _FENCE.search(text, position)
            if opening is None or opening.start() >= limit:
                return self._bare_name(text, position, limit)
            block = _read_block(text, opening)
            if _first_word(block.info) in self._by_tag:
                return block
            if block.end is None:
                # A bare fence that opens nothing: the call may stand behind it.
                position = opening.end()
            else:
                position = block.end

    def _bare_name(self, text: str, position: int, limit: int) -> _Block | None:
        """A tool without parameters named in one line of its own, if that is all that is left."""
        match = _BARE.fullmatch(text[position:limit])
        if match is None or match["name"] not in self._by_tag:
            return None
        if self._by_tag[match["name"]].required:
            return None
        return _Block(position + match.start("call"), limit, match["name"], "")

    def _call(self, block: _Block, raw: str) -> Call | FormatError:
        kind = FormatErrorKind
        try:
            words = shlex.split(block.info)
        except ValueError:  # a quote that is not closed
            words = block.info.split()
        form = self._by_tag[_first_word(block.info)]
        named = self._by_tag.get(block.body.strip())
        if named is not None and not named.parameters:  # "submit" inside a block of another tag
            return Call(named.name, {}, raw)
        keys = self._words(form)
        arguments: dict[str, str] = {}
        free = list(keys)
        for word in words[1:]:
            keyed = _KEYED.fullmatch(word)
            if keyed and keyed[1] in form.parameters:
                key, value = keyed[1], keyed[2]
            elif free:
                key, value = free[0], word
            else:
                takes = " ".join(keys) or "no arguments"
                problem = f"{form.name} takes {takes} in its first line; {word!r} is too much."
                return self._error(kind.UNKNOWN_PARAMETER, problem, form.name)
            if key in arguments:
                problem = f"{form.name} was given {key} more than once."
                return self._error(kind.DUPLICATE_PARAMETER, problem, form.name)
            arguments[key] = value
            if key in free:
                free.remove(key)
        body = self._body(form)
        if body is not None and body not in arguments and (block.body or body in form.required):
            arguments[body] = block.body
        elif body is None and block.body.strip():
            problem = f"{form.name} takes no lines in its block."
            return self._error(kind.UNKNOWN_PARAMETER, problem, form.name)
        if missing := form.missing(arguments):
            problem = f"{form.name} needs {', '.join(missing)}."
            return self._error(kind.MISSING_PARAMETER, problem, form.name)
        return Call(form.name, arguments, raw)

    def _words(self, form: ToolForm) -> list[str]:
        """Parameters that stand in the first line, in order."""
        return [name for name in form.parameters if name not in BODIES]

    def _body(self, form: ToolForm) -> str | None:
        return next((name for name in form.parameters if name in BODIES), None)

    def _no_call(self, text: str) -> FormatError:
        kind = FormatErrorKind
        thinking = text.rfind("<think>") > text.rfind("</think>")
        if thinking or (self._opens_in_thought and "</think>" not in text):
            problem = "The reply ended inside <think>, so nothing was run. Close it with </think>."
            return self._error(kind.INSIDE_THINK, problem)
        if any(_first_word(block.info) in self._by_tag for block in _blocks(text)):
            problem = "A call inside <think> is never run. Write it after </think>."
            return self._error(kind.INSIDE_THINK, problem)
        names = ", ".join(self._tag.values())
        found = [match["info"].split()[:1] for match in _FENCE.finditer(text)]
        others = sorted({words[0] for words in found if words})
        if others:
            problem = (
                f"The reply holds a block of {', '.join(others)}, but no call. "
                f"The first line of the block must name a function: {names}."
            )
            return self._error(kind.UNKNOWN_TOOL, problem)
        return self._error(kind.NO_CALL, f"The reply holds no call. The functions are: {names}.")

    def _error(self, kind: FormatErrorKind, problem: str, tool: str | None = None) -> FormatError:
        form = self._forms.get(tool or "") or next(iter(self._forms.values()))
        keys = self._words(form)
        words = [key.upper() if key in form.required else f"[{key.upper()}]" for key in keys]
        body = self._body(form)
        lines = [f"```{' '.join([self._tag[form.name], *words])}"]
        lines += [] if body is None else [f"({body})"]
        shown = "\n".join([*lines, "```"])
        return FormatError(kind, f"{problem}\nWrite one call, in this form:\n{shown}")


def _first_word(info: str) -> str:
    return (info.split() or [""])[0]


def _blocks(text: str) -> list[_Block]:
    return [_read_block(text, opening) for opening in _FENCE.finditer(text)]


def _read_block(text: str, opening: re.Match[str]) -> _Block:
    """The block that `opening` begins, up to the fence that closes it."""
    info = opening["info"].strip()
    start = opening.end() + 1
    for closing in _FENCE.finditer(text, start):
        if not closing["info"].strip() and len(closing["ticks"]) >= len(opening["ticks"]):
            body = text[start : closing.start()]
            return _Block(opening.start(), closing.end(), info, body.removesuffix("\n"))
    return _Block(opening.start(), None, info, text[start:])
