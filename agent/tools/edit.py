"""`edit`: replace a range of lines, insert lines, or make a new file."""

from __future__ import annotations

from collections.abc import Mapping

from agent.tools.base import Observation, ToolError, line_number, required, with_range
from agent.tools.editing import (
    first_that_parses,
    open_source,
    refuse_elision,
    shown_change,
    wanted_indent,
    write_change,
)
from agent.tools.indent import candidates, indent_unit
from agent.tools.text import SourceText, written_lines
from agent.tools.workspace import Workspace
from environments.base import SandboxFileError


def edit(workspace: Workspace, arguments: Mapping[str, str]) -> Observation:
    """Replace lines `start`..`end` of `path` by `text`; an empty `text` deletes them.

    `end` left out means `start`; `end` = `start` - 1 inserts before `start`. Without `start` a file
    that does not exist is made. Indentation is mended, syntax errors in Python are refused.
    """
    path = workspace.path(required(arguments, "path"))
    new = written_lines(arguments.get("text", ""))
    arguments = with_range(arguments)
    start = line_number(arguments, "start")
    if start is None:
        return _create(workspace, path, new)
    path = workspace.existing(path)
    before = open_source(workspace, path)
    end = start if not arguments.get("end", "").strip() else _end(arguments, start)
    if start > len(before) + 1 or end > len(before):
        raise ToolError(
            f"{path} has {len(before)} lines; lines {start} to {end} are not all there."
        )
    old = before.bare(start, end) if end >= start else []
    refuse_elision(new, old)
    start, end, new = _without_overlap(before, start, end, new)
    indent = wanted_indent(before, start, end)
    ways = [new] if not new else list(candidates(new, indent, indent_unit(before.bare())))
    after = first_that_parses(path, before, (before.replace(start, end, way) for way in ways))
    write_change(workspace, path, before, after)
    return shown_change(path, after, start, len(new), "")


def _end(arguments: Mapping[str, str], start: int) -> int:
    text = arguments["end"].strip()
    if text == "0" and start == 1:
        return 0
    end = line_number(arguments, "end")
    if end is None or end < start - 1:
        raise ToolError(f"end ({text}) must not be before start ({start}).")
    return end


def _create(workspace: Workspace, path: str, new: list[str]) -> Observation:
    try:
        existing = workspace.read(path)
    except SandboxFileError:
        existing = SourceText(())
    except ValueError as error:
        raise ToolError(f"{path} cannot be edited: {error}.") from error
    if len(existing):
        raise ToolError(
            f"{path} exists and has {len(existing)} lines: give start and end, "
            "the lines to be replaced."
        )
    after = SourceText(tuple(line + "\n" for line in new))
    first_that_parses(path, existing, [after])
    write_change(workspace, path, existing, after)
    return Observation(f"{path} was made, {len(after)} lines.", changed=True)


def _without_overlap(
    before: SourceText, start: int, end: int, new: list[str]
) -> tuple[int, int, list[str]]:
    """Drop lines of `new` that only repeat what stands right before or after the range.

    A model that is asked for lines 10 to 12 often writes a line or two around them as well, which
    would double them. Only whole, telling lines count: at least two of them, or one that is long.
    """

    def telling(lines: list[str]) -> bool:
        words = [line.strip() for line in lines if len(line.strip()) > 4]
        return len(words) >= 2 or any(len(word) > 12 for word in words)

    stripped = [line.rstrip() for line in new]
    above, below = before.bare(1, start - 1), before.bare(end + 1)
    for count in range(min(len(new) - 1, len(above), 8), 0, -1):
        if stripped[:count] == [line.rstrip() for line in above[-count:]] and telling(new[:count]):
            new, stripped = new[count:], stripped[count:]
            break
    for count in range(min(len(new) - 1, len(below), 8), 0, -1):
        if stripped[-count:] == [line.rstrip() for line in below[:count]] and telling(new[-count:]):
            new = new[:-count]
            break
    return start, end, new
