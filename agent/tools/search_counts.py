"""`search_counts`: how often a text occurs, by file; in one file, where."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from agent.tools.base import Observation, ToolError, required
from agent.tools.text import clip
from agent.tools.view import is_folder
from agent.tools.workspace import Workspace

_FILES = 100  # with matches; more are not listed
_OUTPUT = 200_000  # bytes read of what grep finds
_LINE = 200  # characters shown of a line


def search_counts(workspace: Workspace, arguments: Mapping[str, str]) -> Observation:
    """Count lines with `search_term` (no pattern) under `path`; list them where it is a file."""
    term = required(arguments, "search_term").strip("\n")
    path = workspace.path(arguments.get("path", "") or ".")
    if is_folder(workspace, path):
        return _folder(workspace, term, path)
    result = workspace.run(["grep", "-naF", "-e", term, "--", path], output_cap=_OUTPUT)
    if result.exit_code > 1:
        raise ToolError(f"There is no file or folder {path}.")
    rows = [row[:_LINE] for row in result.text.splitlines()]
    if not rows:
        return Observation(f"No line of {path} has {term!r}.")
    head = f"Lines of {path} that have {term!r}:"
    return Observation(clip("\n".join([head, *rows]), workspace.observation_chars))


def _folder(workspace: Workspace, term: str, path: str) -> Observation:
    where = f"-e {shlex.quote(term)} -- {shlex.quote(path)}"
    # grep counts for every file of the tree; only those with a match leave the sandbox.
    command = f"grep -rcIF --exclude-dir=.git {where} | grep -v ':0$' | sort"
    result = workspace.run(command, output_cap=_OUTPUT)
    rows = [_row(line) for line in result.text.splitlines() if ":" in line]
    if result.timed_out:
        raise ToolError(f"The search took too long. Name a folder below {path}.")
    if not rows:
        return Observation(f"No file in {path} has {term!r}.")
    if len(rows) > _FILES or result.omitted:
        raise ToolError(
            f"{term!r} is in more than {_FILES} files of {path}. Narrow the search: a longer text, "
            "or a folder below."
        )
    head = f"Files in {path} that have {term!r}, with the number of lines that do:"
    return Observation(clip("\n".join([head, *rows]), workspace.observation_chars))


def _row(line: str) -> str:
    path, _, count = line.rpartition(":")
    return f"{path.removeprefix('./')}: {count}"
