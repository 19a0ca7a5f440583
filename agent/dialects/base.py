"""How a model writes a tool call as text, and what reading its turn gives.

A dialect reads text only; it runs nothing and knows no tool beyond the `ToolForm`s it was given.
Reading never guesses: a turn gives exactly one call, or one `FormatError` whose message shows the
right form, ready to be sent back to the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ToolForm:
    """The name of a tool and of its parameters, as a call has to write them."""

    name: str
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()

    @property
    def parameters(self) -> tuple[str, ...]:
        return self.required + self.optional


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
