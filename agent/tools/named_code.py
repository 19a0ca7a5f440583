"""The code an issue is about in a tree of any language, by the paths and names that it mentions.

No language is parsed: a definition is told from a use by the words and signs around the name, and
it ends where its braces close or the indentation comes back.
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from agent.tools.names import Names
from agent.tools.text import SourceText, excerpt
from agent.tools.workspace import NOT_OWN, Workspace
from environments.base import SandboxFileError

# Suffixes of source text. Python has a way of its own, and comes here when that finds nothing.
SUFFIXES = (
    *("c", "h", "cc", "cpp", "cxx", "hh", "hpp", "m", "mm", "cs", "java", "kt", "scala", "swift"),
    *("js", "jsx", "mjs", "cjs", "ts", "tsx", "vue", "svelte", "go", "rs", "zig", "d", "dart"),
    *("rb", "php", "pl", "pm", "lua", "tcl", "sh", "bash", "awk", "py", "r", "R", "jl"),
    *("ex", "exs", "erl", "hs", "ml", "mli", "fs", "clj", "lisp", "el", "scm", "f90", "pas", "asm"),
    *("s", "sql"),
)
_SKIPPED = (*NOT_OWN, "vendor", "third_party", "dist", "build", "target")
_PATH = re.compile(r"[\w./+-]*\w\.[A-Za-z]\w{0,5}\b")
_FILES = 40  # opened at most
_NAMES = 30
_LONGEST = 60  # lines of a definition that are shown
_AROUND = 6  # lines above and below a place that is no definition
_SEPARATOR = re.compile(r"[.:>]+")
_COMMENT = ("//", "#!", "*", "--", "import ", "return ")
_QUOTED = re.compile(r"'(\\.|[^'\\])'|\"(\\.|[^\"\\])*\"|//.*")
_STATEMENT = re.compile(r"\s*(if|for|while|switch|return|else|case)\b")
# what may stand between a list of parameters and the body: const, throws A, -> T, : T
_BEFORE_BODY = re.compile(
    r"(\s*(const|noexcept|override|throws [\w., ]+|(->|:)\s*[\w<>,\[\] ]+))*\s*\{"
)
_KEYWORD = (
    r"\b(?:function|func|fn|def|class|struct|union|enum|interface|trait|type|module|package|"
    r"namespace|impl|proc|sub|macro|record|object|protocol|extension|define)\b"
)


def named_code(workspace: Workspace, issue: str, names: Names, *, max_chars: int) -> str:
    """Source around what the issue names, at most `max_chars` characters: the files whose paths it
    mentions first, then where its names are defined, then where they are used.

    Each file under its path, lines with their numbers.
    """
    if max_chars <= 0:
        return ""
    mentioned = _mentioned(workspace, issue)
    found: list[tuple[float, str, range, SourceText]] = []
    for group, uses in ((names.code, True), (names.plain, False)):
        last = dict.fromkeys(_SEPARATOR.split(name)[-1] for name in group)
        wanted = [name for name in last if len(name) > 2][:_NAMES]
        hits = _hits(workspace, wanted)
        order = dict.fromkeys([*mentioned, *sorted(hits, key=lambda path: -hits[path])])
        for path in list(order)[:_FILES]:
            try:
                source = workspace.read(path)
            except (SandboxFileError, ValueError):
                continue
            found += _places(path, source, wanted, named=path in mentioned, uses=uses)
        if any(score > 3 for score, *_ in found):
            break
    return _shown(sorted(found, key=lambda item: -item[0]), max_chars)


def _mentioned(workspace: Workspace, issue: str) -> list[str]:
    """Files of the tree that the issue names by path or by the end of one."""
    wanted = list(dict.fromkeys(match.strip("./") for match in _PATH.findall(issue)))[:20]
    files = []
    for path in wanted:
        name = posixpath.basename(path)
        result = workspace.run(["find", ".", *_pruned(), "-type", "f", "-name", name, "-print"])
        ends = [line.removeprefix("./") for line in result.text.splitlines()]
        files += [found for found in ends if found == path or found.endswith(f"/{path}")][:3]
    return list(dict.fromkeys(files))


def _hits(workspace: Workspace, names: Sequence[str]) -> dict[str, float]:
    """Files that hold any of the names, tests left out, by how rare those are."""
    if not names:
        return {}
    command = ["grep", "-rIwoHF", "-m", "5", *(f"--include=*.{suffix}" for suffix in SUFFIXES)]
    command += [f"--exclude-dir={folder}" for folder in _SKIPPED]
    command += ["--exclude=*.min.js", *(word for name in names for word in ("-e", name)), "."]
    held: dict[str, set[str]] = {}
    for line in workspace.run(command, output_cap=2_000_000).text.splitlines():
        path, _, name = line.removeprefix("./").rpartition(":")
        if path.rpartition(".")[2] in SUFFIXES and not workspace.is_test(path):
            held.setdefault(path, set()).add(name)
    spread = Counter(name for found in held.values() for name in found)
    return {path: sum(1 / spread[name] for name in found) for path, found in held.items()}


def _pruned() -> list[str]:
    ors: list[str] = []
    for folder in _SKIPPED:
        ors += [*(["-o"] if ors else []), "-name", folder]
    return ["(", *ors, ")", "-prune", "-o"]


def _places(
    path: str, source: SourceText, names: Sequence[str], *, named: bool, uses: bool
) -> list[tuple[float, str, range, SourceText]]:
    """Line ranges of a file that are worth showing, each with how much speaks for it. With `uses`
    also where a name that is not defined there is used."""
    lines = source.bare()
    found = []
    for name in names:
        word = re.compile(rf"(?<![\w$]){re.escape(name)}(?![\w$])")
        rows = [number for number, line in enumerate(lines, 1) if word.search(line)]
        definitions = [number for number in rows if _defines(lines, number, name)]
        for number in definitions[:3]:
            span = range(_start(lines, number), _end(lines, number) + 1)
            found.append((10.0 + 5 * named - 0.02 * len(span), path, span, source))
        for number in rows[: 2 if uses and not definitions else 0]:
            first, end = max(1, number - _AROUND), min(len(lines), number + _AROUND)
            found.append((3.0 + 2 * named, path, range(first, end + 1), source))
    if named and not found:
        found.append((2.0, path, range(1, min(len(lines), _LONGEST) + 1), source))
    return found


def _defines(lines: Sequence[str], number: int, name: str) -> bool:
    """Whether a line looks like the definition of a name rather than a use of it."""
    line, own = lines[number - 1], re.escape(name)
    if line.lstrip().startswith(_COMMENT):
        return False
    if re.search(rf"{_KEYWORD}[^=;]*?(?<![\w$.]){own}(?![\w$])", line):
        return not line.rstrip().endswith(";")
    if re.search(rf"(?<![\w$]){own}\s*[:=]\s*(async\b\s*)?(function\b|\(|[\w$]+\s*=>)", line):
        return True
    # name(...) { or, as older C has it, with the brace on a line below
    called = re.match(rf"^[\w\s*&<>:,~\[\]$]*(?<![\w$.]){own}\s*\(", line)
    if called is None or _STATEMENT.match(line):
        return False
    text = " ".join(lines[number - 1 : number + 7])[called.end() :]
    depth = 1
    for at, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if depth == 0:
            return _BEFORE_BODY.match(text[at + 1 :]) is not None
    return False


def _start(lines: Sequence[str], number: int) -> int:
    """The line above where it holds the type and no more, as older C has it."""
    above = lines[number - 2] if number > 1 else ""
    own = not _indent(lines[number - 1]) and re.fullmatch(r"[A-Za-z_][\w\s*&<>:]*", above)
    return number - 1 if own else number


def _end(lines: Sequence[str], first: int) -> int:
    """The last line of a definition: where its braces close, else before the next line that is
    indented no deeper."""
    depth, seen = 0, False
    most = min(len(lines), first + _LONGEST - 1)
    for number in range(first, most + 1):
        text = _QUOTED.sub("", lines[number - 1])
        depth += text.count("{") - text.count("}")
        seen = seen or "{" in text
        if seen and depth <= 0:
            return number
        if not seen and (text.rstrip().endswith(";") or number > first + 8):
            break
    if seen:
        return most
    indent = _indent(lines[first - 1])
    for number in range(first + 1, most + 1):
        line = lines[number - 1]
        if line.strip() and _indent(line) <= indent:
            return number if line.strip() in ("end", "fi", "done", ")") else number - 1
    return most


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _shown(found: Iterable[tuple[float, str, range, SourceText]], max_chars: int) -> str:
    """The best places that fit, by file, in the order of their lines."""
    chosen: dict[str, tuple[SourceText, set[int]]] = {}
    spent = 0
    for _, path, span, source in found:
        lines = source.bare()
        numbers = chosen[path][1] if path in chosen else set()
        new = [number for number in span if number not in numbers]
        cost = sum(len(lines[number - 1]) + 7 for number in new)
        cost += 0 if path in chosen else len(path) + 20
        if not new or spent + cost > max_chars:
            continue
        spent += cost
        chosen.setdefault(path, (source, set()))[1].update(new)
    return "\n\n".join(
        excerpt(path, source.bare(), numbers) for path, (source, numbers) in chosen.items()
    )
