"""What a project's own notes say of the releases between two versions."""

from __future__ import annotations

import re
from pathlib import Path

from packaging.version import InvalidVersion, Version

MOST = 3000  # characters of notes that are taken

_NAMES = re.compile(
    r"(?:changes|changelog|change[-_]log|history|news|releases?|release[-_]?notes|whatsnew)"
    r"(?:\.(?:md|rst|txt|adoc))?",
    re.IGNORECASE,
)
_VERSION = re.compile(
    r"(?<![\w.])v?(\d+(?:\.\d+)+(?:\.?(?:a|b|rc|post|dev)\d*)?)(?![\w.]*\d)", re.I
)
_RULE = re.compile(r"([=\-~^#*+_\"'`.])\1{2,}")


def between(tree: Path, old: Version, new: Version) -> tuple[str, str] | None:
    """The notes of the releases after `old` up to `new`, and the file they stand in; None if there
    are none that can be told apart."""
    for folder in (tree, tree / "docs", tree / "doc", tree / "docs" / "source"):
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.is_file() and not path.is_symlink() and _NAMES.fullmatch(path.name):
                text = notes(path.read_text("utf-8", "replace"), old, new)
                if text:
                    return text, str(path.relative_to(tree))
    return None


def notes(text: str, old: Version, new: Version) -> str:
    """The sections of a change log whose heading names a version after `old` and up to `new`."""
    lines = text.splitlines()
    heads = [(number, found) for number in range(len(lines)) if (found := _heading(lines, number))]
    ends = [number for number, _ in heads[1:]] + [len(lines)]
    parts = [
        "\n".join(_body(lines[start + 1 : end]))
        for (start, version), end in zip(heads, ends, strict=True)
        if old < version <= new
    ]
    whole = "\n\n".join(part for part in parts if part)
    return whole if len(whole) <= MOST else whole[:MOST].rsplit("\n", 1)[0] + "\n[...]"


def _heading(lines: list[str], number: int) -> Version | None:
    """The version that a heading line names; None if it is no heading or names none."""
    line = lines[number]
    found = _VERSION.search(line)
    if found is None or len(line) > 120:
        return None
    following = lines[number + 1].strip() if number + 1 < len(lines) else ""
    marked = line.startswith(("#", "=")) or bool(_RULE.fullmatch(following))
    plain = re.fullmatch(r"(?:version|release)?[\s\[*]*", line[: found.start()], re.IGNORECASE)
    short = len(line[found.end() :].split()) <= 5 and not line.rstrip().endswith(".")
    if not marked and not (plain is not None and short and not line[:1].isspace()):
        return None
    try:
        return Version(found[1])
    except InvalidVersion:
        return None


def _body(lines: list[str]) -> list[str]:
    """The lines of a section without rules at its head and blank lines around it."""
    while lines and (not lines[0].strip() or _RULE.fullmatch(lines[0].strip())):
        lines = lines[1:]
    while lines and (not lines[-1].strip() or _RULE.fullmatch(lines[-1].strip())):
        lines = lines[:-1]
    return [line.rstrip() for line in lines]
