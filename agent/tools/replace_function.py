"""`replace_function`: a short function or method, whole, by its name."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass

from agent.tools.base import Observation, ToolError, required
from agent.tools.definitions import (
    Definition,
    definitions,
    find_definitions,
)
from agent.tools.editing import (
    first_that_parses,
    open_source,
    refuse_elision,
    shown_change,
    write_change,
)
from agent.tools.indent import indent_of, indent_unit, shift
from agent.tools.syntax import parse, syntax_fault
from agent.tools.text import SourceText, written_lines
from agent.tools.workspace import Workspace

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class _NewFunction:
    """A function as the model wrote it, at no indentation."""

    lines: list[str]
    imports: list[str]  # import lines written above it
    decorated: bool
    has_docstring: bool
    body_at: int  # index in `lines` of the first line of the body
    body_indent: str


def replace_function(workspace: Workspace, arguments: Mapping[str, str]) -> Observation:
    """Replace the function `name` (of `path`) by `text`, the whole new function.

    Decorators and docstring are kept when the new text has none; indentation is that of the old
    function. Long functions are refused: their lines are edited by range.
    """
    name = required(arguments, "name").strip().strip("`").removesuffix("()")
    old = _find(workspace, arguments.get("path", ""), name)
    path = old.path
    if old.code_lines > workspace.function_lines:
        raise ToolError(
            f"{old.name} has {old.code_lines} lines, too many to be rewritten. "
            f"Use edit on the lines to be changed, within lines {old.start} to {old.end} of {path}."
        )
    before = open_source(workspace, path)
    old_lines = before.bare(old.start, old.end)
    text = written_lines(required(arguments, "text"))
    refuse_elision(text, old_lines)
    new = _read(text, old.name.split(".")[-1])
    kept = _kept(before, old, new)
    indent = indent_of(before.bare(old.header, old.header)[0])
    placed = shift(kept, "", indent) or kept
    if indent_unit(before.bare()) == "\t":
        placed = [_as_tabs(line) for line in placed]
    after = before.replace(old.start, old.end, placed)
    after, added = _with_imports(after, new.imports)
    after = first_that_parses(path, before, [after])
    write_change(workspace, path, before, after)
    return shown_change(path, after, old.start + added, len(placed), "")


def _find(workspace: Workspace, path: str, name: str) -> Definition:
    """The one function meant. Raises ToolError with what there is otherwise."""
    found: list[Definition] = []
    if path.strip():
        path = workspace.path(path)
        found = definitions(path, open_source(workspace, path))
        functions = [d for d in found if d.kind == "function"]
        found = [d for d in functions if d.answers_to(name)]
        if not found:  # a wrong class in front of a name that is there once
            last = name.split(".")[-1]
            found = [d for d in functions if d.name.split(".")[-1] == last]
            if len(found) != 1:
                found = []
    if not found:
        found = [d for d in find_definitions(workspace, [name]) if d.kind == "function"]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ToolError(f"There is no function {name!r}{f' in {path}' if path else ''}.")
    listed = ", ".join(f"{d.name} ({d.path} line {d.start})" for d in found[:8])
    raise ToolError(f"{name!r} can mean several functions: {listed}. Give path and full name.")


def _read(lines: list[str], name: str) -> _NewFunction:
    """Read the function called `name` out of what the model wrote. Raises ToolError."""
    text, tree = _parsed(lines)
    lines = text.split("\n")
    imports: list[str] = []
    body: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.extend(lines[node.lineno - 1 : node.end_lineno])
        else:
            body.append(node)
    if len(body) == 1 and isinstance(body[0], ast.ClassDef):  # the method inside its class
        body = [node for node in body[0].body if isinstance(node, _Function)]
    functions = [node for node in body if isinstance(node, _Function)]
    wanted = [node for node in functions if node.name == name]
    others = [node for node in body if node not in wanted]
    if len(wanted) != 1 or others:
        got = ", ".join(node.name for node in functions) or "no function"
        raise ToolError(
            f"text must be the function {name!r} alone, from its def line on; it holds {got}"
            f"{' and other statements' if len(others) > len(functions) - len(wanted) else ''}."
        )
    node = wanted[0]
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    own = textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno])).split("\n")
    body_line = node.body[0].lineno
    body_line = min([body_line, *(d.lineno for d in getattr(node.body[0], "decorator_list", []))])
    return _NewFunction(
        lines=own,
        imports=imports,
        decorated=bool(node.decorator_list),
        has_docstring=ast.get_docstring(node, clean=False) is not None,
        body_at=body_line - first,
        body_indent=indent_of(own[body_line - first]) if body_line > node.lineno else "",
    )


def _parsed(lines: list[str]) -> tuple[str, ast.Module]:
    """The text at the indentation at which it parses, and its tree. Raises ToolError."""
    ways = [textwrap.dedent("\n".join(lines))]
    # The first line without, the others with the indentation they have in their class.
    if len(lines) > 1:
        rest = textwrap.dedent("\n".join(lines[1:]))
        deep = min((len(indent_of(line)) for line in lines[1:] if line.strip()), default=0)
        at = 0 if deep > 4 and not indent_of(lines[0]) else 1
        ways.insert(at, lines[0].strip() + "\n" + textwrap.indent(rest, "    "))
        if lines[0].strip().startswith("@"):
            ways.append(lines[0].strip() + "\n" + rest)
    for way in ways:
        tree = parse(way.encode("utf-8", errors="surrogateescape"))
        if tree is not None:
            return way, tree
    fault = syntax_fault(ways[0].encode("utf-8", errors="surrogateescape"))
    reason = f"{fault.message} in its line {fault.line}" if fault else "it does not parse"
    raise ToolError(f"Nothing was changed, since text is no valid Python: {reason}.")


def _kept(before: SourceText, old: Definition, new: _NewFunction) -> list[str]:
    """The new function's lines with the old decorators and docstring where it has none."""
    lines = list(new.lines)
    if old.docstring and not new.has_docstring and new.body_indent:
        doc = before.bare(*old.docstring)
        base = indent_of(doc[0])
        moved = [
            new.body_indent + line[len(base) :] if line.startswith(base) else line for line in doc
        ]
        lines[new.body_at : new.body_at] = moved
    if not new.decorated and old.start < old.header:
        decorators = textwrap.dedent("\n".join(before.bare(old.start, old.header - 1)))
        lines[0:0] = decorators.split("\n")
    return lines


def _with_imports(source: SourceText, imports: list[str]) -> tuple[SourceText, int]:
    """Put import lines that the file lacks behind its first block of imports."""
    present = {line.strip() for line in source.bare()}
    missing = [line for line in imports if line.strip() and line.strip() not in present]
    tree = parse(source.encode())
    if not missing or tree is None:
        return source, 0
    at = 0
    for node in tree.body:
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        is_doc = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not (is_import or (is_doc and at == 0)):
            break
        at = node.end_lineno or node.lineno
    return source.replace(at + 1, at, missing), len(missing)


def _as_tabs(line: str) -> str:
    columns = len(indent_of(line).expandtabs(4))
    return "\t" * (columns // 4) + " " * (columns % 4) + line.lstrip(" \t")
