"""Calls written as `<function=NAME>` with one `<parameter=KEY>` each (R2E-Gym's syntax).

    <function=NAME>
    <parameter=KEY>VALUE</parameter>
    </function>

How a turn is read:

- One call a turn. What follows the first complete call is kept as `ignored` and never run.
- Nothing between `<think>` and `</think>` is a call, nor anything after a `<think>` left open, nor
  anything before a `</think>` that was never opened (some templates open it in the prompt).
- A value loses at most one newline on each side; every other character is kept.
- A value ends at the first `</parameter>` that is followed, blanks aside, by `<parameter=KEY>` or
  `</function>`; any other `</parameter>` belongs to the value. A whole call inside a value is part
  of the value, and so is a `</function>` that no `</parameter>` precedes.
- What could be read in two ways is an error: a value that swallowed the tag of another parameter,
  or a close left over after the call, which shows that a value held one and was cut there.

The one text a value cannot hold is `</parameter>` directly followed by an unmatched `</function>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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

_NAME = r"[A-Za-z_][\w.-]*"
_CLOSE = "</function>"
_PARAM = re.compile(rf"<parameter=({_NAME})>")
_OPEN = rf"<function={_NAME}>(?=\s*(?:<parameter={_NAME}>|</function>))"
_HEADER = re.compile(rf"<function=({_NAME})>")
_TOP = re.compile(
    rf"(?P<open>{_OPEN})|(?P<think><think>)|(?P<unthink></think>)"
    r"|(?P<stray></parameter>\s*</function>)"
)
_IN_VALUE = re.compile(
    rf"(?P<open>{_OPEN})|(?P<close></function>)|(?P<param><parameter={_NAME}>)"
    rf"|(?P<end></parameter>(?=\s*(?:<parameter={_NAME}>|</function>|\Z)))"
    r"|(?P<bad></parameter>\s*<parameter\b)"
)
_FENCE_BEFORE = re.compile(r"(?:^|\n)[ \t]*```[\w+-]*[ \t]*\n?\s*\Z")
_FENCE_AFTER = re.compile(r"\A\s*```[ \t]*(?=\n|\Z)")


@dataclass(frozen=True, slots=True)
class _Value:
    """A parameter's text and what was seen in it that may show a missing close tag."""

    key: str
    text: str
    inner_keys: tuple[str, ...]  # `<parameter=KEY>` tags inside the value, outside nested calls
    bad_tag: bool  # `</parameter>` followed by something like `<parameter ...>`


@dataclass(frozen=True, slots=True)
class _Found:
    """A call as it stands in the text; `end` is None when it is not closed."""

    name: str
    start: int
    end: int | None
    values: tuple[_Value, ...]
    open_key: str | None = None  # the parameter that was never closed


@dataclass(frozen=True, slots=True)
class _Scan:
    call: _Found | None
    left_in_think: bool  # the text ends inside a thought
    thought_spans: tuple[tuple[int, int], ...]
    stray_close: bool  # a close tag without a call after the first call
    several: bool = False  # another call follows the first


