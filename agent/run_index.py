"""The runs in a folder, and which of them is meant by a name.

DIR/RUN/                      of `agent run`; DIR/RUN/attempt-N/ where it has several attempts
DIR/runs/INSTANCE/CELL-KEY/   of `agent eval` and `agent compare`; DIR may hold such folders too
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from pathlib import Path

from agent.folder_lock import LOCK
from agent.run_entry import ATTEMPT, MANIFEST, OWN_NAME, RunEntry, read_run, task_of
from agent.trajectory import REPORT, TRAJECTORY

_DEPTH = 5  # DIR/BATCH/runs/INSTANCE/CELL-KEY


class NoSuchRun(Exception):
    """A name that is no run's, or that of several; the text says what there is."""


def run_folders(root: Path) -> Iterator[Path]:
    """Folders of runs in `root`, or `root` itself, in no order. Attempts are within their run's."""
    yield from _walk(root, _DEPTH)


def read_runs(root: Path) -> list[RunEntry]:
    """All runs in `root`, the newest first."""
    found = [read_run(folder) for folder in run_folders(root)]
    return sorted(found, key=lambda run: (run.started, run.name), reverse=True)


def find_run(name: str, root: Path, *, flag: str = "--dir") -> Path:
    """The folder of the run called `name`: a path, `last`, or a name in `root`, of which a part
    is enough where it is the only one's. `flag` names another `root`. Raises NoSuchRun."""
    path = Path(name).expanduser()
    if path.is_file():
        path = path.parent
    if path.is_dir() and (run := _run_at(path, named=os.sep in name or path == root)):
        return run
    runs = list(run_folders(root))
    if not runs:
        raise NoSuchRun(f"no run {name}: {_nothing(root, flag)}")
    if name == "last":
        entries = read_runs(root)
        return next((run for run in entries if not run.aside), entries[0]).folder
    found = _matching(name, runs, root)
    if len(found) == 1:
        return found[0]
    if found:
        some = ", ".join(sorted(_within(run, root) for run in found)[:6])
        more = f" and {len(found) - 6} more" if len(found) > 6 else ""
        raise NoSuchRun(f"{name} could be {len(found)} runs: {some}{more}; give more of the name")
    raise NoSuchRun(f"no run {name} in {root}; {_nearest(name, runs, root)}")


def _run_at(path: Path, *, named: bool) -> Path | None:
    """The only run in a folder; None where there is none and `path` may be a run's name."""
    inside = list(run_folders(path))
    if not inside:
        if named:
            raise NoSuchRun(f"{path} is no folder of a run: there is no {TRAJECTORY} in it")
        return None
    if len(inside) == 1:
        return inside[0]
    raise NoSuchRun(f"{path} holds {len(inside)} runs: `agent runs {path}` lists them")


def _matching(name: str, runs: list[Path], root: Path) -> list[Path]:
    """Runs so called; else those whose name begins so; else those whose path has it."""
    for fits in (
        lambda run: name in (run.name, _within(run, root)),
        lambda run: run.name.startswith(name) or _within(run, root).startswith(name),
        lambda run: name in _within(run, root),
    ):
        found = [run for run in runs if fits(run)]
        # What was set aside has the name of what took its place.
        found = [run for run in found if ".try-" not in run.name or ".try-" in name] or found
        if found:
            return found
    return []


def _nearest(name: str, runs: list[Path], root: Path) -> str:
    parts = {part for run in runs for part in (run.name, task_of(run), _within(run, root))}
    near = difflib.get_close_matches(name, sorted(parts), n=3, cutoff=0.4)
    if near:
        return f"near to it: {', '.join(near)}"
    return f"`agent runs {root}` lists them"


def _nothing(root: Path, flag: str) -> str:
    if not root.is_dir():
        return f"there is no folder {root}; name one with {flag}"
    return f"there are no runs in {root}; name another folder with {flag}"


def _within(run: Path, root: Path) -> str:
    return str(run.relative_to(root)) if run.is_relative_to(root) else str(run)


# What is a run


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    try:
        with os.scandir(folder) as listed:
            names = {entry.name: entry.is_dir(follow_symlinks=False) for entry in listed}
    except OSError:
        return
    if _is_run(folder, names):
        yield folder
    elif depth:
        for name, is_folder in names.items():
            if is_folder and name[0] != ".":
                yield from _walk(folder / name, depth - 1)


def _is_run(folder: Path, names: dict[str, bool]) -> bool:
    if TRAJECTORY in names:
        return True
    if MANIFEST in names:  # a batch's own folder
        return False
    own, attempts = OWN_NAME.fullmatch(folder.name), any(map(ATTEMPT.fullmatch, names))
    if REPORT in names or attempts:
        return bool(own) or (REPORT in names and attempts)
    # Before its model is loaded a run has its lock only.
    return bool(own) and set(names) <= {LOCK}
