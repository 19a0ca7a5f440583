"""Mending the indentation of lines a model wrote, so that they fit where they go."""

from __future__ import annotations

from collections.abc import Iterator


def indent_of(line: str) -> str:
    """The blanks in front of a line."""
    return line[: len(line) - len(line.lstrip(" \t"))]


def shift(lines: list[str], old: str, new: str) -> list[str] | None:
    """`lines` with the leading `old` replaced by `new`; None where one does not start with it."""
    shifted = []
    for line in lines:
        if not line.strip():
            shifted.append("")
        elif line.startswith(old):
            shifted.append(new + line[len(old) :])
        else:
            return None
    return shifted


def candidates(lines: list[str], wanted: str, unit: str = "    ") -> Iterator[list[str]]:
    """Ways to indent `lines` so that the first stands at `wanted`, the likeliest first.

    A small model drops the indentation of the first line, or of the whole text, far more often
    than it means another depth: then the mended forms come first. `unit` is what the file indents
    by; where that is a tab, leading fours of blanks become tabs.
    """
    if unit == "\t":
        lines = [_tabs(line) for line in lines]
    first = next((line for line in lines if line.strip()), "")
    own = indent_of(first)
    rest = [indent_of(line) for line in lines if line.strip()][1:]
    shifted = shift(lines, own, wanted)
    if shifted is None:
        # Lines stand left of the first: the least indented one is the measure.
        least = min(rest, key=len)
        shifted = shift(lines, least, wanted)
    first_only = None
    if own != wanted and rest and all(len(indent) >= len(wanted) for indent in rest):
        at = lines.index(first)
        first_only = [*lines[:at], wanted + first.lstrip(" \t"), *lines[at + 1 :]]
    if own == wanted:
        ways = [lines, shifted]
    elif own:
        ways = [lines, shifted, first_only]
    else:
        ways = [first_only, shifted, lines]
    seen: list[list[str]] = []
    for way in ways:
        if way is not None and way not in seen:
            seen.append(way)
            yield way


def indent_unit(lines: list[str]) -> str:
    """What a file indents by: a tab where more lines start with one than with blanks."""
    tabs = sum(line.startswith("\t") for line in lines)
    blanks = sum(line.startswith("  ") for line in lines)
    return "\t" if tabs > blanks else "    "


def _tabs(line: str) -> str:
    blanks = indent_of(line)
    columns = len(blanks.expandtabs(4))
    return "\t" * (columns // 4) + " " * (columns % 4) + line[len(blanks) :]
