"""A patch as git writes it, taken apart by file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import PurePosixPath

HEAD = b"diff --git "
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v"}
_TEST_FOLDERS = frozenset(
    {"test", "tests", "testing", "spec", "specs", "__tests__", "testdata", "test_data", "e2e"}
)
_TEST_STEM = re.compile(
    r"""^(?:tests?|conftest)$        # test.py, tests.py, conftest.py
      | ^tests?[_.-]                 # test_a.py, test-a.js
      | [_.-](?:tests?|spec)$        # a_test.go, a.test.js, a_spec.rb
      | (?-i:^Test[A-Z0-9]|[a-z0-9](?:Tests?|TestCase|Spec|IT)$)  # TestA.java, ATest.java
    """,
    re.IGNORECASE | re.VERBOSE,
)


def sections(patch: bytes) -> list[tuple[str, bytes]]:
    """(path, text) of every part of a patch without renames, in order; joined they are the patch.

    A line of content begins with a blank, plus, minus or backslash, and one of a binary part has no
    blank, so a head is never taken for content or the reverse.
    """
    starts = [match.start() for match in re.finditer(rb"^diff --git ", patch, re.MULTILINE)]
    found = []
    for start, end in pairwise([*starts, len(patch)]):
        part = patch[start:end]
        found.append((_path(part[len(HEAD) :].split(b"\n", 1)[0]), part))
    return found


def _path(names: bytes) -> str:
    """`a/X b/X`: both halves name one path."""
    half = names[: (len(names) - 1) // 2]
    if half.startswith(b'"'):
        half = re.sub(rb"\\([0-7]{3}|.)", _unescaped, half[1:-1])
    return half[2:].decode("utf-8", "surrogateescape")


def _unescaped(match: re.Match[bytes]) -> bytes:
    code = match[1]
    if len(code) == 3:
        return bytes([int(code, 8)])
    return _ESCAPES.get(code.decode("latin-1"), code.decode("latin-1")).encode("latin-1")


def is_test_file(path: str, test_paths: Iterable[str] = ()) -> bool:
    """Whether a path is a test by the names that languages give to tests, or lies at one of
    `test_paths` (files and folders, relative to the workspace)."""
    place = PurePosixPath(path)
    if any(place.is_relative_to(PurePosixPath(item)) for item in test_paths):
        return True
    if any(part.lower() in _TEST_FOLDERS for part in place.parts[:-1]):
        return True
    return bool(_TEST_STEM.search(place.stem))
