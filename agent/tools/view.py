"""`view`: lines of a file with their numbers, its outline, or a folder."""

from __future__ import annotations

from collections.abc import Mapping

from agent.tools.base import Observation, ToolError, line_number, required, with_range
from agent.tools.definitions import definitions
from agent.tools.editing import open_source
from agent.tools.text import SourceText, clip
from agent.tools.workspace import Workspace

_FIRST_LINES = 40  # shown of a long file that has no outline


def view(workspace: Workspace, arguments: Mapping[str, str]) -> Observation:
    """Lines `start`..`end` of `path`; without them a short file whole, a long one as an outline."""
    path = workspace.existing(required(arguments, "path"))
    arguments = with_range(arguments)
    start, end = line_number(arguments, "start"), line_number(arguments, "end")
    if is_folder(workspace, path):
        return Observation(clip(folder_listing(workspace, path), workspace.observation_chars))
    source = open_source(workspace, path)
    if start is None and end is None and len(source) > workspace.view_lines:
        return Observation(clip(_outline(path, source), workspace.observation_chars))
    start = start or 1
    if start > len(source):
        raise ToolError(f"{path} has {len(source)} lines.")
    end = min(len(source), end or start + workspace.view_lines - 1)
    if end < start:
        raise ToolError(f"end ({end}) is before start ({start}).")
    last = min(end, start + workspace.view_lines - 1)
    text = f"{path}, lines {start} to {last} of {len(source)}:\n{source.numbered(start, last)}"
    return Observation(clip(text, workspace.observation_chars))


def _outline(path: str, source: SourceText) -> str:
    """Definitions of a Python file, or the first lines of any other."""
    found = definitions(path, source)
    if not found:
        shown = source.numbered(1, _FIRST_LINES)
        return f"{path}, lines 1 to {_FIRST_LINES} of {len(source)}:\n{shown}"
    lines = source.bare()
    rows = [
        f"{item.start}-{item.end}|{'  ' * item.name.count('.')}{lines[item.header - 1].strip()}"
        for item in found
    ]
    head = f"{path} has {len(source)} lines; give start and end to see some:"
    return "\n".join([head, *rows])


def is_folder(workspace: Workspace, path: str) -> bool:
    """Whether the path is a folder of the sandbox."""
    return workspace.run(["test", "-d", path]).exit_code == 0


def folder_listing(workspace: Workspace, path: str) -> str:
    """What lies in a folder, two levels deep, hidden files left out."""
    result = workspace.run(
        ["find", path, "-maxdepth", "2", "-not", "-path", "*/.*", "-not", "-name", "*.pyc"]
    )
    rows = sorted(row.removeprefix("./") for row in result.text.splitlines() if row != path)
    return "\n".join([f"{path}:", *rows])
