"""The code an issue is about, found by its words and shown up front with line numbers.

Names in the issue that are defined in the tree come first; then what these call; then what shares
rare words with the issue. Nothing here knows an instance: any Python tree will do, and in a tree of
another language the paths and names of the issue are looked for.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from agent.tools.definitions import Definition, bindings, defining_files, definitions
from agent.tools.named_code import named_code
from agent.tools.names import Names, names_in
from agent.tools.text import SourceText, excerpt
from agent.tools.workspace import Workspace
from environments.base import SandboxFileError

_WORD = re.compile(r"[A-Za-z]{3,}")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|_")
_NAMED, _USED, _MEMBER, _WORDS = 10.0, 4.0, 3.0, 4.0  # weights of the reasons to show a function
_FAINT = 0.3  # of the best score; what is below is not shown
_BINDING = 12  # lines of an assignment outside functions that are shown; a longer one is cut


@dataclass(slots=True)
class _File:
    source: SourceText
    found: list[Definition]
    chosen: list[Definition] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class IssueCode:
    """Source to show with an issue, and path and name of each function in it."""

    text: str
    shown: tuple[tuple[str, str], ...]


def issue_code(workspace: Workspace, issue: str, *, max_chars: int) -> IssueCode:
    """Source of the functions an issue is most likely about, at most `max_chars` characters.

    Each file under its path, lines with their numbers, docstrings and what lies between left out.
    """
    files = _read(workspace, issue) if max_chars > 0 else {}
    scores = _scores(files, issue)
    spent = 0
    least = max([0.5, *(_FAINT * score for score in scores.values())])
    for path, definition in sorted(scores, key=lambda item: -scores[item]):
        cost = _cost(files[path], definition)
        if scores[path, definition] < least or spent + cost > max_chars:
            continue
        files[path].chosen.append(definition)
        spent += cost
    texts = [_shown(path, file) for path, file in files.items() if file.chosen]
    shown = [(path, item.name) for path, file in files.items() for item in file.chosen]
    if not texts:
        return IssueCode(named_code(workspace, issue, names_in(issue), max_chars=max_chars), ())
    return IssueCode("\n\n".join(texts), tuple(shown))


def _read(workspace: Workspace, issue: str) -> dict[str, _File]:
    """Files that define a name of the issue; where none does, files that hold most of its words."""
    names = names_in(issue)
    for group in (names.code, names.plain):
        last = sorted({part for name in group for part in name.split(".") if len(part) > 1})
        if not last:
            continue
        files = _open(workspace, defining_files(workspace, last))
        if files:
            return files
    return {}


def _open(workspace: Workspace, paths: Iterable[str]) -> dict[str, _File]:
    files: dict[str, _File] = {}
    for path in paths:
        try:
            source = workspace.read(path)
        except (SandboxFileError, ValueError):
            continue
        found = definitions(path, source)
        if found:
            files[path] = _File(source, found)
    return files


def _scores(files: dict[str, _File], issue: str) -> dict[tuple[str, Definition], float]:
    """How much speaks for showing each function (methods apart from their class)."""
    names = names_in(issue)
    words = _words(issue)
    units = {
        (path, item): _words("\n".join(file.source.bare(item.start, item.end)))
        for path, file in files.items()
        for item in file.found
        if item.kind == "function" and not item.overload and not _inside_function(item, file.found)
    }
    seen_in = Counter(word for bag in units.values() for word in bag)
    rarity = {word: math.log(1 + len(units) / count) for word, count in seen_in.items()}
    best = sum(sorted((rarity.get(word, 0.0) for word in words), reverse=True)[:8]) or 1.0
    named = {item: _is_named(item, names) for _, item in units}
    mentioned = (*names.code, *names.plain)
    classes = {
        (path, item.name): _rank(item, mentioned)
        for path, file in files.items()
        for item in file.found
        if item.kind == "class" and _rank(item, mentioned)
    }
    used: dict[str, float] = {}
    for (_, item), name_weight in zip(units, named.values(), strict=True):
        for called in item.calls if name_weight >= 1 else ():
            used[called] = max(used.get(called, 0.0), name_weight)
    scores = {}
    for (path, item), bag in units.items():
        owner, _, last = item.name.rpartition(".")
        score = _NAMED * named[item]
        score += _USED * used.get(last, 0.0)
        score += _USED * used.get(owner, 0.0) * (0.5 if owner else 0.0)
        score += _MEMBER * classes.get((path, owner), 0.0) * (2 if last == "__init__" else 1)
        score += _WORDS * sum(rarity[word] for word in bag & words) / best
        # Long functions must earn their room.
        scores[path, item] = score - 0.01 * item.code_lines
    return scores


def _rank(item: Definition, mentioned: Sequence[str]) -> float:
    """1 for a class that the issue names first, down to 0.5 for the last; 0 for any other."""
    for place, name in enumerate(mentioned):
        if item.answers_to(name):
            return 1.0 - 0.5 * place / len(mentioned)
    return 0.0


def _is_named(item: Definition, names: Names) -> float:
    """1 when the issue names a definition as code, 0.4 by a plain word, 0.3 by its last part."""
    last = item.name.split(".")[-1]
    for name in names.code:
        if item.answers_to(name):
            return 1.0
    if last in names.plain:
        return 0.4
    if any(last == name.split(".")[-1] for name in names.code):
        return 0.3
    return 0.0


def _inside_function(item: Definition, found: list[Definition]) -> bool:
    outer = item.name.rpartition(".")[0]
    return any(d.name == outer and d.kind == "function" and d.start <= item.start for d in found)


def _words(text: str) -> frozenset[str]:
    """Words of a text in lower case, names split at underscores and capitals, plurals cut."""
    words = set()
    for match in re.finditer(r"\w{3,}", text):
        for part in _CAMEL.split(match.group()):
            for word in _WORD.findall(part):
                words.add(word.lower().removesuffix("s"))
    return frozenset(words)


def _cost(file: _File, item: Definition) -> int:
    """Characters a definition takes when shown."""
    lines = file.source.bare()
    return sum(len(lines[number - 1]) + 5 for number in _code_numbers(item, file.found))


def _shown(path: str, file: _File) -> str:
    """The chosen functions of a file, their classes' first lines, and the globals they use."""
    lines = file.source.bare()
    keep: set[int] = set()
    for item in file.chosen:
        keep.update(_code_numbers(item, file.found))
        outer = item.name.rpartition(".")[0]
        while outer:
            keep.update(d.header for d in file.found if d.name == outer)
            outer = outer.rpartition(".")[0]
    keep.update(_assigned(file, lines, keep))
    keep = {number for number in keep if lines[number - 1].strip() or _within(number, keep)}
    return excerpt(path, lines, keep)


def _within(number: int, keep: set[int]) -> bool:
    return number - 1 in keep and number + 1 in keep


def _code_numbers(item: Definition, found: list[Definition]) -> set[int]:
    """Line numbers of a definition without docstrings, its own and those of functions inside."""
    numbers = set(range(item.start, item.end + 1))
    for inner in found:
        if item.start <= inner.start and inner.end <= item.end and inner.docstring:
            numbers -= set(range(inner.docstring[0], inner.docstring[1] + 1))
    return numbers


def _assigned(file: _File, lines: list[str], keep: set[int]) -> set[int]:
    """Lines of the module and of shown classes that bind a name which the kept lines use."""
    used = set(re.findall(r"[^\W\d]\w+", "\n".join(lines[number - 1] for number in keep)))
    shown = {"", *(item.name.rpartition(".")[0] for item in file.chosen)}
    return {
        number
        for owner, name, start, end in bindings(file.source)
        if name in used and owner in shown
        for number in range(start, min(end, start + _BINDING - 1) + 1)
    }
