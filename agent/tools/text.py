"""Source text by lines, kept byte-exact where it is not touched, and how texts are shown."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_NUMBERED = re.compile(r"^[ \t]*(\d+)\|(.*)$", re.DOTALL)
_FENCE = re.compile(r"^\s*```[\w+-]*\s*$")


@dataclass(frozen=True, slots=True)
class SourceText:
    """A file's lines with their own line ends. Line numbers start at 1.

    Only a line feed ends a line, as for Python's parser and `grep -n`; form feeds and the like are
    part of it. Bytes that are not UTF-8 survive as surrogates.
    """

    lines: tuple[str, ...]

    @classmethod
    def decode(cls, data: bytes) -> SourceText:
        """Lines of `data`. Raises ValueError for a file that is no text (it has a zero byte)."""
        if b"\0" in data:
            raise ValueError("it is not a text file")
        return cls(tuple(_LINE.findall(data.decode("utf-8", errors="surrogateescape"))))

    def encode(self) -> bytes:
        """The file's bytes."""
        return "".join(self.lines).encode("utf-8", errors="surrogateescape")

    def __len__(self) -> int:
        return len(self.lines)

    @property
    def newline(self) -> str:
        """The line end that most lines have."""
        crlf = sum(line.endswith("\r\n") for line in self.lines)
        return "\r\n" if 2 * crlf > len(self.lines) else "\n"

    def bare(self, start: int = 1, end: int | None = None) -> list[str]:
        """Lines `start` to `end`, both included, without their line ends."""
        chosen = self.lines[start - 1 : len(self.lines) if end is None else end]
        return [line.removesuffix("\n").removesuffix("\r") for line in chosen]

    def replace(self, start: int, end: int, new: list[str]) -> SourceText:
        """The text with lines `start`..`end` replaced by `new` (without line ends).

        `end == start - 1` inserts before `start`. The last line keeps the end it had, or had not.
        """
        newline = self.newline
        before, after = list(self.lines[: start - 1]), self.lines[end:]
        fresh = [line + newline for line in new]
        if fresh and before and not before[-1].endswith("\n"):
            before[-1] += newline
        ended = not self.lines or self.lines[-1].endswith("\n")
        if not after and not ended:
            if fresh:
                fresh[-1] = fresh[-1].removesuffix(newline)
            elif before:
                before[-1] = before[-1].removesuffix("\n").removesuffix("\r")
        return SourceText((*before, *fresh, *after))

    def numbered(self, start: int, end: int) -> str:
        """Lines `start`..`end` as they are shown: number, bar, text."""
        return numbered(self.bare(start, end), start)


def numbered(lines: list[str], start: int) -> str:
    """Lines with their numbers, one a line."""
    return "\n".join(f"{number}|{line}" for number, line in enumerate(lines, start))


def excerpt(path: str, lines: list[str], numbers: Iterable[int]) -> str:
    """Some lines of a file under its path, with their numbers and dots for what lies between."""
    rows = [f"{path} ({len(lines)} lines):"]
    last = 0
    for number in sorted(numbers):
        if last and number != last + 1:
            rows.append("...")
        rows.append(f"{number}|{lines[number - 1]}")
        last = number
    return "\n".join(rows)


def written_lines(text: str) -> list[str]:
    """Lines of a text the model wrote, without what it copied from the way lines are shown.

    An enclosing code fence and line numbers in front of every line are dropped, and so is one line
    end at the close.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    while lines and not lines[0].strip():
        lines.pop(0)
    while lines and not lines[-1].strip():
        lines.pop()
    if lines and _FENCE.match(lines[0]):
        lines.pop(0)
        if lines and _FENCE.match(lines[-1]):
            lines.pop()
    numbers = [_NUMBERED.match(line) for line in lines if line.strip()]
    if numbers and all(numbers):
        lines = [m.group(2) if (m := _NUMBERED.match(line)) else line for line in lines]
    return lines


def clip(text: str, limit: int) -> str:
    """`text` in at most about `limit` characters: head and tail, and how much is left out.

    Cut at line ends where lines are short enough, inside a line where they are not.
    """
    if len(text) <= limit:
        return text
    head = text[: limit // 3]
    tail = text[len(text) - (limit - limit // 3) :]
    if (cut := head.rfind("\n")) > len(head) // 2:
        head = head[: cut + 1]
    if 0 <= (cut := tail.find("\n")) < len(tail) // 2:
        tail = tail[cut + 1 :]
    omitted = len(text) - len(head) - len(tail)
    return f"{head.rstrip()}\n[... {omitted} characters left out ...]\n{tail}"


def clip_lines(text: str, first: int, last: int) -> str:
    """The first and last lines of a text that has more than both together."""
    lines = text.split("\n")
    if len(lines) <= first + last:
        return text
    left_out = len(lines) - first - last
    return "\n".join([*lines[:first], f"[... {left_out} lines left out ...]", *lines[-last:]])
