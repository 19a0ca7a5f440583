"""Trajectories read while they are written, and cut, and replaced."""

from __future__ import annotations

import json
from pathlib import Path

from agent.run_lines import Lines
from agent.trajectory import TRAJECTORY, write_atomic


def told(*steps: int) -> bytes:
    return b"".join(json.dumps({"kind": "step", "step": step}).encode() + b"\n" for step in steps)


def steps(lines: Lines) -> list[int]:
    lines.poll()
    return [entry["step"] for entry in lines.entries]


def test_what_is_added_is_read_once_it_is_whole(tmp_path: Path) -> None:
    lines = Lines(tmp_path)
    assert steps(lines) == []
    with (tmp_path / TRAJECTORY).open("ab", buffering=0) as file:
        file.write(told(1) + told(2)[:9])
        assert (steps(lines), lines.torn) == ([1], True)
        first = lines.entries[0]
        file.write(told(2)[9:] + b"nothing\n" + told(3))
        assert (steps(lines), lines.torn, lines.damaged) == ([1, 2, 3], False, [3])
    assert lines.entries[0] is first


def test_another_file_is_read_anew_however_long_it_is(tmp_path: Path) -> None:
    file, lines = tmp_path / TRAJECTORY, Lines(tmp_path)
    file.write_bytes(told(1) + b"nothing\n" + told(2, 3))
    assert (steps(lines), lines.damaged) == ([1, 2, 3], [2])
    write_atomic(file, told(1, 4, 5, 6, 7, 8))
    assert (steps(lines), lines.damaged) == ([1, 4, 5, 6, 7, 8], [])
    file.write_bytes(told(9))  # the same file, cut
    assert steps(lines) == [9]


def test_an_end_counts_until_the_run_goes_on(tmp_path: Path) -> None:
    end, on = b'{"kind": "end", "exit": "interrupted"}\n', b'{"kind": "resume", "step": 1}\n'
    ends = []
    for words in (told(1), told(1) + end, told(1) + end + on, told(1) + end + on + told(2) + end):
        (tmp_path / TRAJECTORY).write_bytes(words)
        ends.append(Lines.read(tmp_path).end is not None)
    assert ends == [False, True, False, True]
