"""Putting written code in the place of old code, in a file's own way of writing."""

from __future__ import annotations

import ast
import difflib
import textwrap

from agent.tools.definitions import Definition
from agent.tools.indent import indent_of, indent_unit, shift
from agent.tools.syntax import parse
from agent.tools.text import SourceText
from agent.tools.written_code import FunctionNode, WrittenFunction, same_code


def put_function(source: SourceText, old: Definition, new: WrittenFunction) -> SourceText:
    """Put a function in an old one's place; decorators and docstring stay where it has none."""
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
    return source.replace(old.start, old.end, placed(lines, indent, source))


def add_method(source: SourceText, cls: Definition, new: WrittenFunction) -> SourceText:
    """Add a method at the end of a class."""
    indent = indent_of(source.bare(cls.header, cls.header)[0])
    unit = "\t" if indent_unit(source.bare()) == "\t" else "    "
    return source.replace(cls.end + 1, cls.end, ["", *placed(new.lines, indent + unit, source)])


def add_before(source: SourceText, other: Definition, lines: list[str]) -> SourceText:
    """Add lines of module level above a definition of module level."""
    return source.replace(other.start, other.start - 1, [*lines, "", ""])


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


def add_below_imports(source: SourceText, lines: tuple[str, ...]) -> SourceText:
    """Add lines that the file lacks behind its first block of imports."""
    present = {line.strip() for line in source.bare()}
    missing = [line for line in lines if line.strip() and line.strip() not in present]
    tree = parse(source.encode())
    if not missing or tree is None:
        return source
    at = 0
    for node in tree.body:
        is_import = isinstance(node, ast.Import | ast.ImportFrom)
        is_doc = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not (is_import or (is_doc and at == 0)):
            break
        at = node.end_lineno or node.lineno
    return source.replace(at + 1, at, missing)


def says_the_same(source: SourceText, old: Definition, new: WrittenFunction) -> bool:
    """Whether the old function has the same code as the new one."""
    text = textwrap.dedent("\n".join(source.bare(old.start, old.end)))
    tree = parse(text.encode("utf-8", errors="surrogateescape"))
    node = tree.body[0] if tree is not None and tree.body else None
    return isinstance(node, FunctionNode) and same_code(node, new.node)


def likeness(source: SourceText, old: Definition, new: WrittenFunction) -> float:
    """How alike two functions are, 0 to 1, by their lines without docstrings and indentation."""
    doc = old.docstring or (0, -1)
    lines = source.bare(old.start, old.end)
    before = [
        line.strip()
        for number, line in enumerate(lines, old.start)
        if not doc[0] <= number <= doc[1] and line.strip()
    ]
    after = [line.strip() for line in new.lines if line.strip()]
    return difflib.SequenceMatcher(None, "\n".join(before), "\n".join(after), False).ratio()


def small_diff(before: SourceText, after: SourceText, context: int = 1, limit: int = 40) -> str:
    """What changed, as lines with - and + and little around them."""
    rows = list(difflib.unified_diff(before.bare(), after.bare(), n=context, lineterm=""))[2:]
    shown = ["..." if row.startswith("@@") else row for row in rows]
    if len(shown) > limit:
        shown = [*shown[:limit], f"[... {len(shown) - limit} more lines ...]"]
    return "\n".join(shown)
