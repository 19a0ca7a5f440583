"""`replace_function`: a short function or method, whole, by its name; or methods of a class."""

from __future__ import annotations

from collections.abc import Mapping

from agent.tools.base import Observation, ToolError, required
from agent.tools.definitions import Definition, definitions, find_definitions
from agent.tools.editing import (
    first_that_parses,
    open_source,
    refuse_elision,
    shown_change,
    write_change,
)
from agent.tools.function_text import (
    WrittenFunction,
    placed,
    put_function,
    read_functions,
    with_imports,
)
from agent.tools.indent import indent_of
from agent.tools.text import SourceText, written_lines
from agent.tools.workspace import Workspace
from environments.base import SandboxFileError


def replace_function(workspace: Workspace, arguments: Mapping[str, str]) -> Observation:
    """Replace the function `name` (of `path`) by `text`, the whole new function.

    Decorators and docstring are kept when the new text has none; indentation is that of the old
    function. Long functions are refused: their lines are edited by range. Where `name` is a class,
    the methods in `text` replace those of the same names, new ones are added, others stay.
    """
    name = required(arguments, "name").strip().strip("`").removesuffix("()")
    text = read_functions(written_lines(required(arguments, "text")))
    old = _find(workspace, arguments.get("path", ""), name)
    before = open_source(workspace, old.path)
    if old.kind == "class":
        after, start, count = _methods(workspace, before, old, text.functions)
    else:
        new = _the_one(text.functions, text.others, old.name.split(".")[-1])
        _refuse_long(workspace, old)
        refuse_elision(new.lines, before.bare(old.start, old.end))
        after, count = put_function(before, old, new)
        start = old.start
    after, added = with_imports(after, text.imports)
    after = first_that_parses(old.path, before, [after])
    write_change(workspace, old.path, before, after)
    return shown_change(old.path, after, start + added, count, "")


def _find(workspace: Workspace, path: str, name: str) -> Definition:
    """The one function or class meant. Raises ToolError with what there is otherwise.

    A path that is not there counts for nothing where the name alone is enough.
    """
    found: list[Definition] = []
    path = workspace.path(path) if path.strip() else ""
    if path:
        try:
            everything = definitions(path, workspace.read(path))
        except (SandboxFileError, ValueError):
            everything = []
        found = [d for d in everything if d.answers_to(name)]
        if not found:  # a wrong class in front of a name that is there once
            last = name.split(".")[-1]
            found = [d for d in everything if d.name.split(".")[-1] == last]
            if len(found) != 1:
                found = []
    if not found:
        found = find_definitions(workspace, [name])
    found = [d for d in found if not d.overload]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ToolError(f"There is no function {name!r}{f' in {path}' if path else ''}.")
    listed = ", ".join(f"{d.name} ({d.path} line {d.start})" for d in found[:8])
    raise ToolError(f"{name!r} can mean several functions: {listed}. Give name and path.")


def _the_one(functions: tuple[WrittenFunction, ...], others: int, name: str) -> WrittenFunction:
    """The function called `name`, if it is all there is. Raises ToolError."""
    wanted = [function for function in functions if function.name == name]
    if len(wanted) == 1 and len(functions) == 1 and not others:
        return wanted[0]
    got = ", ".join(function.name for function in functions) or "no function"
    more = " and other statements" if others else ""
    raise ToolError(
        f"text must be the function {name!r} alone, from its def line on; it holds {got}{more}."
    )


def _methods(
    workspace: Workspace, before: SourceText, cls: Definition, new: tuple[WrittenFunction, ...]
) -> tuple[SourceText, int, int]:
    """Replace methods of a class by name; where the first change begins and its line count."""
    if not new:
        raise ToolError(f"{cls.name} is a class; text must hold the methods to be replaced.")
    source, first, count = before, 0, 0
    for method in new:
        now = definitions(cls.path, source)
        name = f"{cls.name}.{method.name}"
        old = [d for d in now if d.name == name and not d.overload]
        if old and method.same_code(source, old[-1]):
            continue
        if old:
            _refuse_long(workspace, old[-1])
            refuse_elision(method.lines, source.bare(old[-1].start, old[-1].end))
            source, lines = put_function(source, old[-1], method)
            start = old[-1].start
        else:
            refuse_elision(method.lines, [])
            end = next(d.end for d in now if d.name == cls.name and d.kind == "class")
            indent = indent_of(before.bare(cls.header, cls.header)[0]) + "    "
            added = ["", *placed(method.lines, indent, before)]
            source, start, lines = source.replace(end + 1, end, added), end + 1, len(added)
        if not first:
            first, count = start, lines
    return source, first or cls.start, count


def _refuse_long(workspace: Workspace, old: Definition) -> None:
    if old.code_lines > workspace.function_lines:
        raise ToolError(
            f"{old.name} has {old.code_lines} lines, too many to be rewritten. Use edit on the "
            f"lines to be changed, within lines {old.start} to {old.end} of {old.path}."
        )
