"""The list of runs: every state, whatever lies in the folder; and names of runs."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from commands import agent, report
from kept_runs import (
    at_width,
    copied,
    finished_run,
    going_on,
    golden,
    kept,
    plain,
    rewrite,
    tell,
    two_attempts,
)

from agent import cli_runs, run_entry
from agent.folder_lock import LOCK, folder_lock
from agent.run_entry import read_run
from agent.run_index import NoSuchRun, find_run, read_runs
from agent.run_lines import Lines

made, several = kept(finished_run), kept(two_attempts)


def ended() -> int:
    """The id of a process that is gone."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def states(root: Path) -> dict[str, tuple[str, str]]:
    return {entry.name: (entry.state, entry.why) for entry in read_runs(root)}


NAME = "20270115-0{}0000-shop-1-00a{}"


# How a run stands


def test_a_finished_run_in_full(made: Path) -> None:
    entry = read_run(made)
    assert (entry.state, entry.exit, entry.verdict) == ("finished", "submitted", "")
    assert (entry.steps, entry.seen, entry.resident, entry.budget) == (4, 1600, 512, 512)
    assert (entry.evictions, entry.evicted_tokens) == (6, 600)
    assert (entry.cache_bytes, entry.peak_bytes) == (3 * 2**20, 4 * 2**20)
    assert (entry.task, entry.model) == ("repo-calc", "tiny")
    assert (entry.method, entry.protocol) == ("nexus", "true_eviction")
    assert (entry.started, entry.seconds, entry.attempts) == (1_800_000_000, 90.0, 1)
    assert not entry.resumable


def test_what_was_evicted_of_a_prefix_taken_over_counts(made: Path, tmp_path: Path) -> None:
    forked = {"forked_evictions": 2, "forked_evicted_tokens": 50}
    done = copied(made, tmp_path, NAME.format(1, 1))
    tell(done, totals={**report(done)["totals"], **forked})
    on = going_on(made, tmp_path, NAME.format(2, 1), steps=4)
    first = {"stats": {"evictions": 0, **forked}}
    rewrite(on, lambda number, line: {**line, **first} if number == 1 else line)
    for place in (done, on):
        entry = read_run(place)
        assert (entry.evictions, entry.evicted_tokens) == (8, 650)


def test_counts_of_a_run_that_goes_on_are_those_of_its_trajectory(
    made: Path, tmp_path: Path
) -> None:
    place = going_on(made, tmp_path, NAME.format(1, 1), steps=3)
    with folder_lock(place):
        entry = read_run(place)
    assert (entry.state, entry.why, entry.exit) == ("running", "", "")
    assert (entry.steps, entry.seen, entry.resident) == (3, 1200, 512)
    assert (entry.evictions, entry.evicted_tokens, entry.peak_bytes) == (3, 300, 4 * 2**20)
    assert (entry.budget, entry.task, entry.model) == (512, "repo-calc", "tiny")


def test_a_run_lives_while_its_lock_is_held_or_its_process_there(
    made: Path, tmp_path: Path
) -> None:
    gone, here = ended(), socket.gethostname()
    known: list[tuple[dict[str, Any], bool | None, str, str]] = [
        # what the report says, whether the lock is held (None: there is none), state, why
        ({"pid": gone, "host": here}, True, "running", ""),
        ({"pid": os.getpid(), "host": here}, False, "died", f"process {os.getpid()} is gone"),
        ({"pid": os.getpid(), "host": here}, None, "running", ""),
        ({"pid": gone, "host": here}, None, "died", f"process {gone} is gone"),
        ({"pid": 1, "host": "elsewhere"}, None, "unclear", "it said that it runs on elsewhere"),
        ({"pid": 1, "host": "elsewhere"}, True, "running", ""),
        ({}, False, "died", "its process is gone"),
        ({}, None, "unclear", "it said that it runs; it was made by an older version"),
    ]
    for number, (told, lock, state, why) in enumerate(known):
        place = going_on(made, tmp_path, NAME.format(number, 1), steps=2, **told)
        if lock is None:
            entry = read_run(place)
        elif lock:
            with folder_lock(place):
                entry = read_run(place)
        else:
            (place / LOCK).touch()
            entry = read_run(place)
        assert (entry.state, entry.why) == (state, why), number


