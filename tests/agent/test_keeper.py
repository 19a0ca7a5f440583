"""When a run's states are saved, what stays of them, and which of them is gone on from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent import keeper
from agent.keeper import KeepOptions, RunKeeper
from agent.run_state import NoState, StateFolder
from environments import SandboxError


class Kept:
    """A keeper over trees and caches that are one text each."""

    def __init__(self, run: Path, monkeypatch: pytest.MonkeyPatch, options: KeepOptions) -> None:
        self.now, self.said, self.trees = 0.0, list[str](), list[bytes]()
        every: Any = self  # sandbox, protocol and trajectory at once
        self.keeper = RunKeeper(
            run,
            every,
            every,
            every,
            options,
            since=7,
            model_id="m",
            say=self.said.append,
            clock=lambda: self.now,
        )
        self.tree: Callable[[], bytes] = lambda: b"%d trees" % len(self.trees)
        self.size = 0
        monkeypatch.setattr(keeper, "save_tree", self.save_tree)

    def save_tree(self, sandbox: object, since: int) -> bytes:
        assert (sandbox, since) == (self, 7)
        self.trees.append(self.tree())
        return self.trees[-1]

    def save(self, path: Path, *, model_id: str) -> bool:
        path.write_text(model_id)
        return True

    def turn(self, number: int, *, changed: bool = False) -> None:
        self.size = 100 * number
        state: dict[str, Any] = {"steps": number}
        self.keeper.keep(number, lambda: state, changed=changed)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    return Kept(tmp_path, monkeypatch, KeepOptions(turns=3, seconds=60.0))


def test_caches_are_saved_by_turns_or_by_time_and_two_stay(kept: Kept, tmp_path: Path) -> None:
    states, saved = StateFolder(tmp_path), set[int]()
    for turn, now in enumerate((0.0, 1.0, 2.0, 3.0, 70.0, 129.0, 130.0, 131.0, 132.0, 133.0)):
        kept.now = now
        kept.turn(turn)
        saved |= {at for at, _ in states.caches(turn)}
        assert len(states.caches(turn)) <= 2
    assert saved == {3, 4, 6, 9}
    assert [at for at, _ in states.caches(9)] == [9, 6]
    assert [at for at, _ in states.caches(8)] == [6]


def test_trees_are_saved_where_files_may_have_changed_and_a_damaged_one_is_passed_over(
    kept: Kept, tmp_path: Path
) -> None:
    for turn, changed in enumerate((True, False, True, False)):
        kept.turn(turn, changed=changed)
    assert kept.trees == [b"0 trees", b"1 trees"]
    states = StateFolder(tmp_path)
    newest = states.newest()
    assert (newest.turn, newest.tree, newest.loop) == (3, b"1 trees", {"steps": 3})
    assert newest.trajectory_bytes == 300
    (states.folder / "tree-000003.zip").write_bytes(b"2 trees")
    assert states.newest().turn == 2
    (states.folder / "tree-000002.zip").unlink()
    with pytest.raises(NoState, match=r"tree-000003\.zip is damaged"):
        states.newest()


def test_what_cannot_be_saved_is_said_once_and_tried_again(kept: Kept, tmp_path: Path) -> None:
    def fail() -> bytes:
        raise SandboxError("too many files")

    states = StateFolder(tmp_path)
    kept.turn(0)
    tree, kept.tree = kept.tree, fail
    kept.turn(1, changed=True)
    kept.turn(2)
    assert len(kept.said) == 1
    assert "too many files" in kept.said[0]
    assert states.newest().turn == 0  # never with files of another turn
    kept.tree = tree
    kept.turn(3)
    assert (states.newest().turn, states.newest().tree) == (3, b"1 trees")


def test_a_damaged_note_of_the_task_is_named(tmp_path: Path) -> None:
    states = StateFolder(tmp_path)
    assert states.task() is None
    states.folder.mkdir()
    for text in ('{"instance": {"instance_id": "a', '["a list"]', ""):
        (states.folder / "task.json").write_text(text, encoding="utf-8")
        with pytest.raises(NoState, match=r"task\.json is damaged"):
            states.task()