class XmlCalls:
    """The dialect. `forms` are the tools a call may name; none given accepts every name.

    `only`: a reply is read to its end, and a second call in it is an error.
    `opens_in_thought`: the generation prompt already ends with `<think>`, so a turn starts inside
    a thought.
    """

    name = "xml_calls"

    def __init__(
        self,
        forms: Sequence[ToolForm] = (),
        *,
        only: bool = False,
        opens_in_thought: bool = False,
    ) -> None:
        self._forms = by_name(forms)
        for form in forms:
            keys = form.parameters
            wrong = [name for name in (form.name, *keys) if not re.fullmatch(_NAME, name)]
            if wrong or len(set(keys)) != len(keys):
                raise ValueError(f"tool {form.name!r}: bad or repeated names in {keys} {wrong}")
        self._only = only
        self._opens_in_thought = opens_in_thought

    @property
    def format_help(self) -> str:
        return (
            "End every reply with exactly one function call, in this form:\n\n"
            "<function=NAME>\n<parameter=KEY>VALUE</parameter>\n</function>\n\n"
            "One <parameter> for each argument, every tag closed. A value of several lines stands "
            "between its tags with its indentation as it is; nothing in it is escaped."
        )

    def stop(self, text: str) -> bool:
        # Called for every token: the usual case costs one search.
        if self._only or _CLOSE not in text:
            return False
        call = self._scan(text).call
        return call is not None and call.end is not None

    def parse(self, text: str) -> ParsedTurn:
        scan = self._scan(text)
        found = scan.call
        if found is None:
            return ParsedTurn(text.strip(), error=self._no_call(text, scan))
        thought = _FENCE_BEFORE.sub("", text[: found.start]).strip()
        if found.end is None:
            return ParsedTurn(thought, error=self._unclosed(found))
        ignored = _FENCE_AFTER.sub("", text[found.end :]).strip()
        error = self._check(found, scan)
        if error is not None:
            return ParsedTurn(thought, error=error, ignored=ignored)
        call = Call(
            found.name,
            {value.key: value.text for value in found.values},
            text[found.start : found.end],
        )
        return ParsedTurn(thought, call=call, ignored=ignored)

    def render(self, call: Call) -> str:
        lines = [f"<function={call.name}>"]
        for key, value in call.arguments.items():
            inner = f"\n{value}\n" if "\n" in value else value
            lines.append(f"<parameter={key}>{inner}</parameter>")
        text = "\n".join([*lines, _CLOSE])
        back = XmlCalls().parse(text).call
        if back is None or (back.name, back.arguments) != (call.name, dict(call.arguments)):
            raise ValueError(
                f"the call of {call.name!r} cannot be written in this syntax: {text!r}"
            )
        return text

    # Reading

    def _scan(self, text: str) -> _Scan:
        position = 0
        first: _Found | None = None
        stray = several = False
        spans: list[tuple[int, int]] = []
        if self._opens_in_thought:
            end = text.find("</think>")
            if end < 0:
                return _Scan(None, True, ((0, len(text)),), False)
            position = end + len("</think>")
            spans.append((0, position))
        while match := _TOP.search(text, position):
            position = match.end()
            if match["think"]:
                end = text.find("</think>", position)
                if end < 0:
                    spans.append((match.start(), len(text)))
                    return _Scan(first, True, tuple(spans), stray, several)
                position = end + len("</think>")
                spans.append((match.start(), position))
            elif match["unthink"]:  # all before it was a thought, a call included
                first, stray, several = None, False, False
                spans = [(0, position)]
            elif match["stray"]:
                stray = stray or first is not None
            else:
                found = _read_call(text, match.start())
                several = first is not None
                first = first or found
                if found.end is None:
                    break
                position = found.end
        return _Scan(first, False, tuple(spans), stray, several)

    def _no_call(self, text: str, scan: _Scan) -> FormatError:
        kind = FormatErrorKind
        if scan.left_in_think:
            problem = "The reply ended inside <think>, so nothing was run. Close it with </think>."
            return self._error(kind.INSIDE_THINK, problem)
        outside = "".join(_outside(text, scan.thought_spans))
        header = _HEADER.search(outside)
        if header and not outside[header.end() :].strip():
            problem = f"The call of {header[1]} stops after its name; nothing was run."
            return self._error(kind.UNCLOSED, problem, header[1])
        if re.search(r"</?(?:function|parameter)\b", outside):
            problem = "The reply holds tags of a call but no call in the right form."
            return self._error(kind.MALFORMED, problem, header[1] if header else None)
        if _HEADER.search(text):
            problem = "A call inside <think> is never run. Write it after </think>."
            return self._error(kind.INSIDE_THINK, problem)
        return self._error(kind.NO_CALL, "The reply holds no function call.")

    def _unclosed(self, found: _Found) -> FormatError:
        what = f"parameter {found.open_key}" if found.open_key else "the function"
        problem = (
            f"The call of {found.name} is not complete: {what} is not closed, so nothing was run. "
            "If the reply was too long, do the work in smaller steps."
        )
        return self._error(FormatErrorKind.UNCLOSED, problem, found.name)

    def _check(self, found: _Found, scan: _Scan) -> FormatError | None:
        kind = FormatErrorKind
        form = self._forms.get(found.name)
        if self._only and scan.several:
            problem = "The reply holds more than one call, so none of them was run."
            return self._error(kind.AMBIGUOUS, problem)
        if (fault := tool_fault(found.name, self._forms)) is not None:
            return self._error(*fault)
        keys = [value.key for value in found.values]
        for value in found.values:
            lost = [
                key
                for key in value.inner_keys
                if key not in keys and (form is None or key in form.parameters)
            ]
            if lost or value.bad_tag:
                after = f"before <parameter={lost[0]}>" if lost else "or the next one is malformed"
                problem = f"Parameter {value.key} of {found.name} is not closed {after}."
                return self._error(kind.AMBIGUOUS, problem, found.name)
        if scan.stray_close:
            problem = (
                f"The call of {found.name} holds </parameter> followed by </function> inside a "
                "value, which ends it too early, so nothing was run. Write that text in two steps."
            )
            return self._error(kind.AMBIGUOUS, problem, found.name)
        repeated = sorted({key for key in keys if keys.count(key) > 1})
        if repeated:
            problem = f"{found.name} was given {', '.join(repeated)} more than once."
            return self._error(kind.DUPLICATE_PARAMETER, problem, found.name)
        if form is not None and (fault := parameter_fault(form, keys, keys)) is not None:
            return self._error(*fault, found.name)
        return None

    def _error(self, kind: FormatErrorKind, problem: str, tool: str | None = None) -> FormatError:
        form = self._forms.get(tool or "")
        name, keys = (form.name, form.required) if form else ("NAME", ("KEY",))
        lines = [f"<parameter={key}>VALUE</parameter>" for key in keys]
        shown = "\n".join([f"<function={name}>", *lines, _CLOSE])
        return with_form(kind, problem, form, shown)


