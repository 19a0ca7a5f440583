"""How a run stands, from its reports, and from its trajectory where those lack it."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from agent.exits import FAILURES
from agent.folder_lock import LOCK, is_held
from agent.run_lines import Lines, number, read_object, section, text, whole
from agent.run_state import StateFolder
from agent.trajectory import REPORT

RUNNING, FINISHED, INTERRUPTED, FAILED = "running", "finished", "interrupted", "failed"
DIED = "died"  # its process is gone, and did not say how it ended
UNCLEAR = "unclear"  # it said that it runs, and nothing here can tell whether it does
DAMAGED = "damaged"

MANIFEST = "manifest.json"  # of a batch
OWN_NAME = re.compile(r"(\d{8}-\d{6})-.*-[0-9a-f]{4}")  # of what `agent run` made
ATTEMPT = re.compile(r"attempt-(\d+)")
_BATCH_NAME = re.compile(r".*-([0-9a-f]{10}(?:\.try-\d+)?)")


@dataclass(frozen=True, slots=True)
class RunEntry:
    """How a run stands. Counts are over all its attempts; seen, resident and the bytes are of the
    attempt that came last."""

    folder: Path
    name: str
    state: str
    why: str  # of a state that needs one
    resumable: bool
    aside: bool  # a try that a batch set aside, for the run was made again
    exit: str
    verdict: str
    resolved: int
    attempts: int
    steps: int
    seen: int
    evictions: int
    evicted_tokens: int
    resident: int
    budget: int | None  # tokens
    density: float | None
    cache_bytes: int
    peak_bytes: int
    started: float  # seconds since the epoch
    seconds: float | None
    task: str
    model: str
    method: str
    protocol: str

    @property
    def handle(self) -> str:
        """A short part of the name that mostly tells it from others."""
        for pattern in (OWN_NAME, _BATCH_NAME):
            if found := pattern.fullmatch(self.name):
                return found[1]
        return self.name

    def data(self) -> dict[str, Any]:
        """As plain data."""
        row = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**row, "folder": str(self.folder)}


def read_run(folder: Path, lines: Callable[[Path], Lines] = Lines.read) -> RunEntry:
    """How the run in `folder` stands; whatever lies there, it is an entry. `lines` reads the
    trajectory of an attempt that has no report of how it ended."""
    # First of all: a process writes how a run ended before it lets go of it.
    held = is_held(_batch_of(folder) or folder)
    report = read_object(folder / REPORT)
    facts = report or {}
    parts = _attempts(folder, facts, lines)
    state, why = _state(folder, report, parts, held)
    item = section(facts, "item")
    options = {**section(item, "options"), **section(facts, "options")}
    last = parts[-1]
    graded = [part for part in parts if part.verdict]
    resolved = sum(part.resolved for part in parts)
    verdict = graded[-1].verdict if graded else ""
    if graded and len(parts) > 1:
        verdict = f"{resolved} of {len(parts)} resolved"
    budget = section(last.report, "cache", "budget") or section(facts, "cache", "budget")
    tokens = number(budget, "tokens") or number(options, "budget")
    return RunEntry(
        folder=folder,
        name=folder.resolve().name,
        state=state,
        why=why,
        resumable=state not in (RUNNING, FINISHED, DAMAGED) and _resumable(folder),
        aside=".try-" in folder.name,
        exit=", ".join(dict.fromkeys(part.exit for part in parts if part.exit)),
        verdict=verdict,
        resolved=resolved,
        attempts=len(parts),
        steps=sum(part.steps for part in parts),
        seen=last.seen,
        evictions=sum(part.evictions for part in parts),
        evicted_tokens=sum(part.evicted_tokens for part in parts),
        resident=last.resident,
        budget=int(tokens) if tokens else None,
        density=number(budget, "density") or number(options, "density"),
        cache_bytes=last.cache_bytes,
        peak_bytes=max(part.peak_bytes for part in parts),
        started=_started(folder, facts, parts[0]),
        seconds=number(facts, "seconds") or last.seconds,
        task=text(section(facts, "task"), "instance")
        or text(item, "instance_id")
        or task_of(folder),
        model=text(section(facts, "model"), "name") or text(options, "model"),
        method=text(facts, "method") or text(options, "method"),
        protocol=text(facts, "protocol") or text(options, "protocol"),
    )


def attempt_folders(folder: Path) -> list[Path]:
    """Where the attempts of a run are kept: its folder, or those in it, in order."""
    try:
        with os.scandir(folder) as listed:
            names = [entry.name for entry in listed if entry.is_dir()]
    except OSError:
        names = []
    found = sorted((int(match[1]), name) for name in names if (match := ATTEMPT.fullmatch(name)))
    return [folder / name for _, name in found] or [folder]


def task_of(folder: Path) -> str:
    """The task, as far as the folder's name has it."""
    if OWN_NAME.fullmatch(folder.name):
        return folder.name[16:-5]
    return folder.parent.name if _batch_of(folder) else ""


# What was done so far


@dataclass(frozen=True, slots=True)
class _Part:
    """One attempt, so far."""

    report: dict[str, Any]
    ended: bool
    exit: str = ""
    verdict: str = ""
    resolved: bool = False
    steps: int = 0
    seen: int = 0
    evictions: int = 0
    evicted_tokens: int = 0
    resident: int = 0
    cache_bytes: int = 0
    peak_bytes: int = 0
    seconds: float | None = None
    started: float | None = None


