"""The folder of a batch: what `kill -9` leaves, whose result a result is, who may write."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.batch import store as store_module
from agent.batch.item import Item
from agent.batch.store import Store, StoreError
from tasks.predictions import read_predictions

HERE = Path(__file__).parent


def item(name: str = "a", **fields: Any) -> Item:
    return Item(source="s", instance_id=name, digest="d", options={"model": "m"}, **fields)


def result(state: str = "finished", **fields: Any) -> dict[str, Any]:
    verdict = {"resolved": True, "status": "resolved"}
    return {"state": state, "verdict": verdict, "error": None, **fields}


def finish(store: Store, one: Item, patch: str = "patch\n") -> Path:
    folder = store.fresh(one)
    (folder / "prediction.diff").write_text(patch)
    store.write(one, result())
    return folder


# Whose result it is


def test_a_result_comes_back_with_what_it_belongs_to(tmp_path: Path) -> None:
    store, one = Store(tmp_path), item()
    assert store.result(one) is None
    folder = finish(store, one)
    found = store.result(one)
    assert found is not None
    assert (found["key"], found["item"]["instance_id"]) == (one.key, "a")
    assert len(found["patch_sha256"]) == 64
    assert store.finished([one, item("b")]) == {one.key: found}
    assert [entry["key"] for entry in store.results()] == [one.key]
    assert folder == tmp_path / "runs" / "a" / f"run-{one.key[:10]}"
    cell = store.folder_of(item(cell="nexus/20%"))
    assert cell.name.startswith("nexus-20--")


def test_a_result_of_another_config_or_row_is_not_taken(tmp_path: Path) -> None:
    store, one = Store(tmp_path), item()
    finish(store, one)
    for other in (item(config="c"), item(attempt=2), item(cell="x"), item("b")):
        assert store.result(other) is None
        # Not even where it lies in the place of the other's.
        shutil.copytree(store.folder_of(one), store.folder_of(other))
        assert store.result(other) is None
        assert store.finished([other]) == {}


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace('"format": 1', '"format": 0'),
        lambda text: text.replace('"state": "finished"', '"state": "half"'),
    ],
)
def test_a_damaged_result_is_none(tmp_path: Path, damage: Callable[[str], str]) -> None:
    store, one = Store(tmp_path), item()
    path = finish(store, one) / "result.json"
    path.write_text(damage(path.read_text()))
    assert store.result(one) is None


def test_a_patch_that_was_not_graded_voids_the_result(tmp_path: Path) -> None:
    store, one = Store(tmp_path), item()
    folder = finish(store, one)
    (folder / "prediction.diff").write_text("another\n")
    assert store.result(one) is None
    (folder / "prediction.diff").write_text("patch\n")
    assert store.result(one) is not None
    (folder / "prediction.diff").unlink()
    assert store.result(one) is None


def test_what_a_try_left_is_set_aside_and_a_finished_run_is_not(tmp_path: Path) -> None:
    store, one = Store(tmp_path), item()
    for number in (1, 2):
        folder = store.fresh(one)
        assert list(folder.iterdir()) == []
        (folder / "trajectory.jsonl").write_text(f"try {number}")
    store.write(one, result("error", error="SandboxLost: gone"))
    found = store.result(one)
    assert found is not None
    assert found["state"] == "error"
    assert store.finished([one]) == {}
    store.fresh(one)
    assert store.result(one) is None
    for number in (1, 2):
        kept = folder.with_name(f"{folder.name}.try-{number}") / "trajectory.jsonl"
        assert kept.read_text() == f"try {number}"
    assert [entry["state"] for entry in store.results()] == []
    (store.folder_of(one) / "prediction.diff").write_text("p")
    store.write(one, result())
    with pytest.raises(StoreError, match="finished"):
        store.fresh(one)


# kill -9

WRITER = """
import os, signal, sys
from pathlib import Path
from agent.batch.store import Store
import test_batch_store as t

stage, store, one = sys.argv[1], Store(Path(sys.argv[2])), t.item()
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
replace = Path.replace
if stage == "before":
    Path.replace = die
elif stage == "after":
    Path.replace = lambda self, to: (replace(self, to), die())
