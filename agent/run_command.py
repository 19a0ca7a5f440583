"""One `agent run`: task, model and sandbox are made ready, attempts are made, graded, reported."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from agent.attempt import Attempt, attempt_data, cache_config, run_facts
from agent.chat import Chat
from agent.checks import Checks, checks_of
from agent.display import show_checks, show_end, show_left_out, show_patch, show_taken
from agent.exits import FAILURES, UNFINISHED, ExitReason
from agent.folder_lock import folder_lock
from agent.interrupts import interruptible
from agent.models import load
from agent.progress import TerminalProgress
from agent.report import eviction_words, merged, pass_at_k
from agent.resume import find_run, require_same, require_unfinished
from agent.run_attempts import Run, make_attempts
from agent.run_options import DEMO_INSTANCE, RunOptions
from agent.run_state import StateFolder
from agent.setup_step import set_up
from agent.take import Taken, check_branch, take
from agent.timestamps import utc
from agent.trajectory import new_run_folder, write_report
from cache import AnyConfig
from environments import choose, open_sandbox
from tasks import Task, release_pair
from tasks.image import ImageTask
from tasks.repo import RepoTask, read_issue
from tasks.source import PAIRS, open_source


def execute(
    options: RunOptions, *, out: Path, console: Console, quiet: bool
) -> tuple[dict[str, Any], int]:
    """Make the run. Returns its report and the exit code: 0 whatever the verdict.

    Raises OptionError, and what loading tasks, models and sandboxes raises (TaskError, ModelError,
    UnsupportedModel, UnbridgeableTemplate, SandboxError), KeyboardInterrupt.
    """
    with interruptible(), _task(options) as task:
        choice = choose(_kind(options))
        folder = new_run_folder(out, task.instance.instance_id)
        with folder_lock(folder):
            return _made(Run(options, task, choice, folder, console, quiet))


def resume(name: str, *, out: Path, console: Console, quiet: bool) -> tuple[dict[str, Any], int]:
    """Go on with the run called `name`; see `agent.resume`. Returns what `execute` does.

    Raises CannotResume, FolderBusy, NoState, and what `execute` raises.
    """
    kept = find_run(name, out)
    with interruptible(), folder_lock(kept.folder), _task(kept.options) as task:
        require_unfinished(kept)
        choice = choose(_kind(kept.options))
        run = Run(kept.options, task, choice, kept.folder, console, quiet, before=kept.report)
        return _made(run)


@contextmanager
def _task(options: RunOptions) -> Iterator[Task]:
    task = make_task(options)
    try:
        yield task
    finally:
        if isinstance(task, RepoTask):
            task.close()


def make_task(options: RunOptions) -> Task:
    """The task the options name; the demo's where they name none. Raises TaskError."""
    check_branch(options)
    if options.repo is not None:
        issue = read_issue(options.issue or "")
        return RepoTask(
            Path(options.repo),
            issue,
            test_command=options.test_command,
            image=options.image,
            host_prefix=options.env,
            set_up=options.setup is not None,
        )
    if options.image is not None:
        issue = read_issue(options.issue or "")
        return ImageTask(options.image, issue, test_command=options.test_command)
    instance_id, file = release_pair.parse_ref(options.instance or DEMO_INSTANCE)
    kind = options.sandbox
    source = open_source(str(file) if file else PAIRS)
    return source.find(instance_id).task(lambda spec: open_sandbox(spec, kind))


def _kind(options: RunOptions) -> str:
    """An image can only be used by an engine, so `auto` does not fall back from it."""
    return "docker" if options.image and options.sandbox == "auto" else options.sandbox


def _made(run: Run) -> tuple[dict[str, Any], int]:
    options, task = run.options, run.task
    config = cache_config(options, options.first_seed)
    run.say(f"task {task.instance.instance_id}: {task.instance.problem.splitlines()[0]}")
    run.say(f"sandbox: {run.choice.kind} ({run.choice.reason})")
    _set_up(run)
    with TerminalProgress(run.console) as progress:
        loaded = load(
            options.model,
            dtype=options.dtype,
            device=options.device,
            device_map=options.device_map,
            quantize=options.quantize,
            progress=progress,
        )
    chat = Chat(loaded.tokenizer, loaded.name)
    run.say(f"model: {loaded.name}, {loaded.precision}, {loaded.where}")
    run.say(f"tools: {options.tools} ({options.tools_reason or 'as asked for'})")
    run.say(
        f"cache: {options.method}, {options.protocol}; {_budget_words(config, options.cache_gib)}"
    )
    run.say(f"run folder: {run.folder}")
    run.facts = {
        "run": run.folder.name,
        "started": utc(run.began),
        "argv": sys.argv[1:],
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "cache": config.model_dump(mode="json"),
        **run_facts(
            task, loaded, options, sandbox={"kind": run.choice.kind, "reason": run.choice.reason}
        ),
    }
    if run.set_up is not None:
        run.facts["setup"] = asdict(run.set_up)
    if run.before is not None:
        _go_on(run, run.before)
    write_report(run.folder, merged({"state": "running", "seconds": run.seconds}, run.facts))
    attempts: list[Attempt] = []
    try:
        make_attempts(run, loaded, chat, config, attempts)
    except BaseException as error:
        report = _report(run, attempts, "failed", f"{type(error).__name__}: {error}")
        write_report(run.folder, report)
        raise
    interrupted = any(a.outcome.reason is ExitReason.INTERRUPTED for a in attempts)
    report = _report(run, attempts, "interrupted" if interrupted else "finished", "")
    write_report(run.folder, report)
    for attempt in attempts:
        if attempt.outcome.reason not in UNFINISHED:
            StateFolder(attempt.folder).remove()
    taken = Taken()
    if options.attempts == 1:
        taken = take(task, options, attempts[0].outcome.patch, run.folder, loaded.name)
        report = merged(report, {"taken": taken.data()})
        write_report(run.folder, report)
    _show(run, attempts, report, taken)
    return report, 1 if taken.error else _exit_code(attempts)


