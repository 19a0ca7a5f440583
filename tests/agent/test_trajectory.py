"""A run's folder survives crashes, and what is read is what was written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.trajectory import (
    PATCH,
    REPORT,
    TRAJECTORY,
    Trajectory,
    new_run_folder,
    read_trajectory,
    write_atomic,
    write_report,
)


def entries(folder: Path) -> list[dict[str, object]]:
    return [{k: v for k, v in line.items() if k != "time"} for line in read_trajectory(folder)]


def test_lines_come_back_in_order(tmp_path: Path) -> None:
    with Trajectory(tmp_path / "run") as trajectory:
        trajectory.append("start", {"user": "naïve\n日本 \udcff", "n": 1})
        trajectory.append("step", {"step": 1})
        # Readable while the run goes on.
        assert len(entries(tmp_path / "run")) == 2
    assert entries(tmp_path / "run") == [
        {"kind": "start", "user": "naïve\n日本 \udcff", "n": 1},
        {"kind": "step", "step": 1},
    ]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 400))
def test_a_torn_last_line_is_left_out(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    folder = tmp_path_factory.mktemp("run")
    with Trajectory(folder / "r") as trajectory:
        for number in range(3):
            trajectory.append("step", {"step": number, "text": "x\n" * 40})
    file = folder / "r" / TRAJECTORY
    whole = file.read_bytes()
    cut = min(cut, len(whole))
    file.write_bytes(whole[:-cut])
    kept = whole[:-cut].count(b"\n")
    assert [entry["step"] for entry in entries(folder / "r")] == list(range(kept))


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    with Trajectory(tmp_path) as trajectory:
        trajectory.append("step", {"step": 1})
    file = tmp_path / TRAJECTORY
    file.write_bytes(b"{broken\n" + file.read_bytes())
    with pytest.raises(ValueError, match="line 1"):
        list(read_trajectory(tmp_path))


def test_an_older_run_is_not_overwritten(tmp_path: Path) -> None:
    Trajectory(tmp_path).close()
    with pytest.raises(FileExistsError):
        Trajectory(tmp_path)


def test_going_on_cuts_what_came_after_and_keeps_it_aside(tmp_path: Path) -> None:
    with Trajectory(tmp_path) as trajectory:
        trajectory.append("step", {"step": 1})
        size = trajectory.size
        trajectory.append("step", {"step": 2})
    later = (tmp_path / TRAJECTORY).read_bytes()[size:]
    for number in (1, 2):
        with Trajectory.reopen(tmp_path, size) as trajectory:
            trajectory.append("step", {"step": 2 + number})
        assert [entry["step"] for entry in entries(tmp_path)] == [1, 2 + number]
    assert (tmp_path / "trajectory.cut-1.jsonl").read_bytes() == later
    assert b'"step": 3' in (tmp_path / "trajectory.cut-2.jsonl").read_bytes()
    with pytest.raises(ValueError, match="fewer than the saved state says"):
        Trajectory.reopen(tmp_path, 10_000)


def test_patch_and_report_are_replaced_whole(tmp_path: Path) -> None:
    patch = b"--- a\r\n+++ b\n\xff\x00 \n"
    with Trajectory(tmp_path) as trajectory:
        trajectory.patch(b"old")
        trajectory.patch(patch)
    write_report(tmp_path, {"exit": "submitted", "text": "\udcff"})
    assert (tmp_path / PATCH).read_bytes() == patch
    assert json.loads((tmp_path / REPORT).read_text())["exit"] == "submitted"
    assert sorted(path.name for path in tmp_path.iterdir()) == [PATCH, REPORT, TRAJECTORY]


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_atomic(tmp_path / "f", b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("agent.trajectory.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_run_folders_never_collide(tmp_path: Path) -> None:
    folders = {new_run_folder(tmp_path, "a/b c") for _ in range(50)}
    assert len(folders) == 50
    assert all("/" not in folder.name and " " not in folder.name for folder in folders)