elif stage == "half":
    os.fsync = lambda handle: (os.ftruncate(handle, os.fstat(handle).st_size // 2), die())
store.write(one, t.result(error="new"))
"""


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("stage", ["half", "before", "after"])
def test_kill_9_in_mid_write_leaves_the_old_or_the_new(
    tmp_path: Path, stage: str, old: bool
) -> None:
    store, one = Store(tmp_path), item()
    if old:
        store.write(one, result(error="old"))
    done = subprocess.run(
        [sys.executable, "-c", WRITER, stage, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{HERE.parents[1]}{os.pathsep}{HERE}"},
        check=False,
    )
    assert done.returncode == -9
    found = store.result(one)
    if stage == "after":
        assert found is not None
        assert found["error"] == "new"
    elif old:
        assert found is not None
        assert found["error"] == "old"
    else:
        assert found is None
        assert not (store.folder_of(one) / "result.json").exists()
    store.write(one, result(error="later"))
    assert store.result(one) is not None


# One batch at a time

HOLDER = """
import subprocess, sys, time
from pathlib import Path
from agent.batch.store import Store
store = Store(Path(sys.argv[1]))
with store.lock():
    if sys.argv[2:]:
        worker = subprocess.Popen(["sleep", sys.argv[2]], pass_fds=[store.lock_fd],
                                  stdout=subprocess.DEVNULL)
    print("held", flush=True)
    time.sleep(60)
"""


def holder(folder: Path, *more: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), *more],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_batch_is_refused_by_name_and_a_dead_ones_lock_is_taken(tmp_path: Path) -> None:
    process = holder(tmp_path)
    try:
        with pytest.raises(StoreError, match=f"in use by process {process.pid} on "):
            with Store(tmp_path).lock():
                pass
        Store(tmp_path).note_session({})  # reading and writing need no lock of their own
    finally:
        process.kill()
        process.wait()
    with Store(tmp_path).lock():
        with pytest.raises(StoreError, match=f"process {os.getpid()} "):
            with Store(tmp_path).lock():
                pass
    with Store(tmp_path).lock():
        pass


def test_workers_of_a_dead_batch_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = holder(tmp_path, "1.5")
    process.kill()
    process.wait()
    monkeypatch.setattr(store_module, "_ORPHANS", 0.2)
    with pytest.raises(StoreError, match="which died, still go on"):
        with Store(tmp_path).lock():
            pass
    monkeypatch.setattr(store_module, "_ORPHANS", 20.0)
    with Store(tmp_path).lock():
        pass


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(StoreError, match=r"thesis\.tex"):
        with Store(tmp_path).lock():
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thesis.tex"]
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be used"):
        with Store(tmp_path / "file").lock():
            pass
    own = tmp_path / "own"
    own.mkdir()
    # Killed before its first word: the next one is not put off by what that leaves.
    (own / ".lock").touch()
    (own / ".manifest.json.1.tmp").touch()
    with Store(own).lock():
        Store(own).folder_of(item()).mkdir(parents=True)
    with Store(own).lock():
        Store(own).note_session({"argv": ["one"]})
        Store(own).note_session({"argv": ["two"]})
    assert [entry["argv"] for entry in Store(own).sessions()] == [["one"], ["two"]]
    (own / "manifest.json").write_text(json.dumps({"format": 9, "sessions": []}))
    with pytest.raises(StoreError, match="format 9"):
        with Store(own).lock():
            pass


# Predictions


def test_predictions_are_in_the_official_format_one_file_a_cell_and_attempt(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path)
    options = {"model": "org/m", "method": "nexus", "protocol": "full_context"}
    items = [
        Item(source="s", instance_id=name, digest="d", options=options, cell=cell, attempt=attempt)
        for cell in ("", "h2o")
        for attempt in (1, 2)
        for name in ("a", "b")
    ]
    for one in items[:-1]:
        finish(store, one, f"{one.instance_id} {one.cell} {one.attempt}\n")
    store.write(items[-1], result("error", error="x"))
    names = [path.name for path in store.predictions(items)]
    assert names == [
        "predictions.jsonl",
        "predictions.attempt-2.jsonl",
        "predictions.h2o.jsonl",
        "predictions.h2o.attempt-2.jsonl",
    ]
    found = read_predictions(tmp_path / "predictions.jsonl")
    assert [(name, p.patch) for name, p in found.items()] == [("a", b"a  1\n"), ("b", b"b  1\n")]
    assert found["a"].model == "org/m+nexus+full_context"
    assert list(read_predictions(tmp_path / names[-1])) == ["a"]
    lines = (tmp_path / "predictions.jsonl").read_text().splitlines()
    assert set(json.loads(lines[0])) == {"instance_id", "model_name_or_path", "model_patch"}
