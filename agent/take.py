"""What becomes of a patch at the end of a run: applied, a branch, or left for the user to take."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.run_options import RunOptions
from agent.trajectory import PATCH
from environments import Patch
from tasks import Task
from tasks.branch import NewBranch, message_of, new_branch
from tasks.instance import TaskError
from tasks.repo import RepoTask


@dataclass(frozen=True, slots=True)
class Taken:
    """What was done with the patch, and what the user may do next."""

    applied: bool = False
    branch: str | None = None
    commit: str | None = None
    error: str = ""  # why the patch could not be taken as was asked for
    next: tuple[str, ...] = ()  # sentences with commands

    def data(self) -> dict[str, Any]:
        """As a report has it."""
        return {
            "applied": self.applied,
            "branch": self.branch,
            "commit": self.commit,
            "error": self.error,
            "next": list(self.next),
        }


def check_branch(options: RunOptions) -> NewBranch | None:
    """The branch that the options ask for, before anything is done. Raises BranchRefused."""
    if options.branch is None or options.repo is None:
        return None
    return new_branch(Path(options.repo).expanduser().resolve(), options.branch)


def take(task: Task, options: RunOptions, patch: Patch, folder: Path, model: str) -> Taken:
    """Do with the patch what the options ask for. Raises nothing that the user can mend."""
    if not isinstance(task, RepoTask) or not patch.data:
        return Taken()
    file = (folder / PATCH).resolve()
    here, kept = shlex.quote(str(task.path)), shlex.quote(str(file))
    to_apply = f"to take the patch: cd {here} && git apply {kept}"
    applied, commit = False, None
    try:
        if branch := check_branch(options):
            signed = f"Written by {model} (nexus-agent), run {folder.name}."
            commit = branch.commit(patch.data, message_of(task.instance.problem, signed))
        if options.apply:
            task.apply(patch.data)
            applied = True
    except (TaskError, OSError) as error:
        return Taken(applied, options.branch if commit else None, commit, str(error), (to_apply,))
    steps = []
    if commit is not None:
        name = shlex.quote(str(options.branch))
        steps.append(f"to look at it: git -C {here} show {name}")
        steps.append(f"to take it: git -C {here} merge {name}")
    if applied:
        steps.append(f"to undo it: cd {here} && git apply -R {kept}")
    if not steps:
        steps.append(f"{to_apply} (a next run can do it: --apply, or --branch NAME)")
    return Taken(applied, options.branch if commit else None, commit, "", tuple(steps))
