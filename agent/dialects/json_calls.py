"""Calls as JSON between `<tool_call>` tags: what the templates of Qwen2.5 and Qwen3 ask for.

    <tool_call>
    {"name": "NAME", "arguments": {"KEY": "VALUE"}}
    </tool_call>

How a turn is read:

- One call a turn. A reply with two is an error: which of them was meant first is not known.
- Nothing between `<think>` and `</think>` is a call, nor anything after a `<think>` left open, nor
  anything before a `</think>` that was never opened (some templates open it in the prompt).
- The JSON ends where its object ends, so a value may hold `</tool_call>` or any other tag.
- What is no JSON to the letter, and a call whose tag is not closed, is an error, never a guess.
- Tools take texts: numbers, true and false are written as JSON writes them, lists and objects as
  JSON; a null is an argument that was not given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agent.dialects.base import (
    Call,
    FormatError,
    FormatErrorKind,
    ParsedTurn,
    ToolForm,
    by_name,
    parameter_fault,
    skip_blanks,
    tool_fault,
    with_form,
)

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_TOP = re.compile(r"(?P<open><tool_call>)|(?P<think><think>)|(?P<unthink></think>)")


class _Repeated(ValueError):
    """A key that stands twice in one object."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A call as it stands in the text; `end` is None where it is not a whole one."""

    start: int
    end: int | None
    data: Any = None
    fault: str = ""  # why the JSON cannot be read
    closed: bool = False  # whether a closing tag follows at all


@dataclass(frozen=True, slots=True)
class _Scan:
    calls: tuple[_Found, ...]
    left_in_think: bool
    in_think: bool  # a call was written inside a thought


