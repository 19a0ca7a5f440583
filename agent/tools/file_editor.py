"""`file_editor`: view, create, replace, insert, undo, as R2E-Gym's tool of that name has them.

Other than there, text files of any language can be seen, and nothing is installed in the sandbox.
`str_replace` and `create` are also tools of their own.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping

from agent.tools.base import Observation, ToolError, numbers, required
from agent.tools.editing import open_source, write_source
from agent.tools.syntax import parse, syntax_fault
from agent.tools.text import SourceText
from agent.tools.view import folder_listing, is_folder
from agent.tools.workspace import Workspace

COMMANDS = ("view", "create", "str_replace", "insert", "undo_edit")
_CONTEXT = 4  # lines shown around a change
_SHOWN = 60  # lines of a change that are shown from each of its ends
_LEAST_BODY = 3  # lines; a shorter body stays in a skeleton
_UNDO_DEPTH = 20  # edits of one file that can be undone
_UNDO_CHARS = 4_000_000  # of all that can be undone


def file_editor(workspace: Workspace, arguments: Mapping[str, str]) -> Observation:
    """Do `command` to the file or folder `path`."""
    command = required(arguments, "command").strip()
    if command not in COMMANDS:
        raise ToolError(f"There is no command {command!r}. The commands: {', '.join(COMMANDS)}.")
    for name in _NEEDED.get(command, ()):
        if name not in arguments:
            raise ToolError(f"{command} needs the parameter {name}.")
    if command == "view":
        return _view(workspace, arguments)
    if command == "create":
        return create(workspace, arguments)
    if command == "str_replace":
        return str_replace(workspace, arguments)
    if command == "insert":
        return _insert(workspace, arguments)
    return _undo(workspace, arguments)


_NEEDED = {
    "create": ("file_text",),
    "str_replace": ("old_str",),
    "insert": ("insert_line", "new_str"),
}


# Looking


def _view(workspace: Workspace, arguments: Mapping[str, str]) -> Observation:
    path = _existing(workspace, arguments)
    lines = numbers(arguments, "view_range", 2)
    if is_folder(workspace, path):
        if lines is not None:
            raise ToolError(f"{path} is a folder, which has no lines; leave view_range out.")
        return Observation(_clipped(folder_listing(workspace, path), workspace.observation_chars))
    source = open_source(workspace, path)
    if lines is None:
        concise = arguments.get("concise", "").strip().lower()
        python = path.endswith((".py", ".pyi"))
        long = len(source) > workspace.view_lines
        if python and concise != "false" and (long or concise == "true"):
            shown = _skeleton(source)
            if shown is not None:
                head = f"{path} has {len(source)} lines. Bodies of functions are left out:"
                return Observation(_clipped(f"{head}\n{shown}", workspace.observation_chars))
        start, end = 1, len(source)
    else:
        start, end = lines[0], len(source) if lines[1] == -1 else lines[1]
        if not 1 <= start <= max(len(source), 1) or end < start:
            raise ToolError(
                f"view_range {list(lines)} does not fit: {path} has {len(source)} lines, counted "
                "from 1; -1 as the second number means the last one."
            )
        end = min(end, len(source))
    if not len(source):
        return Observation(f"{path} is empty.")
    head = f"{path}, lines {start} to {end} of {len(source)}:"
    return Observation(_clipped(f"{head}\n{_cat(source, start, end)}", workspace.observation_chars))


def _skeleton(source: SourceText) -> str | None:
    """The file with its lines numbered, bodies of functions left out. None if it does not parse."""
    tree = parse(source.encode())
    if tree is None:
        return None
    left_out: dict[int, int] = {}  # first and last line of each body
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first, last = node.body[0].lineno, node.end_lineno or node.lineno
            if isinstance(node.body[0], ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                first = min([first, *(d.lineno for d in node.body[0].decorator_list)])
            if first > node.lineno and last - first + 1 > _LEAST_BODY:
                left_out[first] = last
            continue
        nodes += ast.iter_child_nodes(node)
    rows, number = [], 1
    while number <= len(source):
        if number in left_out:
            rows.append(f"{'':6}\t... lines {number} to {left_out[number]} ...")
            number = left_out[number] + 1
        else:
            rows.append(_cat(source, number, number))
            number += 1
    return "\n".join(rows)


def _cat(source: SourceText, start: int, end: int) -> str:
    """Lines as `cat -n` numbers them."""
    return "\n".join(f"{n:6}\t{line}" for n, line in enumerate(source.bare(start, end), start))


def _clipped(text: str, limit: int) -> str:
    """The beginning of a text that is too long, cut at a line's end where there is one."""
    if len(text) <= limit:
        return text
    kept = text[:limit]
    cut = kept.rfind("\n")
    kept = kept[:cut] if cut > limit // 2 else kept
    left = len(text) - len(kept)
    return (
        f"{kept}\n[clipped: {left} more characters. Use view_range, or search for what you need.]"
    )