def test_to_look_at_a_run_does_not_stop_another_who_looks(made: Path, tmp_path: Path) -> None:
    place = going_on(made, tmp_path, NAME.format(1, 1), steps=1)
    with (place / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert read_run(place).state == "died"


def test_a_run_that_ends_while_it_is_looked_at_has_not_died(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = going_on(made, tmp_path, NAME.format(1, 1), steps=3)
    read = run_entry.read_object
    with ExitStack() as lock:
        lock.enter_context(folder_lock(place))

        def read_before_it_ends(path: Path) -> dict[str, Any] | None:
            data = read(path)
            tell(place, **report(made))
            lock.close()
            return data

        monkeypatch.setattr(run_entry, "read_object", read_before_it_ends)
        assert read_run(place).state == "running"
        assert read_run(place).state == "finished"


def test_other_ends(made: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"state": "finished", "exit": "step_limit"}, "finished", ""),
        ({"state": "finished", "exit": "error"}, "failed", ""),
        ({"state": "finished", "exit": "sandbox_lost"}, "failed", ""),
        ({"state": "finished", "exit": "interrupted"}, "interrupted", ""),
        ({"state": "interrupted", "exit": "interrupted"}, "interrupted", ""),
        ({"state": "failed", "error": "OSError: disk\nfull"}, "failed", "OSError: disk"),
        ({"state": 7, "exit": "submitted"}, "damaged", "report.json says nothing of how it stands"),
    ]
    for number, (told, state, why) in enumerate(cases):
        entry = read_run(copied(made, tmp_path, NAME.format(number, 2), **told))
        assert (entry.state, entry.why) == (state, why)


def test_what_can_go_on(made: Path, several: Path, tmp_path: Path) -> None:
    alone = going_on(made, tmp_path, NAME.format(1, 1), steps=2, pid=ended())
    (alone / LOCK).touch()
    assert not read_run(alone).resumable
    (alone / "state").mkdir()
    (alone / "state/turn-000002.json").touch()
    assert read_run(alone).resumable
    with folder_lock(alone):
        assert not read_run(alone).resumable
    two = copied(several, tmp_path, NAME.format(1, 2), state="interrupted")
    assert not read_run(two).resumable
    (two / "attempt-2/state").mkdir()
    (two / "attempt-2/state/turn-000001.json").touch()
    assert read_run(two).resumable


def test_attempts_are_one_run(several: Path, tmp_path: Path) -> None:
    entry = read_run(several)
    assert (entry.attempts, entry.steps, entry.exit) == (2, 6, "submitted")
    assert (entry.seen, entry.evictions, entry.evicted_tokens) == (800, 7, 700)
    assert entry.seconds == 90.0
    graded = copied(several, tmp_path, NAME.format(1, 1))
    first, second = report(graded)["attempts"]
    first["verdict"] = {"resolved": False, "status": "unresolved"}
    second["verdict"] = {"resolved": True, "status": "resolved"}
    tell(graded, attempts=[first, second])
    assert (read_run(graded).verdict, read_run(graded).resolved) == ("1 of 2 resolved", 1)
    # The first attempt has ended, the second goes on.
    tell(graded, "attempts", state="running")
    (graded / "attempt-2/report.json").unlink()
    with folder_lock(graded):
        entry = read_run(graded)
    assert (entry.state, entry.attempts, entry.steps) == ("running", 2, 6)
    assert [run.name for run in read_runs(tmp_path)] == [graded.name]


# Whatever lies in the folder


