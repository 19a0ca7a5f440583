"""Several items at once in one worker: shares, what a failure does to the others, the end."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from commands import agent
from test_batch_engine import WORK, alive, entries, item, log, names, run, store, wait_for
from test_cli import said

from agent.batch import work
from agent.batch.engine import LocalEngine
from agent.batch.item import Item
from agent.batch.store import Store
from agent.batch.worker_state import WorkerState
from agent.interrupts import Interrupted
from agent.run_options import parse_options
from agent.serving import Serving
from tasks.source import open_source

__all__ = ["log", "store"]  # fixtures


def at_once(log: Path) -> int:
    """The most items that were begun and not ended."""
    open_, most = set[str](), 0
    for entry in entries(log):
        (open_.add if entry["kind"] == "start" else open_.discard)(entry["id"])
        most = max(most, len(open_))
    return most


def test_sessions_of_a_worker_share_a_process_and_what_it_keeps(store: Store, log: Path) -> None:
    items = [item(f"i{n}", "until 3") for n in range(5)]
    found, events = run(store, items, sessions=3)
    assert [r["state"] for _, r in found] == ["finished"] * 5
    assert len({entry["pid"] for entry in entries(log)}) == 1
    assert len({result["about"]["model"] for _, result in found}) == 1
    assert at_once(log) == 3
    begun = [name for name, event in events if event["event"] == "start"]
    assert begun == [one.instance_id for one in items]
    for one in items:
        kinds = [(e["event"], e.get("phase")) for name, e in events if name == one.instance_id]
        assert kinds == [("start", None), ("tell", "work"), ("tell", "grading"), ("end", None)]


def test_workers_get_equal_shares_whoever_is_ready_first(store: Store, log: Path) -> None:
    found, _ = run(store, [item(f"i{n}", "until 4") for n in range(4)], workers=2, sessions=4)
    assert len(found) == 4
    assert sorted(Counter(e["pid"] for e in entries(log, "start")).values()) == [2, 2]


def test_what_died_in_company_is_tried_again_alone(store: Store, log: Path) -> None:
    items = [
        item("a", "until 9", "resolve"),
        item("b", "until 9", "resolve"),
        item("killer", "die with 3", "die"),
        item("later"),
    ]
    found, events = run(store, items, sessions=3, retries=1)
    results = dict(found)
    assert {name: r["state"] for name, r in results.items()} == {
        "a": "finished", "b": "finished", "killer": "error", "later": "finished",
    }  # fmt: skip
    assert results["killer"]["error"].startswith("WorkerDied")
    # The first death is laid to nobody's account; alone, the killer has its own two tries.
    assert [results[name]["tries"] for name in ("a", "b", "killer", "later")] == [1, 1, 2, 1]
    assert Counter(name for name, e in events if e["event"] == "retry") == Counter(
        ["a", "b", "killer", "killer"]
    )
    # Each second try began when all that had been begun before was over: by its end, or by death.
    lines = [(entry["kind"], entry["id"]) for entry in entries(log)]
    assert sorted(lines[:3]) == [("start", "a"), ("start", "b"), ("start", "killer")]
    for name in ("a", "b"):
        place = lines.index(("start", name), 3)
        assert lines[place + 1] == ("end", name)


def test_what_raises_ends_no_other_and_the_worker_takes_nothing_new(
    store: Store, log: Path
) -> None:
    items = [item("bad", "raise"), item("long", "after bad"), item("next"), item("last")]
    results, events = run(store, items, sessions=2)
    found = dict(results)
    assert {name: r["state"] for name, r in found.items()} == {
        "bad": "error", "long": "finished", "next": "finished", "last": "finished",
    }  # fmt: skip
    pids = {entry["id"]: entry["pid"] for entry in entries(log, "start")}
    assert pids["long"] == pids["bad"]
    told = [(name, event["event"]) for name, event in events]
    begun_later = [name for name, kind in told[told.index(("bad", "end")) :] if kind == "start"]
    assert "last" in begun_later
    assert all(pids[name] != pids["bad"] for name in begun_later)


def test_what_raised_in_company_is_tried_again_alone(store: Store, log: Path) -> None:
    items = [item("bad", "raise", "resolve"), item("long", "after bad"), *map(item, "xy")]
    items.append(item("slow", 1.5))  # there is room beside it, which is not used
    found = dict(run(store, items, sessions=2, retries=1)[0])
    assert {r["state"] for r in found.values()} == {"finished"}
    assert found["bad"]["tries"] == 2
    lines = [(entry["kind"], entry["id"]) for entry in entries(log)]
    again = lines.index(("start", "bad"), lines.index(("start", "bad")) + 1)
    assert lines[again + 1] == ("end", "bad")
    begun = Counter(name for kind, name in lines[:again] if kind == "start")
    assert begun == Counter(name for kind, name in lines[:again] if kind == "end") + Counter(
        ["bad"]
    )


def test_one_that_is_silent_costs_the_others_no_try(store: Store, log: Path) -> None:
    items = [item("mute", "mute"), item("busy", "chatty 1", "resolve"), item("end")]
    found = dict(run(store, items, sessions=2, silence=5.0)[0])
    assert found["mute"]["error"].startswith("Silence: nothing was heard for 5 s")
    assert found["mute"]["tries"] == 1
    assert (found["busy"]["state"], found["busy"]["tries"]) == ("finished", 1)
    assert names(log, "start").count("busy") == 2
    assert found["end"]["state"] == "finished"


def test_closing_tells_all_sessions_and_leaves_them_open(store: Store, log: Path) -> None:
    items = [item("a", "until 3"), item("b", "stopped"), item("c", "stopped")]
    with store.lock():
        running = LocalEngine(store, sessions=3, grace=20).run(items, WORK)
        assert next(running)[0].instance_id == "a"
        wait_for("waits", lambda: sorted(names(log, "waits")) == ["b", "c"])
        running.close()
    assert sorted(names(log, "patch")) == ["b", "c"]  # in order, not by a kill
    assert not any(alive(entry["pid"]) for entry in entries(log))
    assert [store.result(one) is not None for one in items] == [True, False, False]


# What a worker keeps


class Model:
    """Knows how many of it live."""

    living = 0

    def __init__(self, name: str) -> None:
        assert not Model.living
        Model.living += 1
        self.name = name

    def end(self) -> None:
        Model.living -= 1


def test_another_thing_is_made_when_nobody_uses_the_first_any_more() -> None:
    state, order = WorkerState(2), list[str]()
    has_it, may_end = threading.Event(), threading.Event()

    def first() -> None:
        with state.use("model", "a", lambda: Model("a"), end=Model.end) as model:
            has_it.set()
            assert may_end.wait(20)
            order.append(model.name)

    def second() -> None:
        with state.use("model", "b", lambda: Model("b"), end=Model.end) as model:
            order.append(model.name)

    threads = [threading.Thread(target=work) for work in (first, second)]
    threads[0].start()
    assert has_it.wait(20)
    threads[1].start()
    with state.use("model", "a", lambda: pytest.fail("made twice")) as model:
        assert model.name == "a"
        may_end.set()
        threads[0].join(20)
        assert order == ["a"]
    threads[1].join(20)
    assert order == ["a", "b"]
    assert Model.living == 1
    state.close()
    assert Model.living == 0


def test_stopping_reaches_users_and_those_that_wait() -> None:
    state, told = WorkerState(2), list[str]()
    raised: list[BaseException] = []

    def waiting() -> None:
        try:
            with state.use("model", "b", lambda: pytest.fail("made")):
                pass
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=waiting)
    with state.use("model", "a", object, stop=lambda _, why: told.append(why)):
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
        state.stop("SIGTERM")
        thread.join(20)
    assert told == ["SIGTERM"]
    [error] = raised
    assert isinstance(error, Interrupted)
    assert str(error) == "SIGTERM"
    with pytest.raises(Interrupted), state.use("model", "c", object):
        pass


def test_what_cannot_be_made_is_told_to_all_who_want_it_and_tried_once() -> None:
    state, tried = WorkerState(2), list[int]()
    asked, may_fail = threading.Event(), threading.Event()
    raised: list[BaseException] = []

    def broken() -> object:
        tried.append(1)
        asked.set()
        assert may_fail.wait(20)
        raise MemoryError("too large")

    def want() -> None:
        try:
            with state.use("model", "a", broken):
                pass
        except MemoryError as error:
            raised.append(error)

    threads = [threading.Thread(target=want) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert asked.wait(20)
    may_fail.set()
    for thread in threads:
        thread.join(20)
    assert (len(raised), tried) == (3, [1])
    with state.use("model", "b", lambda: "smaller") as made:  # another one can be had
        assert made == "smaller"


def test_stopping_does_not_wait_for_what_is_being_made() -> None:
    state, told = WorkerState(2), list[str]()
    begun, may_end = threading.Event(), threading.Event()

    def slow() -> str:
        begun.set()
        assert may_end.wait(20)
        return "model"

    def want() -> None:
        with state.use("model", "a", slow, stop=lambda value, why: told.append(f"{value}: {why}")):
            pass

    thread = threading.Thread(target=want)
    thread.start()
    assert begun.wait(20)
    state.stop("SIGINT")  # returns, though nothing is made yet
    assert told == []
    may_end.set()
    thread.join(20)
    assert told == ["model: SIGINT"]
    state.close()


def test_a_result_that_cannot_be_kept_ends_the_worker_and_is_heard_of(
    store: Store, log: Path
) -> None:
    items = [item("full", "full disk", "resolve"), item("other", "until 3", "resolve")]
    found = dict(run(store, items, sessions=2, retries=0)[0])
    assert {name: r["state"] for name, r in found.items()} == {
        "full": "finished", "other": "finished",
    }  # fmt: skip
    assert "No space left" in (store.folder / "logs" / "worker-0.log").read_text()


# The real work


@pytest.mark.parametrize("sessions", [1, 3])
def test_sessions_share_the_engine_and_no_tokenizer(
    sessions: int, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[Any, Any, Any]] = []
    together = threading.Barrier(sessions, timeout=30)

    def make_attempt(task: object, loaded: Any, chat: Any, *_: Any, engine: Any, **__: Any) -> Any:
        taken.append((loaded, chat, engine))
        together.wait()
        raise RuntimeError("enough")

    monkeypatch.setattr(work, "make_attempt", make_attempt)
    options = parse_options({"instance": "any", "model": str(tiny_model), "sandbox": "bubblewrap",
                             "dtype": "float32", "device": "cpu"})  # fmt: skip
    entry = open_source("pairs").find("tinydb-4.8.2")
    one = Item(source="pairs", instance_id=entry.instance_id, digest=entry.digest,
               options=options.model_dump(mode="json"))  # fmt: skip
    state = WorkerState(sessions)

    def session() -> None:
        with pytest.raises(RuntimeError, match="enough"):
            work.run_item(one, tmp_path, lambda _: None, state)

    threads = [threading.Thread(target=session) for _ in range(sessions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len({id(loaded.model) for loaded, _, _ in taken}) == 1
    assert len({id(loaded.tokenizer) for loaded, _, _ in taken}) == sessions
    assert len({id(chat) for _, chat, _ in taken}) == sessions
    [engine] = {engine for _, _, engine in taken}
    if sessions == 1:
        assert engine is None
    else:
        assert isinstance(engine, Serving)
        assert engine.rows == sessions
    state.close()


def test_a_batch_of_sessions_is_the_batch_in_turn(tiny_model: Path, tmp_path: Path) -> None:
    def made(out: Path, *more: str) -> dict[str, Any]:
        status, text = agent(
            "eval", "--tasks", "pairs", "--ids", "tinydb-4.8.2", "--model", tiny_model,
            "--out", out, "--sandbox", "bubblewrap", "--dtype", "float32", "--tools", "compact",
            "--attempts", "3", "--budget", "256", "--max-new-tokens", "60", "--set", "example=[]",
            "--set", "system=Fix it.", "--set", "pin_user=false", "--set", "limits.steps=4", *more,
        )  # fmt: skip
        assert status == 0, text
        data: dict[str, Any] = json.loads((out / "report.json").read_text())
        return data

    turn, once = tmp_path / "turn", tmp_path / "once"
    alone, beside = made(turn), made(once, "--sessions-per-worker", "3")
    assert (alone["sessions_per_worker"], beside["sessions_per_worker"]) == (1, 3)
    assert len(alone["runs"]) == 3
    for one, other in zip(alone["runs"], beside["runs"], strict=True):
        assert one["folder"] == other["folder"]  # the key is in its name
        steps = said(turn / one["folder"])
        assert len(steps) == 4
        assert said(once / other["folder"]) == steps
    results = [json.loads((once / r["folder"] / "result.json").read_text()) for r in beside["runs"]]
    assert max(r["started"] for r in results) <= min(r["ended"] for r in results)
    assert len({tuple(map(str, said(turn / row["folder"]))) for row in alone["runs"]}) == 3
