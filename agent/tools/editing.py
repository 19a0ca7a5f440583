"""What the editing tools share: checking a change, writing it, and showing it."""

from __future__ import annotations

import re
from collections.abc import Iterable

from agent.tools.base import Observation, ToolError
from agent.tools.indent import indent_of
from agent.tools.syntax import syntax_fault
from agent.tools.text import SourceText
from agent.tools.workspace import Workspace
from environments.base import SandboxFileError

_ELISION = re.compile(
    r"^\s*(#|//)?\s*\.\.\.\s*((#|//).*)?$"
    r"|^\s*(#|//)\s*(\.\.\.|…|(the )?(rest|remaining|remainder|existing|other|previous|same)\b"
    r".*\b(code|function|method|class|lines?|implementation|unchanged|here|before)\b)",
    re.IGNORECASE,
)
_CONTEXT = 3  # lines shown around a change


def open_source(workspace: Workspace, path: str) -> SourceText:
    """A text file for a tool. Raises ToolError where there is none."""
    try:
        return workspace.read(path)
    except SandboxFileError as error:
        raise ToolError(f"{path}: {error}") from error
    except ValueError as error:
        raise ToolError(f"{path} cannot be shown or edited: {error}.") from error


def refuse_elision(new: list[str], old: list[str]) -> None:
    """Refuse text that stands for code it leaves out ("... rest of the code"). Raises ToolError."""
    kept = {line.strip() for line in old}
    for line in new:
        if _ELISION.match(line) and line.strip() not in kept:
            raise ToolError(
                f"Nothing was changed: the line {line.strip()!r} stands for code that is left out. "
                "Write all lines in full, or edit fewer lines."
            )


def first_that_parses(path: str, before: SourceText, ways: Iterable[SourceText]) -> SourceText:
    """The first way of writing a change that keeps a Python file parseable.

    Files of other languages, and files that did not parse before (they may be written for another
    Python), take the first way as it is. Raises ToolError with the fault of the first way.
    """
    ways = list(ways)
    if not path.endswith((".py", ".pyi")) or syntax_fault(before.encode()) is not None:
        return ways[0]
    for way in ways:
        if syntax_fault(way.encode()) is None:
            return way
    fault = syntax_fault(ways[0].encode())
    if fault is None:
        return ways[0]
    start, end = max(1, fault.line - _CONTEXT), min(len(ways[0]), fault.line + _CONTEXT)
    raise ToolError(
        f"Nothing was changed, since {path} would not parse any more: {fault.message} "
        f"in line {fault.line}. It would have read:\n{ways[0].numbered(start, end)}"
    )


def write_change(workspace: Workspace, path: str, before: SourceText, after: SourceText) -> None:
    """Write a changed file. Raises ToolError when nothing changed or it cannot be written."""
    if after.lines == before.lines:
        raise ToolError("Nothing was changed: the new text equals what is there already.")
    write_source(workspace, path, after)


def write_source(workspace: Workspace, path: str, source: SourceText) -> None:
    """Write a text file for a tool. Raises ToolError where it cannot be written."""
    try:
        workspace.write(path, source)
    except SandboxFileError as error:
        raise ToolError(f"{path} cannot be written: {error}") from error


def shown_change(path: str, after: SourceText, start: int, count: int, note: str) -> Observation:
    """The lines around a change with their new numbers. `count` lines from `start` are new."""
    first = max(1, start - _CONTEXT)
    last = min(len(after), start + max(count, 1) - 1 + _CONTEXT)
    if last - first > 60:
        middle = f"\n[... {count} lines in all ...]\n"
        lines = after.numbered(first, first + 20) + middle + after.numbered(last - 20, last)
    else:
        lines = after.numbered(first, last)
    text = f"{path} now reads:\n{lines}" if len(after) else f"{path} is now empty."
    return Observation(f"{text}\n{note}" if note else text, changed=True)


def wanted_indent(source: SourceText, start: int, end: int) -> str:
    """The indentation a change of lines `start`..`end` is expected to begin with."""
    for line in source.bare(start, end):
        if line.strip():
            return indent_of(line)
    for line in source.bare(start):  # an insertion: like the line it pushes down
        if line.strip():
            return indent_of(line)
    return ""
