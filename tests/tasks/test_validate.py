"""Validation: what makes an instance valid, many at a time, and going on after a stop."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import pytest

from environments.base import Sandbox, SandboxError, SandboxLost, SandboxSpec
from tasks.instance import Instance, SandboxOpener, Task, TaskError, Verdict
from tasks.source import Entry, open_source
from tasks.swe_bench_rows import SweRow
from tasks.validate import NOTHING, Results, Validation, read_results, validate, validate_one
from tests.tasks.row_fixtures import PATCH

RIGHT = {"t": "passed"}
WRONG = {"t": "failed"}
KEPT = {"k": "passed"}
RESOLVED = Verdict(True, "resolved", RIGHT, KEPT)
UNRESOLVED = Verdict(False, "unresolved", WRONG, KEPT)
EMPTY = Verdict(False, "empty_patch")
GOOD = {PATCH.encode(): RESOLVED, NOTHING: UNRESOLVED, b"": EMPTY}


@dataclass
class FakeTask:
    """Gives the verdict that the test says for a patch, and keeps what it was asked for."""

    verdicts: Mapping[bytes, Verdict | Exception | None]
    asked: list[bytes] = field(default_factory=list)
    instance: Instance = field(default_factory=lambda: Instance("x", "y"))

    def tree(self) -> Path:
        raise AssertionError("no tree is needed here")

    def spec(self) -> SandboxSpec:
        raise AssertionError("no sandbox is needed here")

    def grade(self, patch: bytes) -> Verdict | None:
        self.asked.append(patch)
        verdict = self.verdicts[patch]
        if isinstance(verdict, Exception):
            raise verdict
        return verdict


def entry(
    name: str = "a-1", task: Task | Exception | None = None, digest: str = "d", patch: str = PATCH
) -> Entry:
    def made(_: SandboxOpener | None) -> Task:
        if isinstance(task, Exception):
            raise task
        return task or FakeTask(GOOD)

    about = ("title", "repo", "problem", digest, SweRow.model_construct())
    return Entry(name, "swe_bench", *about, made, patch.encode)


def result(**changes: Verdict | Exception | None) -> Validation:
    names = {"reference": PATCH.encode(), "nothing": NOTHING, "empty": b""}
    task = FakeTask(GOOD | {names[key]: verdict for key, verdict in changes.items()})
    return validate_one(entry(task=task))


def test_a_valid_instance() -> None:
    task = FakeTask(GOOD)
    done = validate_one(entry(task=task), sandbox="bubblewrap")
    assert (done.valid, done.why, done.error, done.notes) == (True, "", False, ())
    assert task.asked == [PATCH.encode(), NOTHING, b""]
    assert (done.instance_id, done.digest, done.sandbox) == ("a-1", "d", "bubblewrap")
    assert done.reference["fail_to_pass"] == {"passed": 1}
    assert done.nothing["fail_to_pass"] == {"failed": 1}


@pytest.mark.parametrize(
    ("done", "told", "error"),
    [
        (result(reference=UNRESOLVED), "the reference patch is unresolved, not resolved", False),
        (result(reference=replace(UNRESOLVED, status="patch_failed")), "is patch failed", False),
        (result(nothing=RESOLVED), "a patch that changes nothing is resolved", False),
        (result(empty=UNRESOLVED), "an empty patch is unresolved, not empty_patch", False),
        (result(nothing=replace(UNRESOLVED, status="patch_failed")), "is patch failed", False),
        (result(reference=Verdict(False, "error", detail="lost")), "not be graded: lost", True),
        (result(nothing=Verdict(False, "error", detail="slow")), "not be graded: slow", True),
        (result(reference=SandboxError("no engine")), "SandboxError: no engine", True),
        (result(reference=TaskError("no release")), "TaskError: no release", True),
        (result(reference=None), "no hidden tests", True),
        (validate_one(entry(task=TaskError("no image"))), "no image", True),
        (validate_one(entry(patch="")), "holds no reference patch", True),
    ],
)
def test_what_is_wrong_with_an_instance(done: Validation, told: str, error: bool) -> None:
    assert not done.valid
    assert told in done.why
    assert done.error == error


def test_what_a_reader_should_know_of_a_valid_one() -> None:
    nothing = Verdict(False, "unresolved", WRONG | {"u": "passed"}, {"k": "failed"})
    done = result(nothing=nothing)
    assert done.valid
    assert done.notes == (
        "pass without the change: u",
        "of PASS_TO_PASS, fail without the change: k",
    )


class Waiting(FakeTask):
    """A task whose grading waits until so many do the same."""

    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__(GOOD)
        self.barrier = barrier

    def grade(self, patch: bytes) -> Verdict | None:
        self.barrier.wait(20)
        return super().grade(patch)


def test_so_many_at_a_time_and_no_more() -> None:
    barrier = threading.Barrier(3)
    begun: list[str] = []
    entries = [entry(f"a-{n}", Waiting(barrier)) for n in range(6)]
    done = list(validate(entries, workers=3, on_start=lambda item: begun.append(item.instance_id)))
    assert all(item.valid for item in done), done
    assert sorted(item.instance_id for item in done) == [f"a-{n}" for n in range(6)]
    assert begun[:3] == ["a-0", "a-1", "a-2"]


def test_entries_are_begun_only_when_a_worker_is_free() -> None:
    begun: list[str] = []
    entries = [entry(f"a-{n}") for n in range(50)]
    results = validate(entries, workers=2, on_start=lambda item: begun.append(item.instance_id))
    next(results)
    results.close()
    assert len(begun) <= 4


class FakeBox:
    """A sandbox in which a command runs until it is closed."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        self.used = threading.Event()

    def run(self) -> None:
        self.used.set()
        if not self.closed.wait(30):
            raise AssertionError("it was never closed")
        raise SandboxLost("closed")

    def close(self) -> None:
        self.closed.set()


