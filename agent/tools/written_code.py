"""Python code as a model writes it: functions, methods and assignments, read out of its text."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field

from agent.tools.base import ToolError
from agent.tools.indent import indent_of
from agent.tools.syntax import parse, syntax_fault

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

_PATH_COMMENT = re.compile(r"^\s*#\s*(?:file(?:name)?:\s*)?([\w./-]+\.\w+)\s*:?\s*$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class WrittenFunction:
    """A function a model wrote, at no indentation."""

    name: str
    owner: str | None  # the class it was written in
    lines: list[str]
    decorated: bool
    has_docstring: bool
    body_at: int  # index in `lines` of the first line of the body
    body_indent: str
    takes_self: bool
    node: FunctionNode = field(repr=False)


@dataclass(frozen=True, slots=True)
class WrittenBinding:
    """An assignment to one name at module or class level, at no indentation."""

    name: str
    owner: str | None
    lines: list[str]


@dataclass(frozen=True, slots=True)
class WrittenCode:
    """What a text holds. `others` counts statements that are none of the rest (calls, say)."""

    functions: tuple[WrittenFunction, ...]
    bindings: tuple[WrittenBinding, ...]
    imports: tuple[str, ...]
    others: int
    path: str | None  # of a comment `# path.py` in the first line


def read_code(lines: list[str]) -> WrittenCode:
    """Read a text of functions, class excerpts and assignments. Raises ToolError with its fault."""
    path = None
    if lines and (match := _PATH_COMMENT.match(lines[0])):
        path, lines = match[1], lines[1:]
    text, tree = _parsed(lines)
    found = _Reader(text.split("\n"))
    found.read(tree.body, None)
    return WrittenCode(
        functions=tuple(found.functions),
        bindings=tuple(found.bindings),
        imports=tuple(found.imports),
        others=found.others,
        path=path,
    )


def same_code(one: FunctionNode, other: FunctionNode) -> bool:
    """Whether two functions do the same by their text: docstrings, comments, layout apart."""
    return _code(one) == _code(other)


class _Reader:
    """Collects what a body holds, one level of classes deep."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self.functions: list[WrittenFunction] = []
        self.bindings: list[WrittenBinding] = []
        self.imports: list[str] = []
        self.others = 0

    def read(self, body: Iterable[ast.stmt], owner: str | None) -> None:
        for node in body:
            if isinstance(node, FunctionNode):
                self.functions.append(self._function(node, owner))
            elif isinstance(node, ast.ClassDef):
                self.read(node.body, f"{owner}.{node.name}" if owner else node.name)
            elif isinstance(node, ast.Import | ast.ImportFrom) and owner is None:
                self.imports.extend(self._lines[node.lineno - 1 : node.end_lineno])
            elif (name := _bound(node)) is not None:
                self.bindings.append(WrittenBinding(name, owner, self._own(node.lineno, node)))
            elif not _says_nothing(node):
                self.others += 1

    def _function(self, node: FunctionNode, owner: str | None) -> WrittenFunction:
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        own = self._own(first, node)
        start = node.body[0]
        body_line = min([start.lineno, *(d.lineno for d in getattr(start, "decorator_list", []))])
        arguments = [*node.args.posonlyargs, *node.args.args]
        return WrittenFunction(
            name=node.name,
            owner=owner,
            lines=own,
            decorated=bool(node.decorator_list),
            has_docstring=ast.get_docstring(node, clean=False) is not None,
            body_at=body_line - first,
            body_indent=indent_of(own[body_line - first]) if body_line > node.lineno else "",
            takes_self=bool(arguments) and arguments[0].arg in ("self", "cls"),
            node=node,
        )

    def _own(self, first: int, node: ast.stmt) -> list[str]:
        return textwrap.dedent("\n".join(self._lines[first - 1 : node.end_lineno])).split("\n")


def _bound(node: ast.stmt) -> str | None:
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return targets[0].id if len(targets) == 1 and isinstance(targets[0], ast.Name) else None


def _says_nothing(node: ast.stmt) -> bool:
    """A docstring, `...` or `pass`."""
    return isinstance(node, ast.Pass) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
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
    raise ToolError(f"Nothing was changed, since the block is no valid Python: {reason}.")


def _code(node: FunctionNode) -> str:
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return f"{type(node).__name__} {ast.dump(node.args)} {[ast.dump(child) for child in body]}"
