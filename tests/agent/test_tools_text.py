"""Source text stays byte-exact where it is not touched; what models copy along is dropped."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.tools.text import SourceText, clip, written_lines

# Bytes that matter to line splitting, and some that are no UTF-8.
PIECES = st.sampled_from(
    [
        b"a",
        b"  b",
        b"\n",
        b"\r\n",
        b"\r",
        b"\t",
        b"\x0c",
        b"\x1c",
        "\u2028é".encode(),
        b"\xff",
        b"\xe9",
    ]
)
FILES = st.lists(PIECES, max_size=40).map(b"".join)


@given(FILES)
def test_decoding_and_encoding_gives_the_same_bytes(data: bytes) -> None:
    source = SourceText.decode(data)
    assert source.encode() == data
    assert len(source) == len(data.split(b"\n")) - (data.endswith(b"\n") or not data)


@given(FILES, st.data())
def test_replacing_leaves_every_other_byte(data: bytes, draw: st.DataObject) -> None:
    source = SourceText.decode(data)
    start = draw.draw(st.integers(1, len(source) + 1))
    end = draw.draw(st.integers(start - 1, len(source)))
    new = draw.draw(st.lists(st.sampled_from(["x", "", "  y"]), max_size=3))
    after = source.replace(start, end, new)
    # The oracle works on bytes: lines before and after the range, by splitting at line feeds.
    lines = [line + b"\n" for line in data.split(b"\n")]
    lines[-1] = lines[-1][:-1]
    before, behind = b"".join(lines[: start - 1]), b"".join(lines[end : len(source)])
    result = after.encode()
    assert result.startswith(before.removesuffix(b"\n").removesuffix(b"\r"))
    assert result.endswith(behind)
    assert after.bare(start, start + len(new) - 1) == new or not new
    if behind:
        assert len(after) == len(source) - (end - start + 1) + len(new)


def test_new_lines_take_the_line_end_of_the_file() -> None:
    source = SourceText.decode(b"a\r\nb\r\nc\r\n").replace(2, 2, ["x", "y"])
    assert source.encode() == b"a\r\nx\r\ny\r\nc\r\n"


@pytest.mark.parametrize(
    ("start", "end", "new", "result"),
    [
        (2, 2, ["x"], b"a\nx"),
        (1, 1, ["x"], b"x\nb"),
        (2, 2, [], b"a"),
        (3, 2, ["x"], b"a\nb\nx"),
        (1, 2, ["x", "y"], b"x\ny"),
    ],
)
def test_a_file_without_final_newline_stays_without(
    start: int, end: int, new: list[str], result: bytes
) -> None:
    assert SourceText.decode(b"a\nb").replace(start, end, new).encode() == result


def test_a_zero_byte_is_no_text() -> None:
    with pytest.raises(ValueError, match="not a text"):
        SourceText.decode(b"a\0b")


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("    a\n    b", ["    a", "    b"]),
        ("\n    a\n", ["    a"]),
        ("```python\n    a\n```", ["    a"]),
        ("12|    a\n13|\n14|    b", ["    a", "", "    b"]),
        (" 7|x", ["x"]),
        ("a|b\n1|c", ["a|b", "1|c"]),  # no numbers on every line: it is the text itself
        ("a\r\nb\r\n", ["a", "b"]),
        ("", []),
    ],
)
def test_what_was_copied_from_the_display_is_dropped(text: str, lines: list[str]) -> None:
    assert written_lines(text) == lines


@given(st.text(st.characters(codec="utf-8"), max_size=3000), st.integers(50, 500))
def test_clipped_text_is_short_and_keeps_both_ends(text: str, limit: int) -> None:
    short = clip(text, limit)
    assert len(short) <= max(limit, 0) + 60
    if len(text) <= limit:
        assert short == text
    else:
        assert "characters left out" in short
        assert short[-10:] == text[-10:]
        head = short.split("\n[...")[0]
        assert text.startswith(head)


def test_one_huge_line_is_clipped_too() -> None:
    assert len(clip("x" * 1_000_000, 2_000)) < 2_100