def _set_up(run: Run) -> None:
    """Run the command of --setup, or take what it made before. A resumed run has it in its tree.

    Raises TaskError, SandboxError.
    """
    command, task = run.options.setup, run.task
    if command is None or not isinstance(task, RepoTask | ImageTask):
        return
    alone = run.options.attempts == 1 and isinstance(task, RepoTask)
    if run.before is not None and alone and StateFolder(run.folder).task() is not None:
        return
    log = run.folder / "setup.log"
    with run.status(f"set-up: {command.splitlines()[0]}"):
        run.set_up = set_up(task, command, run.choice.kind, log=log, say=run.say)


def _go_on(run: Run, before: Mapping[str, Any]) -> None:
    """See that the run is still the one that it was. Raises CannotResume."""
    for difference in require_same(before, run.facts):
        run.say(f"other than before: {difference}")
    run.facts["started"] = before["started"]
    run.facts["resumed"] = [*before.get("resumed", []), utc(run.began)]


def _report(run: Run, attempts: list[Attempt], state: str, error: str) -> dict[str, Any]:
    ended: dict[str, Any] = {"state": state, "seconds": run.seconds}
    if error:
        ended["error"] = error
    run.facts.get("task", {})["test_command"] = run.task.instance.test_command
    data = [
        {**attempt_data(run.task, attempt), "checks": _checks(run, attempt).data()}
        for attempt in attempts
    ]
    if run.options.attempts == 1:
        return merged(ended, run.facts, data[0] if data else {})
    for attempt, entry in zip(attempts, data, strict=True):
        write_report(attempt.folder, merged(ended, run.facts, entry))
    verdicts = [attempt.verdict for attempt in attempts]
    label = pass_at_k(verdicts, until_resolved=run.options.until_resolved)
    return merged(ended, run.facts, {"pass_at_k": label, "attempts": data})


def _checks(run: Run, attempt: Attempt) -> Checks:
    return checks_of(attempt.folder, run.options.settings(), run.task.instance.test_command)


def _show(run: Run, attempts: list[Attempt], report: dict[str, Any], taken: Taken) -> None:
    if run.quiet:
        return
    for number, attempt in enumerate(attempts, 1):
        if len(attempts) > 1:
            run.say(f"\nattempt {number}, seed {attempt.seed}")
        show_patch(run.console, attempt.outcome.patch.data)
        show_left_out(run.console, attempt.outcome.patch)
        show_checks(run.console, _checks(run, attempt))
        words = eviction_words(attempt.outcome, evicts=attempt.cache.evicts)
        show_end(run.console, attempt.outcome, attempt.verdict, words)
    if "pass_at_k" in report:
        run.say(report["pass_at_k"]["label"])
    if isinstance(run.task, RepoTask):
        for note in run.task.notes:
            run.say(note)
        show_taken(run.console, taken, run.task.path)
    run.say(f"kept in {run.folder}{os.sep}: trajectory.jsonl, patch.diff, report.json")
    if any(StateFolder(attempt.folder).begun for attempt in attempts):
        run.say(f"to go on: agent run --resume {run.folder}")


def _exit_code(attempts: list[Attempt]) -> int:
    reasons = [attempt.outcome.reason for attempt in attempts]
    if ExitReason.INTERRUPTED in reasons:
        return 130
    return 1 if all(reason in FAILURES for reason in reasons) else 0


def _budget_words(config: AnyConfig, gib: float | None = None) -> str:
    budget = getattr(config, "budget", None)
    if budget is None:
        return "no budget, nothing is evicted"
    if tokens := getattr(budget, "tokens", None):
        size = "" if gib is None else f" ({gib:g} GiB)"
        return f"a budget of {tokens:,} tokens{size}"
    return f"{budget.density:.0%} of {budget.density_base}"