def test_who_stops_does_not_wait_for_what_runs() -> None:
    boxes: list[FakeBox] = []

    def opened(_: SandboxSpec) -> Sandbox:
        boxes.append(FakeBox())
        return cast(Sandbox, boxes[-1])

    class Running(FakeTask):
        opener: SandboxOpener

        def grade(self, patch: bytes) -> Verdict | None:
            for _ in range(2):  # a second sandbox is refused
                try:
                    cast(FakeBox, self.opener(SandboxSpec())).run()
                except SandboxLost:
                    continue
                except SandboxError as error:
                    return Verdict(False, "error", detail=str(error))
            return None

    def made(opener: SandboxOpener | None) -> Task:
        task = Running(GOOD)
        assert opener is not None
        task.opener = opener
        return task

    quick = entry("a-0")
    slow = replace(entry("a-1"), _task=made)
    results = validate([slow, quick], opened, workers=2)
    assert next(results).instance_id == "a-0"
    assert boxes[0].used.wait(10)
    begun = time.monotonic()
    results.close()
    assert time.monotonic() - begun < 10
    assert boxes[0].closed.is_set()
    assert len(boxes) == 1


def test_workers_must_be_there() -> None:
    with pytest.raises(ValueError, match="workers is 0"):
        list(validate([], workers=0))


# the file of results


def test_a_later_call_does_only_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"
    one, two, three = (entry(f"a-{n}") for n in range(3))
    failed = validate_one(entry("a-1", TaskError("no image")), sandbox="docker")
    with Results(path).open() as results:
        results.add(validate_one(one, sandbox="docker"))
        results.add(failed)
    with Results(path).open() as results:
        assert results.usable(one, "docker") == validate_one(one, sandbox="docker")
        assert results.usable(two, "docker") is None  # nothing is known of it yet
        assert results.usable(three, "docker") is None
        assert results.usable(one, "bubblewrap") is None
        assert results.usable(entry("a-0", digest="other"), "docker") is None
        results.add(replace(failed, valid=True, error=False, why=""))
        assert results.usable(two, "docker") is not None
    assert [item.instance_id for item in read_results(path)] == ["a-0", "a-1"]
    assert len(path.read_text().splitlines()) == 3
    with Results(path).open():
        assert len(path.read_text().splitlines()) == 2  # what was replaced is gone


@pytest.mark.parametrize("kept", [0, 1, 5, 12, 40, -1])
def test_a_line_that_a_crash_cut_short_is_passed_over(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "results.jsonl"
    with Results(path).open() as results:
        results.add(validate_one(entry("a-0")))
    whole = path.read_text()
    path.write_text(whole + whole.replace("a-0", "a-1")[:kept])
    assert [item.instance_id for item in read_results(path)] == ["a-0"]
    with Results(path).open() as results:
        results.add(validate_one(entry("a-2")))
    assert [item.instance_id for item in read_results(path)] == ["a-0", "a-2"]
    path.write_text(whole[:kept])
    assert read_results(path) == []


def test_a_file_that_is_something_else_stays_as_it_is(tmp_path: Path) -> None:
    for text in ("# About\n", "About", "{}\n", '{"instance_id": "a-1"}\n'):
        path = tmp_path / "file"
        path.write_text(text)
        with pytest.raises(TaskError, match="is no validation; name another file"):
            with Results(path).open():
                pass
        assert path.read_text() == text


def test_lines_of_another_format_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with Results(path).open() as results:
        results.add(validate_one(entry("a-0")))
    data = json.loads(path.read_text())
    newer = data | {"format": 99, "instance_id": "a-9"}
    path.write_text(json.dumps(newer) + "\n" + json.dumps(data) + "\n")
    assert [item.instance_id for item in read_results(path)] == ["a-0"]


HOLD = """
import sys
from pathlib import Path
from tasks.validate import Results
with Results(Path(sys.argv[1])).open():
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_processes_do_not_write_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(TaskError, match="another process writes to"):
            with Results(path).open():
                pass
        other.kill()  # the kernel lets go of what it held
        other.wait(10)
        with Results(path).open() as results:
            results.add(validate_one(entry()))
    finally:
        other.kill()
        other.wait(10)
    assert len(read_results(path)) == 1


# for real


def test_two_real_pairs_at_a_time(any_kind: SandboxOpener, tmp_path: Path) -> None:
    source = open_source()
    chosen = [source.find("jsonpointer-3.1.1"), source.find("xmltodict-0.14.2")]
    done = list(validate(chosen, any_kind, workers=2))
    assert {item.instance_id for item in done} == {"jsonpointer-3.1.1", "xmltodict-0.14.2"}
    for item in done:
        assert item.valid, item.why
        assert item.reference["status"] == "resolved"
        assert item.nothing["status"] == "unresolved"
        assert item.seconds > 0
    with Results(tmp_path / "results.jsonl").open() as results:
        for item in done:
            results.add(item)
    assert {i.instance_id: i for i in read_results(tmp_path / "results.jsonl")} == {
        i.instance_id: i for i in done
    }
