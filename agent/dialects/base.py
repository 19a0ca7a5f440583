"""How a model writes a tool call as text, and what reading its turn gives.

A dialect reads text only; it runs nothing and knows no tool beyond the `ToolForm`s it was given.
Reading never guesses: a turn gives exactly one call, or one `FormatError` whose message shows the
right form, ready to be sent back to the model.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

_BLANKS = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class ToolForm:
    """The name of a tool and of its parameters, as a call has to write them."""

    name: str
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    @property
    def parameters(self) -> tuple[str, ...]:
        return self.required + self.optional

    def missing(self, given: Container[str]) -> list[str]:
        """The parameters that a call needs and that are not given."""
        return [key for key in self.required if key not in given]


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call: argument values exactly as written; `raw` is the text it was read from."""

    name: str
    arguments: Mapping[str, str]
    raw: str = ""


class FormatErrorKind(StrEnum):
    """Why a turn holds no call that can be run."""

    NO_CALL = "no_call"
    INSIDE_THINK = "inside_think"
    UNCLOSED = "unclosed"
    MALFORMED = "malformed"
    AMBIGUOUS = "ambiguous"
    UNKNOWN_TOOL = "unknown_tool"
    UNKNOWN_PARAMETER = "unknown_parameter"
    DUPLICATE_PARAMETER = "duplicate_parameter"
    MISSING_PARAMETER = "missing_parameter"


@dataclass(frozen=True, slots=True)
class FormatError:
    """A turn that cannot be run; `message` is written for the model and shows the right form."""

    kind: FormatErrorKind
    message: str


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A model's turn. Exactly one of `call` and `error` is set.

    `thought` is the text before the call (the whole turn when there is none); `ignored` is what
    followed the call and is never run, further calls included.
    """

    thought: str
    call: Call | None = None
    error: FormatError | None = None
    ignored: str = ""

    def __post_init__(self) -> None:
        if (self.call is None) == (self.error is None):
            raise ValueError("a parsed turn holds either a call or an error")


class Dialect(Protocol):
    """One way of writing tool calls as text."""

    @property
    def name(self) -> str: ...

    @property
    def format_help(self) -> str:
        """The syntax and its rules in a few lines, for a system prompt."""
        ...

    def stop(self, text: str) -> bool:
        """Whether `text`, a turn being decoded, holds a complete call, so that decoding can end."""
        ...

    def parse(self, text: str) -> ParsedTurn:
        """Read a whole turn. Never raises for what a model wrote."""
        ...

    def render(self, call: Call) -> str:
        """Write a call so that `parse` gives it back; `ValueError` if the syntax cannot hold it."""
        ...


# What dialects have in common. A fault is its kind and what is wrong, in a sentence.

Fault = tuple[FormatErrorKind, str]


def by_name(forms: Sequence[ToolForm]) -> dict[str, ToolForm]:
    """The forms by the names of their tools. Raises ValueError where two share one."""
    found = {form.name: form for form in forms}
    if len(found) != len(forms):
        raise ValueError(f"two tools share a name: {[form.name for form in forms]}")
    return found


def tool_fault(name: str, forms: Mapping[str, ToolForm]) -> Fault | None:
    """What is wrong with a call of this name. Where there are no forms, every name will do."""
    if name in forms or not forms:
        return None
    known = ", ".join(forms)
    problem = f"There is no function {name!r}. The functions are: {known}."
    return FormatErrorKind.UNKNOWN_TOOL, problem


def parameter_fault(form: ToolForm, named: Iterable[str], given: Container[str]) -> Fault | None:
    """What is wrong with a call's parameters: those it names, and those of them with a value."""
    unknown = [key for key in named if key not in form.parameters]
    if unknown:
        takes = ", ".join(form.parameters) or "no parameters"
        problem = f"{form.name} has no parameter {', '.join(unknown)}. It takes: {takes}."
        return FormatErrorKind.UNKNOWN_PARAMETER, problem
    missing = form.missing(given)
    if missing:
        problem = f"{form.name} needs the parameter {', '.join(missing)}."
        return FormatErrorKind.MISSING_PARAMETER, problem
    return None


def with_form(
    kind: FormatErrorKind, problem: str, form: ToolForm | None, shown: str
) -> FormatError:
    """The error that shows the form of a call: that of the tool that was meant, if it is known."""
    message = f"{problem}\nWrite exactly one call, in this form:\n{shown}"
    if form and form.optional:
        message += f"\n{form.name} may also take: {', '.join(form.optional)}."
    return FormatError(kind, message)


def skip_blanks(text: str, position: int) -> int:
    """Where the text goes on after blanks."""
    match = _BLANKS.match(text, position)
    return match.end() if match else position
