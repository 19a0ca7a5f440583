"""Whether instances can be graded here: the reference resolves each, and doing nothing does not.

An instance whose reference fails says nothing about a model: its tests cannot run here, or they
come out differently by chance. It is to be left out by name.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from environments.base import Sandbox, SandboxError, SandboxSpec
from tasks.instance import SandboxOpener, Task, TaskError, Verdict
from tasks.predictions import write_whole
from tasks.source import Entry

FORMAT = 1
_BEGIN = '{"format": '  # of every line
# What a model might do that changes nothing. An empty patch is not run at all.
NOTHING = b"""diff --git a/nothing-that-matters.txt b/nothing-that-matters.txt
new file mode 100644
--- /dev/null
+++ b/nothing-that-matters.txt
@@ -0,0 +1 @@
+nothing
"""


@dataclass(frozen=True, slots=True)
class Validation:
    """What came out for one instance."""

    instance_id: str
    kind: str
    digest: str  # the entry's: a changed row is validated again
    valid: bool
    why: str = ""  # what is wrong with it; empty if it is valid
    error: bool = False  # the sandbox, a limit or a download failed: nothing is known yet
    notes: tuple[str, ...] = ()
    reference: Mapping[str, Any] = field(default_factory=dict)  # verdict, in short
    nothing: Mapping[str, Any] = field(default_factory=dict)
    sandbox: str = ""
    seconds: float = 0.0


def validate(
    entries: Iterable[Entry],
    open_sandbox: SandboxOpener | None = None,
    *,
    workers: int = 1,
    sandbox: str = "",
    on_start: Callable[[Entry], None] = lambda entry: None,
) -> Iterator[Validation]:
    """Grade the reference and a patch that changes nothing, for every entry, `workers` at a time.

    They come in the order in which they are done. What fails is told in the `Validation`; nothing
    is raised for one entry. When the caller stops, entries not begun are dropped, and the sandboxes
    of the others are closed under them.
    """
    if workers < 1:
        raise ValueError(f"workers is {workers}; at least one is needed")
    opener = _Openings(open_sandbox or _default_opener())
    waiting = iter(entries)
    running: set[Future[Validation]] = set()

    def work(entry: Entry) -> Validation:
        on_start(entry)
        return validate_one(entry, opener, sandbox=sandbox)

    with ThreadPoolExecutor(workers, thread_name_prefix="validate") as pool:
        try:
            while True:
                while len(running) < workers and (entry := next(waiting, None)) is not None:
                    running.add(pool.submit(work, entry))
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        finally:
            opener.stop()


class _Openings:
    """An opener of sandboxes that can close all it opened and then opens no more."""

    def __init__(self, open_sandbox: SandboxOpener) -> None:
        self._open = open_sandbox
        self._opened: list[weakref.ref[Sandbox]] = []
        self._stopped = False
        self._lock = threading.Lock()

    def __call__(self, spec: SandboxSpec) -> Sandbox:
        box = None if self._stopped else self._open(spec)
        with self._lock:
            if box is not None and not self._stopped:
                self._opened = [ref for ref in self._opened if ref() is not None]
                self._opened.append(weakref.ref(box))
                return box
        if box is not None:
            box.close()
        raise SandboxError("stopped")

    def stop(self) -> None:
        """Closing twice is harmless, and those that are in use fail with SandboxLost."""
        with self._lock:
            self._stopped = True
        for ref in self._opened:
            if (box := ref()) is not None:
                box.close()


def _default_opener() -> SandboxOpener:
    from environments import open_sandbox

    return open_sandbox


def validate_one(
    entry: Entry, open_sandbox: SandboxOpener | None = None, *, sandbox: str = ""
) -> Validation:
    """One entry. Its `why` names the first thing that is wrong."""
    begun = time.monotonic()
    verdicts: dict[str, Verdict] = {}
    try:
        task = entry.task(open_sandbox)
        patch = entry.reference_patch()
        verdicts["reference"] = _graded(task, patch)
        if verdicts["reference"].status == "resolved":
            verdicts["nothing"] = _graded(task, NOTHING)
            verdicts["empty"] = _graded(task, b"")
        why, error = _wrong(verdicts)
    except (TaskError, SandboxError, OSError) as problem:
        why, error = f"{type(problem).__name__}: {problem}", True
    return Validation(
        entry.instance_id,
        entry.kind,
        entry.digest,
        valid=not why,
        why=why,
        error=error,
        notes=_notes(verdicts),
        reference=_short(verdicts.get("reference")),
        nothing=_short(verdicts.get("nothing")),
        sandbox=sandbox,
        seconds=round(time.monotonic() - begun, 2),
    )


def _graded(task: Task, patch: bytes) -> Verdict:
    verdict = task.grade(patch)
    if verdict is None:
        raise TaskError("it has no hidden tests, so nothing decides")
    return verdict


def _wrong(verdicts: Mapping[str, Verdict]) -> tuple[str, bool]:
    """What is wrong, and whether that is for lack of a verdict."""
    wanted = {"reference": "resolved", "nothing": "unresolved", "empty": "empty_patch"}
    names = {
        "reference": "the reference patch",
        "nothing": "a patch that changes nothing",
        "empty": "an empty patch",
    }
    for key, verdict in verdicts.items():
        if verdict.status == "error":
            return f"{names[key]} could not be graded: {verdict.detail}", True
        if verdict.status != wanted[key] or verdict.resolved != (key == "reference"):
            said = f"{names[key]} is {verdict.status.replace('_', ' ')}, not {wanted[key]}"
            return f"{said}: {verdict.detail}", False
    return "", False


def _notes(verdicts: Mapping[str, Verdict]) -> tuple[str, ...]:
    """What does not make an instance invalid, but says that less decides than it seems."""
    if (nothing := verdicts.get("nothing")) is None:
        return ()
    passed = [test for test, outcome in nothing.fail_to_pass.items() if outcome == "passed"]
    lost = {"failed", "error", "missing"}
    broken = [test for test, outcome in nothing.pass_to_pass.items() if outcome in lost]
    notes = []
    if passed:
        notes.append(f"pass without the change: {_some(passed)}")
    if broken:
        notes.append(f"of PASS_TO_PASS, fail without the change: {_some(broken)}")
    return tuple(notes)


def _short(verdict: Verdict | None) -> dict[str, Any]:
    if verdict is None:
        return {}
    return {
        "status": verdict.status,
        "detail": verdict.detail[:2000],
        "fail_to_pass": _counts(verdict.fail_to_pass),
        "pass_to_pass": _counts(verdict.pass_to_pass),
        "seconds": round(verdict.seconds, 2),
    }


def _counts(outcomes: Mapping[str, str]) -> dict[str, int]:
    counted: dict[str, int] = {}
    for outcome in outcomes.values():
        counted[outcome] = counted.get(outcome, 0) + 1
    return counted


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


class Results:
    """A file of validations, one a line, that a later call goes on with. Use it as `with Results(
    path) as results`; TaskError if another process writes to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, Validation] = {}

    @contextmanager
    def open(self) -> Iterator[Results]:
        """Read what is there, and hold the file until the end."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = self.path.with_name(f".{self.path.name}.lock")
        with lock.open("a") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise TaskError(
                    f"another process writes to {self.path}; wait or name another file"
                ) from error
            self.known = {item.instance_id: item for item in read_results(self.path)}
            # without a last line that a crash cut short, and without lines that later ones replace
            lines = "".join(_line(item) for item in self.known.values())
            write_whole(self.path, lines.encode())
            yield self

    def usable(self, entry: Entry, sandbox: str) -> Validation | None:
        """The result of an entry if it needs no second look."""
        item = self.known.get(entry.instance_id)
        same = item is not None and item.digest == entry.digest and item.sandbox == sandbox
        return item if same and item is not None and not item.error else None

    def add(self, item: Validation) -> None:
        """Append one; it is on the disk when this returns."""
        self.known[item.instance_id] = item
        with self.path.open("ab") as out:
            out.write(_line(item).encode())
            out.flush()
            os.fsync(out.fileno())


def read_results(path: Path) -> list[Validation]:
    """The validations of a file, the last one of each instance; none if there is no file.

    Lines of another format, and a last one cut short, are passed over. TaskError for other files.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise TaskError(f"cannot read {path}: {error}") from error
    found: dict[str, Validation] = {}
    *whole, last = text.split("\n")
    for number, line in enumerate([*whole, last], 1):
        if number > len(whole) and (last.startswith(_BEGIN) or _BEGIN.startswith(last)):
            break  # the end, or a line that a crash cut short
        try:
            data = json.loads(line)
            if data.pop("format") != FORMAT:
                continue
            item = Validation(**{**data, "notes": tuple(data["notes"])})
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise TaskError(f"{path}, line {number} is no validation; name another file") from error
        found[item.instance_id] = item
    return list(found.values())


def _line(item: Validation) -> str:
    return json.dumps({"format": FORMAT, **asdict(item)}) + "\n"
