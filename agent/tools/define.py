"""`define`: functions, methods and assignments replaced by name, whole, wherever they stand.

This is how a small model corrects code when nobody asks it for a form: it writes the function anew.
"""

from __future__ import annotations

from collections.abc import Mapping

from agent.tools.base import Observation, ToolError, required
from agent.tools.definitions import (
    Definition,
    bindings,
    definitions,
    find_definitions,
)
from agent.tools.editing import first_that_parses, open_source, refuse_elision, write_change
from agent.tools.indent import indent_of
from agent.tools.placing import (
    add_before,
    add_below_imports,
    add_method,
    likeness,
    placed,
    put_function,
    says_the_same,
    small_diff,
)
from agent.tools.text import SourceText, written_lines
from agent.tools.workspace import Workspace
from agent.tools.written_code import WrittenBinding, WrittenCode, WrittenFunction, read_code

_CLEARLY = 0.02  # by so much the likeliest of several functions of one name must lead


def define(workspace: Workspace, arguments: Mapping[str, str]) -> Observation:
    """Replace every function, method and assignment that `text` holds, each found by its name.

    A class in `text` is an excerpt: its methods replace those of the same names, new ones are
    added, all others stay. Decorators and docstrings are kept where the new code has none. Where a
    name has several meanings, those shown with the issue come first, then the most similar. `path`,
    or a first line `# path.py`, limits the search to a file.
    """
    code = read_code(written_lines(required(arguments, "text")))
    if not code.functions and not code.bindings:
        raise ToolError(
            "Nothing was changed: the block holds no function. Write the whole corrected function "
            "or method, from its def line on, without line numbers."
        )
    change = _Change(workspace, arguments.get("path", "") or code.path or "", code)
    return change.made()