# Changing


def create(workspace: Workspace, arguments: Mapping[str, str]) -> Observation:
    """Write a new file `path` with `file_text`; it ends with a line end."""
    path = workspace.path(required(arguments, "path"))
    if workspace.run(["test", "-e", path]).exit_code == 0:
        raise ToolError(
            f"{path} exists already. Change it with str_replace, or choose another name."
        )
    text = arguments.get("file_text", "")
    if text and not text.endswith("\n"):
        text += "\n"
    after = _source(text)
    _write(workspace, path, None, after)
    fault = _fault(path, None, after)
    return Observation(f"{path} was created with {len(after)} lines.{fault}", changed=True)


def str_replace(workspace: Workspace, arguments: Mapping[str, str]) -> Observation:
    """Replace the only place of `path` where `old_str` stands, to the character, by `new_str`."""
    path = _existing(workspace, arguments)
    before = open_source(workspace, path)
    whole = "".join(before.lines)
    old, new = arguments.get("old_str", ""), arguments.get("new_str", "")
    if not old:
        raise ToolError("old_str is empty: copy the text to be replaced from the file.")
    if old not in whole and before.newline == "\r\n":
        old, new = (text.replace("\r\n", "\n").replace("\n", "\r\n") for text in (old, new))
    count = whole.count(old)
    if count != 1:
        raise ToolError(_misfit(path, before, whole, old, count))
    if old == new:
        raise ToolError("Nothing was changed: old_str and new_str are equal.")
    at = whole.index(old)
    after = _source(whole[:at] + new + whole[at + len(old) :])
    first = whole.count("\n", 0, at) + 1
    return _changed(workspace, path, before, after, first, first + new.count("\n"))


def _misfit(path: str, source: SourceText, whole: str, old: str, count: int) -> str:
    if count > 1:
        places: list[str] = []
        at = whole.find(old)
        while at >= 0 and len(places) < 20:
            places.append(str(whole.count("\n", 0, at) + 1))
            at = whole.find(old, at + len(old))
        return (
            f"Nothing was changed: old_str stands {count} times in {path}, from lines "
            f"{', '.join(places)} on. Take more of the lines around it, so that it is unique."
        )
    # Often the text is right but for its blanks: say where.
    wanted = [line.strip() for line in old.strip().splitlines()]
    lines = [line.strip() for line in source.bare()]
    for number in range(1, len(lines) - len(wanted) + 2):
        if wanted and lines[number - 1 : number - 1 + len(wanted)] == wanted:
            last = number + len(wanted) - 1
            return (
                f"Nothing was changed: old_str is not in {path} as it is written, but lines "
                f"{number} to {last} differ from it by blanks only. They are:\n"
                f"{_cat(source, number, last)}"
            )
    return (
        f"Nothing was changed: old_str is not in {path}. View the lines and copy them as they are, "
        "without their numbers."
    )


