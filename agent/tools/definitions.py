"""Functions and classes of Python files, by syntax tree: where they stand, what they are called."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from agent.tools.syntax import parse
from agent.tools.text import SourceText
from agent.tools.workspace import EXCLUDED, Workspace
from environments.base import SandboxFileError

_NAME = re.compile(r"^[^\W\d]\w*(\.[^\W\d]\w*)*$")
_FILES_READ = 200  # more files than this that define a wanted name are not opened


@dataclass(frozen=True, slots=True)
class Definition:
    """One function, method or class. Lines are 1-based, both ends included."""

    path: str
    name: str  # within its module: "Class.method"
    kind: str  # "function" or "class"
    start: int  # the first decorator's line, or that of `def`
    header: int  # the line of `def` or `class`
    end: int
    docstring: tuple[int, int] | None  # lines of the docstring, where it has lines of its own
    calls: tuple[str, ...]  # last parts of the names it calls or uses, in order, no repeats
    overload: bool = False  # a signature for type checkers, no code

    @property
    def code_lines(self) -> int:
        """Lines without the docstring."""
        doc = self.docstring
        return self.end - self.start + 1 - (doc[1] - doc[0] + 1 if doc else 0)

    def answers_to(self, name: str) -> bool:
        """Whether a dotted name, module parts included or left out, can mean this definition."""
        own = (*self.path.removesuffix(".py").split("/"), *self.name.split("."))
        wanted = tuple(name.split("."))
        return own[-len(wanted) :] == wanted


def definitions(path: str, source: SourceText) -> list[Definition]:
    """All definitions of a file in the order of their lines; none when it does not parse."""
    tree = parse(source.encode())
    return [] if tree is None else list(_walk(tree, path, ()))


def _walk(node: ast.AST, path: str, outer: tuple[str, ...]) -> Iterator[Definition]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = (*outer, child.name)
            yield Definition(
                path=path,
                name=".".join(name),
                kind="class" if isinstance(child, ast.ClassDef) else "function",
                start=min([child.lineno, *(d.lineno for d in child.decorator_list)]),
                header=child.lineno,
                end=child.end_lineno or child.lineno,
                docstring=docstring_lines(child),
                calls=_uses(child),
                overload=any("overload" in ast.unparse(d) for d in child.decorator_list),
            )
            yield from _walk(child, path, name)
        else:
            yield from _walk(child, path, outer)


def bindings(source: SourceText) -> list[tuple[str, str, int, int]]:
    """Names assigned outside functions: class ("" for the module), name, first and last line."""
    tree = parse(source.encode())
    found: list[tuple[str, str, int, int]] = []
    bodies = [] if tree is None else [("", tree.body)]
    while bodies:
        owner, body = bodies.pop(0)
        for node in body:
            if isinstance(node, ast.ClassDef):
                bodies.append((f"{owner}.{node.name}".lstrip("."), node.body))
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.AnnAssign):
                targets = [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    found.append((owner, target.id, node.lineno, node.end_lineno or node.lineno))
    return found


def docstring_lines(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef,
) -> tuple[int, int] | None:
    """First and last line of a docstring that shares its lines with nothing else."""
    first = node.body[0]
    if not (isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)):
        return None
    if not isinstance(first.value.value, str) or first.end_lineno is None:
        return None
    above = max((d.end_lineno or 0 for d in node.decorator_list), default=0)
    if first.lineno <= max(node.lineno, above):
        return None  # `def f(): "..."` in one line
    if len(node.body) > 1 and node.body[1].lineno <= first.end_lineno:
        return None
    return first.lineno, first.end_lineno


def _uses(node: ast.AST) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for child in ast.walk(node):
        if isinstance(child, ast.Call):
            target = child.func
            if isinstance(target, ast.Name):
                names.setdefault(target.id)
            elif isinstance(target, ast.Attribute):
                names.setdefault(target.attr)
        elif isinstance(child, ast.ClassDef):
            for base in child.bases:
                if isinstance(base, ast.Name):
                    names.setdefault(base.id)
        elif isinstance(child, ast.Attribute):
            names.setdefault(child.attr)
    return tuple(names)


def find_definitions(workspace: Workspace, names: list[str]) -> list[Definition]:
    """Definitions in the tree that any of the (dotted) names can mean, tests left out.

    The tree is searched inside the sandbox for `def` and `class` lines; only files that have one
    are read. Names that are no Python names find nothing.
    """
    names = [name for name in names if _NAME.match(name)]
    if not names:
        return []
    last = sorted({name.split(".")[-1] for name in names})
    found: list[Definition] = []
    for path in defining_files(workspace, last):
        for definition in read_definitions(workspace, path):
            if any(definition.answers_to(name) for name in names):
                found.append(definition)
    return found


def defining_files(workspace: Workspace, names: Iterable[str]) -> list[str]:
    """Python files, tests left out, with a `def` or `class` line of one of these plain names."""
    pattern = rf"^[[:space:]]*(async[[:space:]]+)?(def|class)[[:space:]]+({'|'.join(names)})\b"
    command = ["grep", "-rlIE", "--include=*.py", *EXCLUDED, "-e", pattern, "."]
    result = workspace.run(command, output_cap=200_000)
    paths = [line.removeprefix("./") for line in result.text.splitlines() if line.endswith(".py")]
    return [path for path in sorted(paths) if not workspace.is_test(path)][:_FILES_READ]


def read_definitions(workspace: Workspace, path: str) -> list[Definition]:
    """Definitions of one file of the workspace; none when it cannot be read."""
    try:
        return definitions(path, workspace.read(path))
    except (SandboxFileError, ValueError):
        return []