def _read_call(text: str, start: int) -> _Found:
    """Read the call whose header stands at `start` (`_OPEN` matched there)."""
    header = _HEADER.match(text, start)
    if header is None:
        raise ValueError(f"no call at {start}")
    values: list[_Value] = []
    position = header.end()
    while True:
        position = skip_blanks(text, position)
        if text.startswith(_CLOSE, position):
            return _Found(header[1], start, position + len(_CLOSE), tuple(values))
        param = _PARAM.match(text, position)
        if param is None:
            return _Found(header[1], start, None, tuple(values))
        value, end = _read_value(text, param)
        if end is None:
            return _Found(header[1], start, None, tuple(values), param[1])
        values.append(value)
        position = end


def _read_value(text: str, param: re.Match[str]) -> tuple[_Value, int | None]:
    """The value after `param`, and where its `</parameter>` ends (None: it is not closed)."""
    depth = 0
    inner: list[str] = []
    bad = False
    for match in _IN_VALUE.finditer(text, param.end()):
        if match["open"]:
            depth += 1
        elif match["close"]:
            depth = max(0, depth - 1)
        elif depth:
            continue
        elif match["param"]:
            inner.append(match["param"][len("<parameter=") : -1])
        elif match["bad"]:
            bad = True
        else:
            body = text[param.end() : match.start()].removeprefix("\n").removesuffix("\n")
            return _Value(param[1], body, tuple(inner), bad), match.end()
    return _Value(param[1], "", tuple(inner), bad), None


def _outside(text: str, spans: Sequence[tuple[int, int]]) -> Iterator[str]:
    position = 0
    for start, end in spans:
        yield text[position:start]
        position = end
    yield text[position:]
