"""Going on with a run that was ended: which one, by what options, and whether it still fits."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agent import run_index as index
from agent.attempt import Attempt
from agent.exits import UNFINISHED, ExitReason
from agent.loop import Outcome
from agent.run_options import OptionError, RunOptions
from agent.run_state import NoState, StateFolder
from agent.session import TurnStats
from agent.trajectory import PATCH, REPORT
from cache import AnyConfig
from environments import Patch, SandboxSpec
from environments.treearchive import TreeArchive
from environments.workspace import DISK_HOME
from tasks import Verdict
from tasks.instance import Instance
from tasks.repo import RepoTask

# What must be the same for the next turn to be the one that would have come.
_SAME = (
    ("model", "sha256"),
    ("model", "precision"),
    ("model", "dtype"),
    ("protocol",),
    ("method",),
    ("cache",),
    ("sampling",),
    ("tool_set",),
    ("task", "instance"),
    ("task", "problem"),
)
_BETTER_SAME = (
    ("versions",),
    ("hardware", "processor"),
    ("hardware", "torch_threads"),
    ("sandbox", "kind"),
)


class CannotResume(OptionError):
    """A run that cannot be gone on with; the text says why."""


@dataclass(frozen=True, slots=True)
class KeptRun:
    """A run's folder, its options and what its report says so far."""

    folder: Path
    options: RunOptions
    report: Mapping[str, Any]


def find_run(name: str, out: Path) -> KeptRun:
    """The run called `name`: a folder, a name in `out` or the part of one, or `last`.

    Raises CannotResume."""
    folder = _folder(name, out)
    try:
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        options = dict(report["options"])
        if options.get("repo") or options.get("image"):
            options["issue"] = report["task"]["problem"]  # the file may have changed
        return KeptRun(folder, RunOptions.model_validate(options), report)
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise CannotResume(f"--resume {name}: its report cannot be used: {why}") from error


def _folder(name: str, out: Path) -> Path:
    if name == "last":
        runs = sorted(path.parent for path in out.glob(f"*/{REPORT}"))
        if not runs:
            raise CannotResume(f"--resume last: there is no run in {out}")
        return runs[-1]
    for folder in (Path(name).expanduser(), out / name):
        if (folder / REPORT).is_file():
            return folder
    try:
        return index.find_run(name, out, flag="--out")  # a part of a name, as `agent show` takes it
    except index.NoSuchRun as error:
        raise CannotResume(f"--resume {name}: {error}") from error


def require_unfinished(run: KeptRun) -> None:
    """Raise CannotResume for a run that is over."""
    if run.report.get("state") == "finished" and not any(
        StateFolder(folder).folder.is_dir() for folder in attempt_folders(run.folder, run.options)
    ):
        raise CannotResume(
            f"{run.folder} is finished (exit: {run.report.get('exit', 'see its attempts')}); "
            "there is nothing to go on with"
        )


def attempt_folders(run: Path, options: RunOptions) -> list[Path]:
    """Where the attempts of a run are kept."""
    if options.attempts == 1:
        return [run]
    return [run / f"attempt-{number}" for number in range(1, options.attempts + 1)]


def require_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Compare what reports say of a run before and now. Returns differences that may matter.

    Raises CannotResume, naming all differences, where the run would not be the same one.
    """
    found = [line for path in _SAME for line in _differences(path, before, now)]
    if found:
        listed = "\n  ".join(found)
        raise CannotResume(f"this run was made with another model or config:\n  {listed}")
    return [line for path in _BETTER_SAME for line in _differences(path, before, now)]


def _differences(
    path: tuple[str, ...], before: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[str]:
    one: Any = before
    other: Any = now
    for key in path:
        one, other = one.get(key, {}), other.get(key, {})
    yield from _compared(".".join(path), one, json.loads(json.dumps(other)))


def _compared(name: str, one: Any, other: Any) -> Iterator[str]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for key in sorted({*one, *other}):
            yield from _compared(f"{name}.{key}", one.get(key), other.get(key))
    elif one != other:
        yield f"{name} was {_short(one)}, is {_short(other)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 70 else f"{text[:67]}..."


class ResumedRepoTask:
    """A repository as it was when the run began, whatever became of it since.

    Its tree is not read again: the run's state has it.
    """

    def __init__(self, repo: RepoTask, kept: Mapping[str, Any], states: StateFolder) -> None:
        """Raises NoState where the tree that was kept cannot be read."""
        self.repo = repo
        try:
            self._tree, self._home = states.archives()
        except (OSError, tarfile.TarError) as error:
            raise NoState(f"the tree of the run cannot be read: {error}") from error
        self.instance = Instance(
            **{
                **kept["instance"],
                "test_paths": tuple(kept["instance"]["test_paths"]),
            }
        )
        self._spec = SandboxSpec.model_validate(kept["spec"])
        self._made = tuple(kept.get("made", ()))

    def tree(self) -> Path | None:
        """None: it is restored from the state."""
        return None

    def archive(self) -> TreeArchive | None:
        """The tree, where it came from this machine."""
        return self._tree

    def extras(self) -> Mapping[str, TreeArchive]:
        """What set-up had left in the home folder."""
        return {} if self._home is None else {DISK_HOME: self._home}

    def close(self) -> None:
        """Free the archives."""
        for archive in (self._tree, self._home):
            if archive is not None:
                archive.close()

    def spec(self) -> SandboxSpec:
        """The sandbox of the run; made anew where what it mounts is gone."""
        here = all(Path(path).exists() for path in self._spec.mounts)
        return self._spec if here else self.repo.spec()

    def made(self) -> Sequence[str]:
        """Files that set-up made in the tree."""
        return self._made

    def grade(self, patch: bytes) -> Verdict | None:
        """None: there are no hidden tests."""
        return None


def finished_attempt(folder: Path, seed: int, config: AnyConfig) -> Attempt | None:
    """An attempt of a run that is over already, from what was kept of it; None if it is not."""
    try:
        data = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        reason = ExitReason(data["exit"])
    except (OSError, ValueError, KeyError):
        return None
    if reason in UNFINISHED:
        return None
    names = {field.name for field in fields(TurnStats)}
    turns = data["turns"]
    patch = Patch((folder / PATCH).read_bytes(), tuple(data["patch"]["files"]))
    outcome = Outcome(
        reason=reason,
        detail=data["detail"],
        patch=patch,
        steps=data["totals"]["steps"],
        tokens=data["totals"]["tokens"],
        seconds=data["totals"]["seconds"],
        turns=[TurnStats(**{k: v for k, v in turn.items() if k in names}) for turn in turns],
        tool_seconds=[turn["tool_seconds"] for turn in turns],
    )
    return Attempt(folder, seed, outcome, config)
