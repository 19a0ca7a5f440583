"""What a tool is: a function from a workspace and a call's arguments to an observation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from agent.tools.workspace import Workspace

_RANGE = re.compile(r"(\d+)\s*[-:]\s*(\d+)")


class ToolError(Exception):
    """The call cannot be done as written. The text, for the model, says why and what to do."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What the model is shown after a call."""

    text: str
    changed: bool = False  # whether files may have changed
    final: bool = False  # whether the model hands in its work
    exit_code: int = 0  # of the command that was run, where the tool runs one


class Tool(Protocol):
    """One tool. Arguments are strings, as the model wrote them."""

    def __call__(self, workspace: Workspace, arguments: Mapping[str, str]) -> Observation:
        """Do the call. Raises ToolError for what the model can mend, SandboxLost at the end."""
        ...


def line_number(arguments: Mapping[str, str], name: str) -> int | None:
    """A line number among the arguments, or None where it is absent or empty.

    Raises ToolError when it is no whole number above zero.
    """
    text = arguments.get(name, "").strip().rstrip("|:")
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or int(text[:9]) < 1:
        raise ToolError(f"{name} must be a line number, 1 or more; got {text[:40]!r}.")
    return int(text[:9])


def with_range(arguments: Mapping[str, str]) -> Mapping[str, str]:
    """Arguments in which a `start` written as a range ("12-14") is split into `start` and `end`."""
    match = _RANGE.fullmatch(arguments.get("start", "").strip())
    if match is None or arguments.get("end", "").strip():
        return arguments
    return {**arguments, "start": match[1], "end": match[2]}


def numbers(arguments: Mapping[str, str], name: str, count: int) -> tuple[int, ...] | None:
    """`count` whole numbers among the arguments ("[3, 9]", "3 9"), or None where absent or empty.

    Raises ToolError when they are others, or not so many.
    """
    text = arguments.get(name, "").strip()
    if not text:
        return None
    words = re.split(r"[\s,;:]+", text.strip("[]() "))
    if len(words) != count or not all(re.fullmatch(r"-?[0-9]{1,9}", word) for word in words):
        form = "a whole number" if count == 1 else f"{count} whole numbers such as [11, 25]"
        raise ToolError(f"{name} must be {form}; got {text[:40]!r}.")
    return tuple(int(word) for word in words)


def required(arguments: Mapping[str, str], name: str) -> str:
    """An argument that must be there and not be blank. Raises ToolError."""
    text = arguments.get(name, "")
    if not text.strip():
        raise ToolError(f"{name} is missing.")
    return text