def _insert(workspace: Workspace, arguments: Mapping[str, str]) -> Observation:
    """Put the lines of `new_str` behind line `insert_line`; 0 is the top of the file."""
    path = _existing(workspace, arguments)
    before = open_source(workspace, path)
    given = numbers(arguments, "insert_line", 1)
    if given is None or not 0 <= given[0] <= len(before):
        raise ToolError(f"insert_line must be 0 to {len(before)}, the number of lines of {path}.")
    new = arguments.get("new_str", "").replace("\r\n", "\n").removesuffix("\n").split("\n")
    after = before.replace(given[0] + 1, given[0], new)
    return _changed(workspace, path, before, after, given[0] + 1, given[0] + len(new))


def _undo(workspace: Workspace, arguments: Mapping[str, str]) -> Observation:
    """Take the last edit of a file back."""
    path = workspace.path(required(arguments, "path"))
    kept = workspace.undo.get(path)
    if not kept:
        raise ToolError(f"There is no edit of {path} to be undone.")
    text = kept[-1]
    if text is None:
        workspace.run(["rm", "-f", "--", path])
        said = f"{path} was removed: it had been created by the edit that is undone."
    else:
        source = _source(text)
        write_source(workspace, path, source)
        said = f"{path} is as it was before its last edit; it has {len(source)} lines."
    kept.pop()
    return Observation(said, changed=True)


def _changed(
    workspace: Workspace, path: str, before: SourceText, after: SourceText, first: int, last: int
) -> Observation:
    """Write a change of which lines `first` to `last` are new, and show it."""
    _write(workspace, path, before, after)
    if not len(after):
        return Observation(f"{path} is now empty.", changed=True)
    start, end = max(1, first - _CONTEXT), min(len(after), last + _CONTEXT)
    if end - start >= 2 * _SHOWN:
        between = f"\n[... {end - start + 1 - 2 * _SHOWN} lines left out ...]\n"
        shown = _cat(after, start, start + _SHOWN - 1) + between
        shown += _cat(after, end - _SHOWN + 1, end)
    else:
        shown = _cat(after, start, end)
    text = f"{path} was changed. Lines {start} to {end} are now:\n{shown}"
    text = _clipped(text, workspace.observation_chars)
    return Observation(text + _fault(path, before, after), changed=True)


def _fault(path: str, before: SourceText | None, after: SourceText) -> str:
    """A note where a change has broken a Python file."""
    if not path.endswith((".py", ".pyi")):
        return ""
    fault = syntax_fault(after.encode())
    if fault is None or (before is not None and syntax_fault(before.encode()) is not None):
        return ""
    return f"\nNote: {path} does not parse now: line {fault.line}, {fault.message}."


def _write(workspace: Workspace, path: str, before: SourceText | None, after: SourceText) -> None:
    """Write a file and keep what it was for undo_edit."""
    write_source(workspace, path, after)
    kept = workspace.undo.setdefault(path, [])
    kept.append(None if before is None else "".join(before.lines))
    del kept[:-_UNDO_DEPTH]
    spent = 0
    for texts in (kept, *(other for other in workspace.undo.values() if other is not kept)):
        for at in reversed(range(len(texts))):
            spent += len(texts[at] or "")
            if spent > _UNDO_CHARS and not (texts is kept and at == len(texts) - 1):
                del texts[: at + 1]
                break


def _source(text: str) -> SourceText:
    return SourceText.decode(text.encode("utf-8", "surrogateescape"))


def _existing(workspace: Workspace, arguments: Mapping[str, str]) -> str:
    """The path among the arguments. Raises ToolError where there is nothing of that name."""
    path = workspace.path(required(arguments, "path"))
    if workspace.run(["test", "-e", path]).exit_code == 0:
        return path
    other = workspace.existing(path)
    meant = f" Did you mean {other}?" if other != path else ""
    raise ToolError(f"There is no {path}.{meant}")