def test_damaged_and_foreign_files_do_not_break_the_list(made: Path, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    root.mkdir()

    def copy(number: int) -> Path:
        return copied(made, root, NAME.format(number, 1))

    (copy(1) / "report.json").write_text('{"state": "fini')
    (copy(2) / "report.json").write_text("[1, 2]")
    (copy(3) / "report.json").unlink()
    (copy(4) / "report.json").write_bytes(b"\xff\xfe\x00")
    folder = copy(5) / "report.json"
    folder.unlink()
    folder.mkdir()
    (copy(6) / "report.json").write_text("[" * 100_000)
    odd = {"totals": 3, "turns": {}, "verdict": [], "model": None, "cache": "x", "options": 1}
    copied(made, root, NAME.format(7, 1), **odd, seconds=float("nan"), started=[], task={"a": 1})
    torn = copy(8)
    (torn / "report.json").unlink()
    file = torn / "trajectory.jsonl"
    file.write_bytes(b'{"kind": 3}\nnonsense\n' + file.read_bytes()[:-40])
    (root / "notes.txt").write_text("mine")
    (root / "mine").mkdir()
    (root / "mine/report.json").write_text("{}")
    (root / "loop").symlink_to(root)
    (root / NAME.format(9, 1)).mkdir()
    unreadable = "report.json cannot be read"
    assert states(root) == {
        NAME.format(1, 1): ("damaged", unreadable),
        NAME.format(2, 1): ("damaged", unreadable),
        NAME.format(3, 1): ("damaged", "there is no report.json"),
        NAME.format(4, 1): ("damaged", unreadable),
        NAME.format(5, 1): ("damaged", unreadable),
        NAME.format(6, 1): ("damaged", unreadable),
        NAME.format(7, 1): ("finished", ""),
        NAME.format(8, 1): ("damaged", "there is no report.json"),
        NAME.format(9, 1): ("died", "before it began"),
    }
    entry = read_run(torn)
    assert (entry.steps, entry.seen, entry.exit) == (4, 1600, "")
    status, text = agent("runs", root)
    assert status == 0
    assert "7 damaged, 1 died, 1 finished" in " ".join(text.split())


def test_a_run_that_loads_its_model_is_listed(tmp_path: Path) -> None:
    place = tmp_path / NAME.format(1, 1)
    place.mkdir()
    with folder_lock(place):
        assert states(tmp_path) == {place.name: ("running", "starting")}
    assert states(tmp_path) == {place.name: ("died", "before it began")}


def test_unknown_keys_and_lines_are_passed_over(made: Path, tmp_path: Path) -> None:
    place = going_on(made, tmp_path, NAME.format(1, 1), steps=4, later={"a": [1]})
    rewrite(place, lambda number, line: {**line, "new": {"deep": [number]}})
    with (place / "trajectory.jsonl").open("a") as file:
        file.write('{"kind": "note", "text": 1}\n')
    before = read_run(place)
    assert (before.steps, before.seen, before.evictions) == (4, 1600, 6)


# Batches


@pytest.fixture
def batch(made: Path, tmp_path: Path) -> Path:
    """A folder as `agent eval` has it: a finished run, one that a kill left, a try set aside."""
    root = tmp_path / "batch"
    runs = root / "runs/shop-1"
    runs.mkdir(parents=True)
    (root / "manifest.json").write_text('{"format": 1, "sessions": []}')
    (root / "report.json").write_text('{"format": 1, "state": "interrupted", "totals": {}}')
    (root / LOCK).touch()
    options = {"method": "snapkv", "protocol": "full_context", "budget": 64, "model": "m"}
    done = copied(
        made, runs, "nexus-b64-0123456789", item={"instance_id": "shop-1", "options": options},
        task={}, verdict={"resolved": True, "status": "resolved"},
    )  # fmt: skip
    (done / "result.json").write_text("{}")
    for name in ("run-aaaaaaaaaa", "run-aaaaaaaaaa.try-1"):
        left = copied(made, runs, name)
        (left / "report.json").unlink()
        lines = (left / "trajectory.jsonl").read_text().splitlines(keepends=True)
        (left / "trajectory.jsonl").write_text("".join(lines[:3]))
    return root


def test_runs_of_a_batch(batch: Path) -> None:
    left = ("died", "its batch makes it again")
    assert states(batch.parent) == {
        "nexus-b64-0123456789": ("finished", ""),
        "run-aaaaaaaaaa": left,
        "run-aaaaaaaaaa.try-1": left,
    }
    done = read_run(batch / "runs/shop-1/nexus-b64-0123456789")
    assert (done.task, done.method, done.resolved) == ("shop-1", "nexus", 1)
    gone = read_run(batch / "runs/shop-1/run-aaaaaaaaaa")
    assert (gone.task, gone.handle, gone.steps) == ("shop-1", "aaaaaaaaaa", 2)
    assert [row["name"] for row in json.loads(agent("runs", batch, "--json")[1])] == [
        "run-aaaaaaaaaa",
        "nexus-b64-0123456789",
    ]
    assert len(json.loads(agent("runs", batch, "--all", "--json")[1])) == 3


def test_what_the_batch_makes_now_is_younger_than_its_process(batch: Path) -> None:
    folder = batch / "runs/shop-1/run-aaaaaaaaaa"
    (batch / LOCK).write_text("1 host 2027-01-14 00:00:00\n")  # the run began on the 15th
    with folder_lock(batch):
        assert read_run(folder).state == "running"
        assert read_run(folder.with_name(folder.name + ".try-1")).state == "died"
        with (folder / "trajectory.jsonl").open("a") as file:
            file.write('{"kind": "end", "exit": "submitted"}\n')
        assert (read_run(folder).state, read_run(folder).why) == ("running", "being graded")
    assert read_run(folder).state == "died"  # nobody works there
    (batch / LOCK).write_text("1 host 2027-01-17 00:00:00\n")
    with folder_lock(batch):
        assert read_run(folder).state == "died"


# The list


def test_the_list_looks_like_this(
    made: Path, several: Path, batch: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_width(monkeypatch, 150)
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000 + 3 * 86_400)
    root = tmp_path / "runs"
    root.mkdir()
    copied(made, root, NAME.format(1, 1), started="2027-01-17T23:00:00Z")
    copied(several, root, NAME.format(2, 2), started="2027-01-17T22:00:00Z")
    died = going_on(made, root, NAME.format(3, 3), steps=2, pid=0, started="2027-01-17T21:00:00Z")
    (died / LOCK).touch()
    (died / "state").mkdir()
    (died / "state/turn-000002.json").touch()
    batch.rename(root / "batch")
    status, text = agent("runs", root)
    assert status == 0
    assert plain(text) == golden("list.txt")


def test_what_has_no_room_is_named(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_width(monkeypatch, 80)
    text = agent("runs", made.parent)[1]
    assert "protocol" not in text.splitlines()[0]
    assert max(map(len, text.splitlines())) <= 80
    assert re.search(r"a wider terminal shows .*method, protocol", " ".join(text.split()))


def test_names_are_told_apart_however_little_room_there_is(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_width(monkeypatch, 20)
    for name in ("20270115-010000-shop-1-00a1", "20270115-010000-shop-2-00a2"):
        copied(made, tmp_path, name)
    copied(made, tmp_path, "20270115-020000-shop-1-00a3")
    text = " ".join(agent("runs", tmp_path)[1].split())
    assert text.startswith("run state")
    for name in ("20270115-010000-shop-1-00a1", "20270115-010000-shop-2-00a2"):
        assert name in text.replace(" ", "")
    assert "00a3" not in text


def test_the_newest_are_shown(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_runs, "_SHOWN", 2)
    for number in range(5):
        copied(made, tmp_path, NAME.format(number, 1), started=f"2027-01-0{number + 1}T00:00:00Z")
    text = agent("runs", tmp_path)[1]
    found = re.findall(r"^20270115-0(\d)0000", text, re.M)
    assert found == ["4", "3"]
    assert "3 older ones with --all" in text
    assert len(re.findall(r"^20270115", agent("runs", tmp_path, "--all")[1], re.M)) == 5


def test_reports_are_enough(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied(made, tmp_path, NAME.format(1, 1))

    def poll(lines: Lines) -> None:
        raise AssertionError(lines.folder)

    monkeypatch.setattr(Lines, "poll", poll)
    assert [entry.steps for entry in read_runs(tmp_path)] == [4]


def test_no_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status, text = agent("runs")
    assert (status, "`agent run` makes one" in text) == (0, True)
    assert json.loads(agent("runs", "--json")[1]) == []
    status, text = agent("runs", tmp_path / "none")
    assert (status, "there is no folder" in text) == (2, True)


def test_what_a_folder_is_called_steers_nothing(made: Path, tmp_path: Path) -> None:
    copied(made, tmp_path, "\x1b[2J[red]x", state="failed", error="\x1b]0;title\x07why")
    text = agent("runs", tmp_path)[1]
    assert "\x1b" not in text
    assert "[2J[red]x" in text
    assert "why" in text


# Names


def test_names_of_runs(made: Path, batch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = batch.parent
    one = copied(made, root, "20270101-010000-shop-1-00aa", started="2027-01-01T00:00:00Z")
    two = copied(made, root, "20270101-020000-shop-1-00ab", started="2027-01-02T00:00:00Z")
    cell = batch / "runs/shop-1/nexus-b64-0123456789"
    for name, folder in {
        one.name: one,
        "20270101-02": two,
        "00aa": one,
        "0123456789": cell,
        "nexus": cell,
        "aaaaaaaaaa": cell.with_name("run-aaaaaaaaaa"),
        "run-aaaaaaaaaa.try-1": cell.with_name("run-aaaaaaaaaa.try-1"),
        str(one): one,
        str(one / "report.json"): one,
        "last": cell,  # it began on the 15th; what was set aside does not count
    }.items():
        if name == "last":
            shutil.rmtree(cell.with_name("run-aaaaaaaaaa"))
        assert find_run(name, root) == folder, name
    # A folder that is called as a run is begun is no reason not to find it.
    monkeypatch.chdir(root)
    (root / "00aa").mkdir()
    assert find_run("00aa", root) == one


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "2027",
            "could be 2 runs: 20270101-010000-shop-1-00a1, 20270101-020000.*give more of the name",
        ),
        ("20270101-01000-shop", "no run 20270101-01000-shop in .*near to it: 20270101-010000-shop"),
        ("zzz", "no run zzz in [^;]*; `agent runs .*` lists them"),
        ("./nothing", "no folder of a run"),
        (".", "holds 2 runs: `agent runs .*` lists them"),
    ],
)
def test_names_that_are_no_run(
    name: str, message: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        copied(made, tmp_path, f"20270101-0{number}0000-shop-1-00a{number}")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(NoSuchRun, match=message):
        find_run(name, tmp_path)
    status, text = agent("show", name, "--dir", tmp_path)
    assert (status, "error:" in text) == (2, True)


def test_a_name_where_there_are_no_runs(tmp_path: Path) -> None:
    with pytest.raises(NoSuchRun, match="there are no runs in"):
        find_run("last", tmp_path)
    with pytest.raises(NoSuchRun, match=r"there is no folder .*--dir"):
        find_run("last", tmp_path / "runs")
