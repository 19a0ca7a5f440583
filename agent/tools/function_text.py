"""Functions as a model writes them: read out of its text, and put in the place of old ones."""

from __future__ import annotations

import ast
import textwrap
from dataclasses import dataclass

from agent.tools.base import ToolError
from agent.tools.definitions import Definition
from agent.tools.indent import indent_of, indent_unit, shift
from agent.tools.syntax import parse, syntax_fault
from agent.tools.text import SourceText

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class WrittenFunction:
    """A function a model wrote, at no indentation."""

    name: str
    lines: list[str]
    decorated: bool
    has_docstring: bool
    body_at: int  # index in `lines` of the first line of the body
    body_indent: str
    tree: ast.AST

    def same_code(self, source: SourceText, old: Definition) -> bool:
        """Whether the old function says the same, docstring, comments and layout apart."""
        text = textwrap.dedent("\n".join(source.bare(old.start, old.end)))
        tree = parse(text.encode("utf-8", errors="surrogateescape"))
        return tree is not None and _bare_dump(tree.body[0]) == _bare_dump(self.tree)


@dataclass(frozen=True, slots=True)
class WrittenText:
    """What a text holds: functions, the class they stand in, and import lines above."""

    functions: tuple[WrittenFunction, ...]
    class_name: str | None
    imports: tuple[str, ...]
    others: int  # statements that are none of these


def read_functions(lines: list[str]) -> WrittenText:
    """Read a text of functions, or of one class with methods. Raises ToolError with its fault."""
    text, tree = _parsed(lines)
    lines = text.split("\n")
    imports: list[str] = []
    body: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.extend(lines[node.lineno - 1 : node.end_lineno])
        else:
            body.append(node)
    class_name = None
    if len(body) == 1 and isinstance(body[0], ast.ClassDef):
        class_name = body[0].name
        body = list(body[0].body)
    functions = [node for node in body if isinstance(node, _Function)]
    return WrittenText(
        functions=tuple(_written(node, lines) for node in functions),
        class_name=class_name,
        imports=tuple(imports),
        others=0 if class_name else len(body) - len(functions),
    )


def put_function(
    source: SourceText, old: Definition, new: WrittenFunction
) -> tuple[SourceText, int]:
    """Put a function in an old one's place; decorators and docstring stay where it has none.

    Returns the text and the number of lines the function has now.
    """
    lines = list(new.lines)
    if old.docstring and not new.has_docstring and new.body_indent:
        doc = source.bare(*old.docstring)
        base = indent_of(doc[0])
        lines[new.body_at : new.body_at] = [
            new.body_indent + line[len(base) :] if line.startswith(base) else line for line in doc
        ]
    if not new.decorated and old.start < old.header:
        decorators = textwrap.dedent("\n".join(source.bare(old.start, old.header - 1)))
        lines[0:0] = decorators.split("\n")
    indent = indent_of(source.bare(old.header, old.header)[0])
    lines = placed(lines, indent, source)
    return source.replace(old.start, old.end, lines), len(lines)


def placed(lines: list[str], indent: str, source: SourceText) -> list[str]:
    """Lines written at no indentation, moved to `indent`, with tabs where the file has tabs."""
    moved = shift(lines, "", indent) or lines
    if indent_unit(source.bare()) != "\t":
        return moved
    tabbed = []
    for line in moved:
        columns = len(indent_of(line).expandtabs(4))
        tabbed.append("\t" * (columns // 4) + " " * (columns % 4) + line.lstrip(" \t"))
    return tabbed


def with_imports(source: SourceText, imports: tuple[str, ...]) -> tuple[SourceText, int]:
    """Add import lines that the file lacks behind its first block of imports; and how many."""
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


def _written(node: _Function, lines: list[str]) -> WrittenFunction:
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    own = textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno])).split("\n")
    start = node.body[0]
    body_line = min([start.lineno, *(d.lineno for d in getattr(start, "decorator_list", []))])
    return WrittenFunction(
        name=node.name,
        lines=own,
        decorated=bool(node.decorator_list),
        has_docstring=ast.get_docstring(node, clean=False) is not None,
        body_at=body_line - first,
        body_indent=indent_of(own[body_line - first]) if body_line > node.lineno else "",
        tree=node,
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


def _bare_dump(node: ast.AST) -> str:
    if not isinstance(node, _Function):
        return ast.dump(node)
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    inner = [ast.dump(child) for child in body]
    return f"{type(node).__name__} {ast.dump(node.args)} {inner}"