class _Change:
    """One call: the files it touches, as they were and as they become. All or nothing."""

    def __init__(self, workspace: Workspace, path: str, code: WrittenCode) -> None:
        self._workspace, self._code = workspace, code
        self._path = workspace.existing(path) if path.strip() else ""
        self._before: dict[str, SourceText] = {}
        self._after: dict[str, SourceText] = {}
        self._same: list[str] = []  # functions that read as they did

    def made(self) -> Observation:
        """Do all replacements, check and write the files."""
        unplaced = [new for new in self._code.functions if not self._function(new)]
        for binding in self._code.bindings:
            self._binding(binding)
        for new in unplaced:
            self._new_function(new)
        changed = [path for path in self._after if self._after[path] != self._before[path]]
        if not changed:
            names = ", ".join(self._same) or "the code"
            others = [name for _, name in self._workspace.shown if name not in self._same][:12]
            raise ToolError(
                f"Nothing was changed: {names} reads exactly like this already. The mistake may be "
                f"in another function{': ' if others else ''}{', '.join(others)}."
            )
        for path in changed:
            after = add_below_imports(self._after[path], self._code.imports)
            self._after[path] = first_that_parses(path, self._before[path], [after])
        for path in changed:
            write_change(self._workspace, path, self._before[path], self._after[path])
        diffs = [
            f"{path} changed:\n{small_diff(self._before[path], self._after[path])}"
            for path in changed
        ]
        return Observation("\n".join(diffs), changed=True)

    def _function(self, new: WrittenFunction) -> bool:
        """Replace a function where there is one of its name. False where there is none."""
        found = self._candidates(new)
        if not found:
            return False
        old = self._likeliest(new, found)
        source = self._source(old.path)
        if says_the_same(source, old, new):
            self._same.append(old.name)
            return True
        refuse_elision(new.lines, source.bare(old.start, old.end))
        self._after[old.path] = put_function(source, old, new)
        return True

    def _candidates(self, new: WrittenFunction) -> list[Definition]:
        wanted = f"{new.owner}.{new.name}" if new.owner else new.name
        found = [
            item
            for item in self._definitions(wanted)
            if item.kind == "function" and not item.overload
        ]
        shown = [d for d in found if (d.path, d.name) in self._workspace.shown]
        return shown or found

    def _definitions(self, name: str) -> list[Definition]:
        """Definitions that a name can mean: in the file named, else in those shown, else in all."""
        if self._path:
            paths = [self._path]
        else:
            paths = list(dict.fromkeys(path for path, _ in self._workspace.shown))
        found = [
            item
            for path in paths
            for item in definitions(path, self._source(path))
            if item.answers_to(name)
        ]
        if found or self._path:
            return found
        paths = list(dict.fromkeys(d.path for d in find_definitions(self._workspace, [name])))
        everything = [item for path in paths for item in definitions(path, self._source(path))]
        return [item for item in everything if item.answers_to(name)]

    def _likeliest(self, new: WrittenFunction, found: list[Definition]) -> Definition:
        """The most similar of several functions of one name. Raises ToolError for a tie."""
        if len(found) == 1:
            return found[0]
        ranked = sorted(
            ((likeness(self._source(item.path), item, new), item) for item in found),
            key=lambda pair: -pair[0],
        )
        if ranked[0][0] - ranked[1][0] < _CLEARLY:
            listed = ", ".join(f"{d.name} ({d.path} line {d.start})" for _, d in ranked[:6])
            raise ToolError(
                f"Nothing was changed: {new.name!r} can mean {listed}. Write the method inside its "
                "class, with the class line above it."
            )
        return ranked[0][1]

    def _binding(self, new: WrittenBinding) -> None:
        """Replace an assignment of the same name, or add it where a function was replaced."""
        paths = [self._path] if self._path else list(self._before)
        if not self._path:
            paths += [path for path, _ in self._workspace.shown if path not in paths]
        found = [
            (path, owner, start, end)
            for path in dict.fromkeys(paths)
            for owner, name, start, end in bindings(self._source(path))
            if name == new.name and (new.owner is None or owner.split(".")[-1] == new.owner)
        ]
        if len(found) == 1:
            path, _, start, end = found[0]
            source = self._source(path)
            indent = indent_of(source.bare(start, start)[0])
            self._after[path] = source.replace(start, end, placed(new.lines, indent, source))
        elif not found and not self._code.others and self._before:
            self._add_binding(next(iter(self._before)), new)

    def _add_binding(self, path: str, new: WrittenBinding) -> None:
        source = self._source(path)
        if new.owner is None:
            self._after[path] = add_below_imports(source, tuple(new.lines))
            return
        for item in definitions(path, source):
            if item.kind == "class" and item.answers_to(new.owner):
                at = item.docstring[1] if item.docstring else item.header
                indent = indent_of(source.bare(item.header, item.header)[0]) + "    "
                lines = placed(new.lines, indent, source)
                self._after[path] = source.replace(at + 1, at, lines)
                return

    def _new_function(self, new: WrittenFunction) -> None:
        """Add a function that is not there: a method to its class, a helper above what calls it."""
        if new.owner:
            classes = [d for d in self._definitions(new.owner) if d.kind == "class"]
            if len(classes) == 1:
                refuse_elision(new.lines, [])
                source = self._source(classes[0].path)
                self._after[classes[0].path] = add_method(source, classes[0], new)
                return
        elif self._after and not new.takes_self:
            path = next(iter(self._after))
            source = self._source(path)
            users = [
                d for d in definitions(path, source) if "." not in d.name and new.name in d.calls
            ]
            if users:
                refuse_elision(new.lines, [])
                self._after[path] = add_before(source, users[0], new.lines)
                return
        name = f"{new.owner}.{new.name}" if new.owner else new.name
        where = f" in {self._path}" if self._path else ""
        known = ", ".join(name for _, name in self._workspace.shown[:12])
        more = (
            f"The code above has: {known}. Write one of these, under its own name."
            if known
            else "Write one that is there, under its own name. None is found in a file that cannot "
            "be parsed: change its lines by their numbers."
        )
        raise ToolError(f"Nothing was changed: there is no function {name}{where}. {more}")

    def _source(self, path: str) -> SourceText:
        """A file as it is so far."""
        if path not in self._before:
            self._before[path] = open_source(self._workspace, path)
        return self._after.get(path, self._before[path])