def _attempts(folder: Path, report: dict[str, Any], lines: Callable[[Path], Lines]) -> list[_Part]:
    told = report.get("attempts")
    if isinstance(told, list) and told and all(isinstance(data, dict) for data in told):
        return [_reported(data) for data in told]
    if "totals" in report:
        return [_reported(report)]
    found = attempt_folders(folder)
    return [_so_far(path, report if path == folder else {}, lines) for path in found]


def _so_far(folder: Path, report: dict[str, Any], read: Callable[[Path], Lines]) -> _Part:
    """From the attempt's own report, or its trajectory."""
    report = report or read_object(folder / REPORT) or {}
    if "totals" in report:
        return _reported(report)
    lines = read(folder)
    stats = [section(step, "stats") for step in lines.steps]
    last = stats[-1] if stats else {}
    end = lines.end
    return _Part(
        report=report,
        ended=end is not None,
        exit=text(end, "exit"),
        steps=len(stats),
        evictions=sum(whole(s, "evictions") + whole(s, "forked_evictions") for s in stats),
        evicted_tokens=sum(
            whole(s, "evicted_tokens") + whole(s, "forked_evicted_tokens") for s in stats
        ),
        peak_bytes=max((whole(s, "peak_bytes") for s in stats), default=0),
        started=number(lines.entries[0], "time") if lines.entries else None,
        seconds=number(end, "seconds"),
        seen=whole(last, "seen"),
        resident=whole(last, "resident"),
        cache_bytes=whole(last, "cache_bytes"),
    )


def _reported(report: dict[str, Any]) -> _Part:
    totals, verdict = section(report, "totals"), section(report, "verdict")
    turns = report.get("turns")
    last = turns[-1] if isinstance(turns, list) and turns else {}
    return _Part(
        report=report,
        ended=True,
        exit=text(report, "exit"),
        verdict=text(verdict, "status"),
        resolved=verdict.get("resolved") is True,
        steps=whole(totals, "steps"),
        evictions=whole(totals, "evictions") + whole(totals, "forked_evictions"),
        evicted_tokens=whole(totals, "evicted_tokens") + whole(totals, "forked_evicted_tokens"),
        peak_bytes=whole(totals, "peak_bytes"),
        seconds=number(totals, "seconds"),
        seen=whole(last, "seen"),
        resident=whole(last, "resident"),
        cache_bytes=whole(last, "cache_bytes"),
    )


def _started(folder: Path, report: dict[str, Any], part: _Part) -> float:
    try:
        return datetime.fromisoformat(text(report, "started")).timestamp()
    except ValueError:
        pass
    if part.started is not None:
        return part.started
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0


# How it stands


def _state(
    folder: Path, report: dict[str, Any] | None, parts: list[_Part], held: bool | None
) -> tuple[str, str]:
    """The state, and why it is that one where it is not plain."""
    exits = {part.exit for part in parts}
    if report is None:
        return _without_report(folder, parts, held)
    said = report.get("state")
    if said == RUNNING:
        return _alive(report, held)
    if said == FAILED:
        return FAILED, text(report, "error").partition("\n")[0]
    if said == INTERRUPTED or INTERRUPTED in exits:
        return INTERRUPTED, ""
    # The report of one attempt, as it is kept before all are over, has no state.
    if said == FINISHED or (said is None and "totals" in report):
        return (FAILED if exits <= FAILURES else FINISHED), ""
    return DAMAGED, f"{REPORT} says nothing of how it stands"


def _without_report(folder: Path, parts: list[_Part], held: bool | None) -> tuple[str, str]:
    if (folder / REPORT).exists():
        return DAMAGED, f"{REPORT} cannot be read"
    batch = _batch_of(folder)
    if batch is not None:
        # What the batch left when it was killed is older than the process that holds its folder.
        old = _started(folder, {}, parts[0]) < _held_since(batch)
        if held and not old and ".try-" not in folder.name:
            return RUNNING, "being graded" if parts[0].ended else ""
        return DIED, "its batch makes it again"
    if all(part.started is None for part in parts):
        return (RUNNING, "starting") if held else (DIED, "before it began")
    return DAMAGED, f"there is no {REPORT}"


def _alive(report: dict[str, Any], held: bool | None) -> tuple[str, str]:
    """Whether a run that said it runs does so. Its process holds the folder's lock; older ones
    have a process id at most."""
    if held:
        return RUNNING, ""
    host, pid = text(report, "host"), whole(report, "pid")
    if host and host != socket.gethostname():
        return UNCLEAR, f"it said that it runs on {host}"
    if held is None and not pid:
        return UNCLEAR, "it said that it runs; it was made by an older version"
    if held is None and _process(pid):
        return RUNNING, ""
    return DIED, f"process {pid} is gone" if pid else "its process is gone"


def _resumable(folder: Path) -> bool:
    """Whether `agent run --resume` finds a state to go on from."""
    return any(StateFolder(path).begun for path in attempt_folders(folder))


def _batch_of(folder: Path) -> Path | None:
    """The folder of the batch that a run is part of."""
    runs = folder.parent.parent
    return runs.parent if runs.name == "runs" and (runs.parent / MANIFEST).is_file() else None


def _held_since(batch: Path) -> float:
    """When the process that holds a batch's folder, or held it last, took it."""
    try:
        words = (batch / LOCK).read_text(encoding="utf-8", errors="replace").split()
        return time.mktime(time.strptime(" ".join(words[2:4]), "%Y-%m-%d %H:%M:%S"))
    except (OSError, ValueError, OverflowError):
        return 0.0


def _process(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
