"""Work functions for tests of batches: no model, no sandbox, and a log of what was begun and ended.

What an item does is a list with an entry for each try (the last one is repeated). It stands in its
options under "do", or by instance id in the JSON of `BATCH_DO`. `BATCH_LOG` names the log.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agent.batch.item import Item
from agent.batch.store import Store
from agent.batch.worker_state import WorkerState
from agent.interrupts import Interrupted
from environments import SandboxError

STOPPED = threading.Event()


def log(kind: str, item: Item) -> None:
    """One line, written at once and whole: processes that are killed write it too."""
    line = json.dumps({"kind": kind, "id": item.instance_id, "key": item.key, "pid": os.getpid()})
    handle = os.open(os.environ["BATCH_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(handle, line.encode() + b"\n")
    os.close(handle)


def full_disk(*_: object) -> Any:
    """In the place of `Store.write`."""
    raise OSError(errno.ENOSPC, "No space left on device")


def wait_for_starts(number: int) -> None:
    """Wait until so many items were begun."""
    while Path(os.environ["BATCH_LOG"]).read_text().count('"start"') < number:
        time.sleep(0.02)


def run_item(
    item: Item, folder: Path, tell: Callable[[Mapping[str, Any]], None], state: WorkerState
) -> dict[str, Any]:
    """Do what the item says, then resolve."""
    given = json.loads(os.environ.get("BATCH_DO", "{}")).get(item.instance_id, ["resolve"])
    script = item.options.get("do", given)
    tries = len(list(folder.parent.glob(f"{folder.name}.try-*")))
    do = script[min(tries, len(script) - 1)]
    assert not list(folder.iterdir())
    # What a trajectory is to a real run: there from the beginning.
    (folder / "trajectory.jsonl").write_text("{}\n")
    log("start", item)
    name = item.options.get("model")
    with state.use("model", name, object, stop=lambda _, why: STOPPED.set()) as made:
        return act(do, item, folder, tell, made)


def act(
    do: Any, item: Item, folder: Path, tell: Callable[[Mapping[str, Any]], None], made: object
) -> dict[str, Any]:
    """One entry of a script."""
    tell({"phase": "work", "step": 1, "resident": 100, "budget": 200})
    if do == "full disk":  # nothing can be kept in this process any more
        wait_for_starts(2)
        Store.write = full_disk  # type: ignore[method-assign]
    if isinstance(do, str) and do.startswith("die with "):
        wait_for_starts(int(do[9:]))
        do = "die"
    if do == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if do == "raise":
        raise RuntimeError("no luck")
    if do == "no sandbox":
        raise SandboxError("none today")
    if do == "exit":
        sys.exit(7)
    if do == "odd":
        return {"totals": object()}
    if do == "print":
        print("x" * 200_000, flush=True)
        print("y" * 200_000, file=sys.stderr, flush=True)
    if do == "lost":
        return {"exit": "sandbox_lost"}
    if do == "error":
        return {"state": "error", "error": "ImageMissing: no image"}
    if do == "ungraded":
        return {"verdict": {"resolved": False, "status": "error", "detail": "too long"}}
    if isinstance(do, (int, float)):
        time.sleep(do)
    if isinstance(do, str) and do.startswith("until "):  # so many were begun
        wait_for_starts(int(do[6:]))
    if do == "patch so far":
        try:
            log("waits", item)
            tell({"phase": "waiting"})
            time.sleep(60)
        except KeyboardInterrupt:
            (folder / "patch.diff").write_text("half\n")
            log("patch", item)
            return {"exit": "interrupted"}
    if do == "mute":  # not a word, whatever happens
        time.sleep(60)
    if do == "stopped":  # as a session that asks for a model is told
        log("waits", item)
        assert STOPPED.wait(60)
        log("patch", item)
        raise Interrupted("asked to end")
    if isinstance(do, str) and do.startswith("chatty "):  # until so many ended
        while Path(os.environ["BATCH_LOG"]).read_text().count('"end"') < int(do[7:]):
            tell({"phase": "still here", "at": time.monotonic()})
            time.sleep(0.05)
    if isinstance(do, str) and do.startswith("after "):  # that item has a result
        while not list(folder.parents[1].glob(f"{do[6:]}/*/result.json")):
            time.sleep(0.02)
    if do == "numb":  # no thread of this process can run
        ctypes.PyDLL(None).sleep(60)
    if do == "deaf":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        time.sleep(60)
    resolved = do != "fail"
    (folder / "prediction.diff").write_text(f"patch of {item.instance_id}\n")
    tell({"phase": "grading"})
    log("end", item)
    return {
        "verdict": {"resolved": resolved, "status": "resolved" if resolved else "unresolved"},
        "exit": "submitted",
        "totals": {"steps": 4, "tokens": 1000, "fed": 800, "evictions": 2, "peak_bytes": 1 << 20},
        "turns": [],
        "seconds": {"run": 60.0, "grade": 6.0},
        "about": {
            "model": id(made),
            "threads": os.environ["OMP_NUM_THREADS"],
            "gpu": os.environ.get("CUDA_VISIBLE_DEVICES"),
        },
    }
