"""Indentation is mended so that a model's lines fit where they go."""

from __future__ import annotations

import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.tools.indent import candidates, indent_unit

BLOCK = textwrap.dedent(
    """\
    for item in items:
        if item:
            total += item
        else:
            break
    return total"""
).split("\n")


def first(lines: list[str], wanted: str) -> list[str]:
    return next(candidates(lines, wanted))


@given(st.integers(0, 4), st.integers(0, 4))
def test_some_way_restores_a_block_shifted_by_any_depth(have: int, want: int) -> None:
    written = [" " * 4 * have + line for line in BLOCK]
    expected = [" " * 4 * want + line for line in BLOCK]
    assert expected in list(candidates(written, " " * 4 * want))


@given(st.integers(1, 4))
def test_a_block_without_any_indentation_is_shifted_first(want: int) -> None:
    expected = [" " * 4 * want + line for line in BLOCK]
    assert first(BLOCK, " " * 4 * want) == expected


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_first_line_alone_without_indentation_is_put_right_first(depth: int) -> None:
    expected = [" " * 4 * depth + line for line in BLOCK]
    written = [BLOCK[0], *expected[1:]]
    assert first(written, " " * 4 * depth) == expected


def test_an_indentation_that_was_written_is_tried_as_it_is() -> None:
    assert first(["    return 1"], "        ") == ["    return 1"]


def test_every_way_keeps_the_words() -> None:
    for way in candidates(["  a", "b", "    c"], "        "):
        assert [line.strip() for line in way] == ["a", "b", "c"]


def test_lines_left_of_the_first_are_shifted_by_the_least_indented() -> None:
    ways = list(candidates(["    x = 1", "if x:", "    y = 2"], "    "))
    assert ["        x = 1", "    if x:", "        y = 2"] in ways


def test_blanks_become_tabs_in_a_file_of_tabs() -> None:
    ways = list(candidates(["if x:", "    return 1"], "\t", unit="\t"))
    assert ["\tif x:", "\t\treturn 1"] in ways
    assert not any(" " in line[:1] for way in ways for line in way)


def test_the_unit_is_what_most_lines_begin_with() -> None:
    assert indent_unit(["def f():", "\tx", "\ty", "  z"]) == "\t"
    assert indent_unit(["def f():", "    x", "\ty", "    z"]) == "    "
