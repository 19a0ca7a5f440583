"""The local engine: order, errors of every kind, signals, `kill -9` of either side."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from batch_process import items as items_of

from agent.batch import engine as engine_module
from agent.batch.carry_out import carry_out
from agent.batch.engine import EngineError, LocalEngine
from agent.batch.item import Item
from agent.batch.local_worker import Job
from agent.batch.store import Result, Store

HERE = Path(__file__).parent
WORK = "batch_work:run_item"
PATHS = os.pathsep.join([str(HERE.parents[1]), str(HERE)])


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of what was begun and ended."""
    monkeypatch.setenv("BATCH_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "batch")


def entries(log: Path, *kinds: str) -> list[dict[str, Any]]:
    lines = log.read_text().splitlines() if log.exists() else []
    return [entry for entry in map(json.loads, lines) if not kinds or entry["kind"] in kinds]


def names(log: Path, *kinds: str) -> list[str]:
    return [entry["id"] for entry in entries(log, *kinds)]


def item(name: str, *do: object, **fields: Any) -> Item:
    return Item(
        source="s", instance_id=name, digest="d", options={"do": do or ("resolve",)}, **fields
    )


def run(
    store: Store, items: Iterable[Item], **fields: Any
) -> tuple[list[tuple[str, Result]], list[tuple[str, dict[str, Any]]]]:
    """Results in the order in which they came, and events."""
    events: list[tuple[str, dict[str, Any]]] = []

    def on_event(one: Item, event: Mapping[str, Any]) -> None:
        events.append((one.instance_id, dict(event)))

    work = fields.pop("work", WORK)
    with store.lock():
        engine = LocalEngine(store, **{"workers": 1, "retries": 0, **fields})
        found = [(one.instance_id, r) for one, r in engine.run(items, work, on_event=on_event)]
    return found, events


def wait_for(what: str, condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"no {what} after {seconds:g} s")
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# What goes well


def test_one_worker_takes_items_in_their_order_and_keeps_what_is_costly(
    store: Store, log: Path
) -> None:
    found, events = run(store, [item(name) for name in "cab"], stamp={"versions": {"x": "1"}})
    assert [name for name, _ in found] == list("cab")
    assert names(log) == ["c", "c", "a", "a", "b", "b"]
    assert len({entry["pid"] for entry in entries(log)}) == 1
    result = found[0][1]
    assert result == store.result(item("c"))
    assert (result["state"], result["verdict"]["resolved"], result["error"]) == (
        "finished", True, None,
    )  # fmt: skip
    assert (result["tries"], result["versions"]) == (1, {"x": "1"})
    assert result["seconds"].keys() == {"run", "grade", "total"}
    assert result["started"] <= result["ended"]
    assert len({entry["about"]["model"] for _, entry in found}) == 1
    kinds = [(name, event["event"], event.get("phase")) for name, event in events]
    assert kinds[:4] == [
        ("c", "start", None), ("c", "tell", "work"), ("c", "tell", "grading"), ("c", "end", None),
    ]  # fmt: skip


def test_workers_share_the_cores_and_the_work(
    store: Store, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    items = [item(f"i{n}", "until 2") for n in range(6)]  # none ends before two have begun
    found, events = run(store, items, workers=2, devices=["3", "5", "7"])
    assert {result["about"]["threads"] for _, result in found} == {"4"}
    assert {result["about"]["gpu"] for _, result in found} == {"3", "5"}
    assert len({entry["pid"] for entry in entries(log)}) == 2
    begun = [name for name, event in events if event["event"] == "start"]
    assert begun == [one.instance_id for one in items]
    assert {event["worker"] for _, event in events if event["event"] == "start"} == {0, 1}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert LocalEngine(store, workers=2).threads == 3
    assert LocalEngine(store, workers=20).threads == 1


def test_a_folder_named_agent_where_the_user_stands_is_not_taken_for_this_package(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "__init__.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    # As `python -m agent.cli` has it, from a clone that is not installed.
    others = [path for path in sys.path if Path(path).resolve() != HERE.parents[1]]
    monkeypatch.setattr(sys, "path", ["", *others])
    assert run(store, [item("a")])[0][0][1]["state"] == "finished"


def test_what_is_printed_goes_into_a_log_and_blocks_nobody(store: Store) -> None:
    assert run(store, [item("a", "print")])[0][0][1]["state"] == "finished"
    assert (store.folder / "logs" / "worker-0.log").stat().st_size > 400_000


# What goes wrong

FAULTS = {
    "die": "WorkerDied: worker 0 (process ",
    "raise": "RuntimeError: no luck",
    "exit": "SystemExit: 7",
    "odd": "TypeError: ",
    "lost": "SandboxLost: ",
    "error": "ImageMissing: no image",
    "no sandbox": "SandboxError: none today",
    "ungraded": "Grading: too long",
}


def test_no_bad_instance_ends_the_batch(store: Store, log: Path) -> None:
    items = [item("before"), *(item(f"bad-{do}", do) for do in FAULTS), item("after", "fail")]
    found = dict(run(store, items)[0])
    assert list(found) == [one.instance_id for one in items]
    for do, said in FAULTS.items():
        result = found[f"bad-{do}"]
        assert (result["state"], result["tries"]) == ("error", 1)
        assert result["error"].startswith(said)
    assert "SIGKILL" in found["bad-die"]["error"]
    assert "no luck" in found["bad-raise"]["trace"]
    assert found["before"]["state"] == found["after"]["state"] == "finished"
    assert found["after"]["verdict"]["status"] == "unresolved"
    # What was returned as an error leaves the worker in use, and so does a sandbox that could not
    # be had; what else was raised does not.
    pids = {entry["id"]: entry["pid"] for entry in entries(log, "start")}
    assert pids["bad-lost"] == pids["bad-error"] == pids["bad-ungraded"] == pids["after"]
    assert pids["bad-no sandbox"] == pids["after"]
    assert len(set(pids.values())) == 5


def test_errors_are_tried_again_after_the_others_and_not_for_ever(store: Store, log: Path) -> None:
    items = [item("crash", "die", "resolve"), item("poison", "die"), item("good")]
    found, events = run(store, items, retries=2)
    assert names(log, "start") == ["crash", "poison", "good", "crash", "poison", "poison"]
    results = dict(found)
    assert [name for name, _ in found] == ["good", "crash", "poison"]
    assert (results["crash"]["state"], results["crash"]["tries"]) == ("finished", 2)
    assert (results["poison"]["state"], results["poison"]["tries"]) == ("error", 3)
    assert [name for name, event in events if event["event"] == "retry"] == [
        "crash", "poison", "poison",
    ]  # fmt: skip
    tries = store.folder_of(items[0])
    assert (tries.with_name(f"{tries.name}.try-1") / "trajectory.jsonl").exists()

    assert [name for name, _ in run(store, items[1:2])[0]] == ["poison"]
    kept = store.result(items[1])
    assert kept is not None
    assert kept["tries"] == 1


def test_a_silent_worker_is_given_up(store: Store) -> None:
    found = dict(run(store, [item("hangs", "deaf"), item("good")], silence=0.8)[0])
    assert found["hangs"]["error"].startswith("Silence: nothing was heard for 0.8 s")
    assert found["good"]["state"] == "finished"


@pytest.mark.parametrize(
    ("work", "said"),
    [
        ("batch_work:no_such", "no attribute 'no_such'"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("dies_at_import:f", "workers end before they begin.*SIGKILL.*farewell"),
    ],
)
def test_work_that_cannot_be_done_at_all_is_told_at_once(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str, said: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "dies_at_import.py").write_text(
        "import os\nprint('farewell', flush=True)\nos.kill(os.getpid(), 9)"
    )
    with pytest.raises(EngineError, match=said):
        run(store, [item("a")], work=work)
    assert store.result(item("a")) is None
    with store.lock():  # no worker is left that would hold it
        pass


def test_a_signal_from_elsewhere_is_an_error_of_that_try(store: Store, log: Path) -> None:
    seen: list[int] = []

    def on_event(one: Item, event: Mapping[str, Any]) -> None:
        if event.get("phase") == "waiting" and not seen:
            seen.append(entries(log, "start")[0]["pid"])
            os.kill(seen[0], signal.SIGTERM)

    with store.lock():
        one = item("a", "patch so far", "resolve")
        (found,) = LocalEngine(store, retries=1).run([one], WORK, on_event=on_event)
    assert found[1]["state"] == "finished"
    assert found[1]["tries"] == 2
    aside = store.folder_of(one).with_name(f"{store.folder_of(one).name}.try-1")
    assert (aside / "patch.diff").read_text() == "half\n"
    assert json.loads((aside / "result.json").read_text())["error"].startswith("Interrupted")


def test_a_result_of_an_earlier_batch_is_not_taken_for_that_of_a_lost_try(store: Store) -> None:
    one = item("a")
    job = Job(one, tries=1, started="2026-01-02T00:00:00Z")
    engine = LocalEngine(store)
    old = {"state": "error", "error": "old", "tries": 1, "started": "2026-01-01T23:59:59Z"}
    for changes, same in (
        ({}, False),
        ({"started": "2026-01-02T00:00:00Z"}, True),
        ({"started": "2026-01-02T00:00:01Z", "tries": 2}, False),
    ):
        store.write(one, {**old, **changes})
        assert (engine._kept(job) is not None) == same, changes


# When all is to stop


def test_closing_leaves_runs_open_with_their_patch_so_far(store: Store, log: Path) -> None:
    items = [item("a", "until 3"), item("b", "patch so far"), item("c", "deaf"), item("d")]
    with store.lock():
        running = LocalEngine(store, workers=3, grace=1.0).run(items, WORK)
        assert next(running)[0].instance_id == "a"
        wait_for("wait of b", lambda: names(log, "waits") == ["b"])
        began = time.monotonic()
        running.close()
        assert 0.9 < time.monotonic() - began < 5
    pids = [entry["pid"] for entry in entries(log, "start")]
    assert not any(map(alive, pids))
    assert names(log, "patch") == ["b"]
    assert (store.folder_of(items[1]) / "patch.diff").read_text() == "half\n"
    assert [store.result(one) is not None for one in items] == [True, False, False, False]
    again = [item(one.instance_id) for one in items]  # (other keys)
    assert len(carry_out(again, store, LocalEngine(store), WORK)) == 4


@pytest.fixture
def started(tmp_path: Path, log: Path) -> Any:
    """Starts a batch in a process of its own; all of them are ended with the test."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(items: Mapping[str, list[object]], workers: int = 2) -> subprocess.Popen[bytes]:
        file = tmp_path / "items.json"
        file.write_text(json.dumps(items))
        processes.append(
            subprocess.Popen(
                [sys.executable, HERE / "batch_process.py", tmp_path / "batch", str(workers), file],
                env={**os.environ, "PYTHONPATH": PATHS},
            )
        )
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_a_folder_that_can_be_gone_on_with(
    tmp_path: Path, log: Path, started: Any, number: signal.Signals
) -> None:
    items: dict[str, list[object]] = {"a": ["resolve"], "b": ["patch so far", "resolve"], "c": [0]}
    process = started(items, 1)
    wait_for("wait of b", lambda: names(log, "waits") == ["b"])
    process.send_signal(number)
    assert process.wait(20) == 130
    assert names(log, "patch") == ["b"]
    assert started(items, 1).wait(20) == 0
    assert names(log, "start") == ["a", "b", "b", "c"]
    assert names(log, "end") == ["a", "b", "c"]


def test_workers_end_with_an_engine_that_is_killed(tmp_path: Path, log: Path, started: Any) -> None:
    process = started({"a": ["deaf"], "b": ["numb"]})
    wait_for("two starts", lambda: len(entries(log, "start")) == 2)
    pids = [entry["pid"] for entry in entries(log, "start")]
    assert all(map(alive, pids))
    for pid in pids:  # as long as one lives, the folder is taken
        held = [str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir()]
        assert str(tmp_path / "batch" / ".lock") in held
    process.kill()
    process.wait()
    wait_for("end of the workers", lambda: not any(map(alive, pids)), 3)


def test_the_end_of_the_pipe_ends_a_worker_too(store: Store, log: Path, tmp_path: Path) -> None:
    """Where the kernel does not do it: the worker is started without that wish."""
    code = (
        "import os, runpy, ctypes\n"
        "ctypes.CDLL = None\n"  # raises: as on a system without prctl
        "import agent.batch.worker as w\n"
        "w._end_with = lambda parent: None\n"
        "raise SystemExit(w.main())\n"
    )
    ours, theirs = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": PATHS},
        stdin=subprocess.PIPE,
        pass_fds=[theirs],
    )
    os.close(theirs)
    assert process.stdin is not None
    greeting = {
        "work": WORK, "folder": str(store.folder), "events": theirs, "lock": None,
        "parent": os.getpid(), "pythonpath": None, "stamp": {},
    }  # fmt: skip
    one = {"item": item("a", "deaf").model_dump(mode="json"), "try": 1}
    process.stdin.write(f"{json.dumps(greeting)}\n{json.dumps(one)}\n".encode())
    process.stdin.flush()
    try:
        wait_for("start", lambda: names(log) == ["a"])
        process.stdin.close()
        assert process.wait(5) == 3
    finally:
        process.kill()
        os.close(ours)


def test_killed_three_times_and_gone_on_with_it_is_as_if_nothing_had_been(
    tmp_path: Path, log: Path, started: Any
) -> None:
    items: dict[str, list[object]] = {f"i{n:02}": [0.1] for n in range(16)}
    items["i05"] = ["fail"]
    items["i07"] = ["die", "resolve"]
    ones = {}
    store = Store(tmp_path / "batch")
    over: list[set[str]] = []  # finished at each kill
    begun: list[int] = []  # lines of the log by then
    for _ in range(3):
        process = started(items)
        if not ones:
            ones = {one.key: one for one in items_of(tmp_path / "items.json")}
        more = len(over[-1]) + 4 if over else 4
        wait_for("results", lambda n=more, of=ones: len(store.finished(of.values())) >= n)
        process.kill()
        process.wait()
        wait_for("end of the workers", lambda: not any(alive(e["pid"]) for e in entries(log)), 3)
        over.append(set(store.finished(ones.values())))
        begun.append(len(entries(log)))
    assert started(items).wait(30) == 0

    found = store.finished(ones.values())
    assert found.keys() == ones.keys()
    verdicts = {ones[key].instance_id: r["verdict"]["resolved"] for key, r in found.items()}
    assert verdicts == {name: name != "i05" for name in items}
    for done, line in zip(over, begun, strict=True):
        later = {entry["key"] for entry in entries(log)[line:] if entry["kind"] == "start"}
        assert not later & done
    assert 4 <= len(over[0]) <= len(over[1]) - 4
    # Each was made once, but for those that a kill fell upon: one a worker and kill, and i07's.
    assert len(entries(log, "start")) <= len(items) + 3 * 2 + 1
    assert Counter(names(log, "end")).most_common(1)[0][1] <= 2


def test_finished_items_never_reach_the_engine(store: Store, log: Path) -> None:
    items = [item("a"), item("b", "fail"), item("c", "die", "resolve"), item("d")]
    with store.lock():
        carry_out(items[:3], store, LocalEngine(store, retries=0), WORK)
        assert names(log, "start") == ["a", "b", "c"]
        found = carry_out(items, store, LocalEngine(store, retries=0), WORK)
    assert names(log, "start") == ["a", "b", "c", "c", "d"]
    assert [found[one.key]["state"] for one in items] == ["finished"] * 4


def test_the_engine_refuses_numbers_that_make_no_sense(store: Store) -> None:
    for wrong in ({"workers": 0}, {"retries": -1}, {"sessions": 0}):
        with pytest.raises(ValueError, match="at least 1, 1 and 0"):
            engine_module.LocalEngine(store, **wrong)