class JsonCalls:
    """The dialect. `forms` are the tools a call may name; none given accepts every name.

    `only`: decoding goes on after the first call (a second one is an error either way).
    `opens_in_thought`: the generation prompt already ends with `<think>`, so a turn starts inside
    a thought.
    """

    name = "json_calls"

    def __init__(
        self,
        forms: Sequence[ToolForm] = (),
        *,
        only: bool = False,
        opens_in_thought: bool = False,
    ) -> None:
        self._forms = by_name(forms)
        self._only = only
        self._opens_in_thought = opens_in_thought

    @property
    def format_help(self) -> str:
        return (
            "End every reply with exactly one function call, in this form:\n\n"
            f'{_OPEN}\n{{"name": "NAME", "arguments": {{"KEY": "VALUE"}}}}\n{_CLOSE}\n\n'
            "What stands between the tags is JSON: in a value of several lines each line end is "
            'written \\n, and each quote \\".'
        )

    def stop(self, text: str) -> bool:
        if self._only or _CLOSE not in text:  # called for every token: mostly one search
            return False
        calls = self._scan(text).calls
        return bool(calls) and calls[0].end is not None

    def parse(self, text: str) -> ParsedTurn:
        scan = self._scan(text)
        if not scan.calls:
            return ParsedTurn(text.strip(), error=self._no_call(text, scan))
        first = scan.calls[0]
        thought = text[: first.start].strip()
        if first.end is None:
            return ParsedTurn(thought, error=self._unreadable(first))
        ignored = text[first.end :].strip()
        if len(scan.calls) > 1:
            problem = "The reply holds more than one call, so none of them was run."
            error = self._error(FormatErrorKind.AMBIGUOUS, problem)
            return ParsedTurn(thought, error=error, ignored=ignored)
        call = self._call(first, text[first.start : first.end])
        if isinstance(call, FormatError):
            return ParsedTurn(thought, error=call, ignored=ignored)
        return ParsedTurn(thought, call=call, ignored=ignored)

    def render(self, call: Call) -> str:
        data = {"name": call.name, "arguments": dict(call.arguments)}
        text = f"{_OPEN}\n{json.dumps(data, ensure_ascii=False)}\n{_CLOSE}"
        back = JsonCalls().parse(text).call
        if back is None or (back.name, dict(back.arguments)) != (call.name, dict(call.arguments)):
            raise ValueError(f"the call of {call.name!r} cannot be written as JSON: {text!r}")
        return text

    # Reading

    def _scan(self, text: str) -> _Scan:
        calls: list[_Found] = []
        position, in_think = 0, False
        if self._opens_in_thought:
            end = text.find("</think>")
            if end < 0:
                return _Scan((), True, False)
            position = end + len("</think>")
            in_think = _OPEN in text[:position]
        while match := _TOP.search(text, position):
            position = match.end()
            if match["think"]:
                end = text.find("</think>", position)
                stop = len(text) if end < 0 else end
                in_think = in_think or _OPEN in text[position:stop]
                if end < 0:
                    return _Scan(tuple(calls), True, in_think)
                position = end + len("</think>")
            elif match["unthink"]:  # all before it was a thought, calls included
                in_think = in_think or bool(calls)
                calls = []
            else:
                found = _read_call(text, match)
                calls.append(found)
                position = found.end or position
        return _Scan(tuple(calls), False, in_think)

    def _no_call(self, text: str, scan: _Scan) -> FormatError:
        kind = FormatErrorKind
        if scan.left_in_think:
            problem = "The reply ended inside <think>, so nothing was run. Close it with </think>."
            return self._error(kind.INSIDE_THINK, problem)
        if scan.in_think:
            problem = "A call inside <think> is never run. Write it after </think>."
            return self._error(kind.INSIDE_THINK, problem)
        if _CLOSE in text:
            problem = f"{_CLOSE} stands there without {_OPEN} before it; nothing was run."
            return self._error(kind.MALFORMED, problem)
        return self._error(kind.NO_CALL, "The reply holds no function call.")

    def _unreadable(self, found: _Found) -> FormatError:
        if not found.closed:
            problem = (
                f"The call is not complete: there is no {_CLOSE}, so nothing was run. "
                "If the reply was too long, do the work in smaller steps."
            )
            return self._error(FormatErrorKind.UNCLOSED, problem)
        problem = f"The call is no valid JSON ({found.fault}), so nothing was run."
        return self._error(FormatErrorKind.MALFORMED, problem)

    def _call(self, found: _Found, raw: str) -> Call | FormatError:
        kind, data = FormatErrorKind, found.data
        if isinstance(data, _Repeated):
            return self._error(kind.DUPLICATE_PARAMETER, f"The call was given {data} twice.")
        if not isinstance(data, dict) or not isinstance(data.get("name"), str):
            problem = 'A call is a JSON object with a text as "name".'
            return self._error(kind.MALFORMED, problem)
        name, given = data["name"], data.get("arguments", {})
        if (fault := tool_fault(name, self._forms)) is not None:
            return self._error(*fault)
        extra = [key for key in data if key not in ("name", "arguments")]
        if extra or not isinstance(given, dict):
            problem = f'A call of {name} has "name" and "arguments", which is an object; no others.'
            return self._error(kind.MALFORMED, problem, name)
        arguments = {key: _text(value) for key, value in given.items() if value is not None}
        form = self._forms.get(name)
        if form is not None and (fault := parameter_fault(form, given, arguments)) is not None:
            return self._error(*fault, name)
        return Call(name, arguments, raw)

    def _error(self, kind: FormatErrorKind, problem: str, tool: str | None = None) -> FormatError:
        form = self._forms.get(tool or "")
        name, keys = (form.name, form.required) if form else ("NAME", ("KEY",))
        shown = json.dumps({"name": name, "arguments": dict.fromkeys(keys, "VALUE")})
        return with_form(kind, problem, form, f"{_OPEN}\n{shown}\n{_CLOSE}")


def _read_call(text: str, opening: re.Match[str]) -> _Found:
    """Read the call behind a `<tool_call>`."""
    start = opening.start()
    at = skip_blanks(text, opening.end())
    closed = text.find(_CLOSE, at) >= 0
    if text.startswith(_CLOSE, at):
        return _Found(start, None, fault="there is nothing between the tags", closed=True)
    try:
        data, end = _DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        fault = f"{error.msg} at character {error.pos - at} of it"
        return _Found(start, None, fault=fault, closed=closed)
    except _Repeated as error:
        # Which object it is in does not matter: the whole is read again for where it ends.
        _, end = json.JSONDecoder().raw_decode(text, at)
        data = error
    except (ValueError, RecursionError) as error:  # a number that is none, or too deep
        return _Found(start, None, fault=str(error), closed=closed)
    end = skip_blanks(text, end)
    if not text.startswith(_CLOSE, end):
        fault = f"{text[end : end + 20]!r} follows its object"
        return _Found(start, None, fault=fault, closed=closed)
    return _Found(start, end + len(_CLOSE), data)


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise _Repeated(", ".join(sorted({key for key in keys if keys.count(key) > 1})))
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_no_number)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
