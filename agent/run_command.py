"""One `agent run`: task, model and sandbox are made ready, attempts are made, graded, reported."""

from __future__ import annotations

import copy
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from agent.attempt import (
    Attempt,
    attempt_data,
    cache_config,
    grade_attempt,
    make_attempt,
    run_facts,
    token_budget,
)
from agent.chat import Chat
from agent.checks import Checks, checks_of
from agent.display import (
    TerminalWatcher,
    show_checks,
    show_end,
    show_left_out,
    show_patch,
    show_taken,
)
from agent.exits import ExitReason
from agent.folder_lock import folder_lock
from agent.interrupts import interruptible
from agent.keeper import KeepOptions
from agent.models import LoadedModel, load
from agent.parallel import LineWatcher, side_by_side
from agent.progress import TerminalProgress
from agent.report import eviction_words, merged, pass_at_k
from agent.resume import (
    UNFINISHED,
    ResumedRepoTask,
    attempt_folders,
    find_run,
    finished_attempt,
    require_same,
    require_unfinished,
)
from agent.run_options import DEMO_INSTANCE, RunOptions
from agent.run_state import StateFolder
from agent.serving import Engine, Serving
from agent.setup_step import SetUp, set_up
from agent.shared_prompt import SharedPrompt
from agent.take import Taken, check_branch, take
from agent.trajectory import new_run_folder, write_report
from cache import AnyConfig
from environments import Choice, choose, open_sandbox
from tasks import Task, Verdict, release_pair
from tasks.image import ImageTask
from tasks.repo import RepoTask, read_issue
from tasks.source import PAIRS, open_source

_FAILED = (ExitReason.ERROR, ExitReason.SANDBOX_LOST)


@dataclass(slots=True)
class Run:
    """What stays the same over the attempts of a run."""

    options: RunOptions
    task: Task
    choice: Choice
    folder: Path
    console: Console
    quiet: bool
    before: Mapping[str, Any] | None = None  # the report so far of a run that is gone on with
    began: float = field(default_factory=time.time)
    set_up: SetUp | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Since the run began, without the time in which nobody made it."""
        earlier = (self.before or {}).get("seconds", 0.0)
        return round(earlier + time.time() - self.began, 3)

    def say(self, text: str) -> None:
        if not self.quiet:
            self.console.print(Text(text), highlight=False)


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
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(run.began)),
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
    shared = SharedPrompt() if options.attempts > 1 else None
    try:
        if options.parallel:
            _at_once(run, loaded, config, shared, attempts)
        for number in range(len(attempts) + 1, options.attempts + 1):
            attempts.append(
                _finished(run, config, number)
                or _attempt(run, loaded, chat, config, number, shared)
            )
            if attempts[-1].outcome.reason is ExitReason.INTERRUPTED:
                break
            if options.until_resolved and _graded(run, attempts[-1]).resolved:
                break
        if shared is not None:
            shared.close()
            run.facts["shared_prompt"] = {"tokens": shared.tokens, "bytes": shared.nbytes}
        for attempt in attempts:
            if attempt.verdict is None and attempt.outcome.reason is not ExitReason.INTERRUPTED:
                _grade(run, attempt)
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
    status = f"set-up: {command.splitlines()[0]}"
    with run.console.status(status) if not run.quiet else _nothing():
        run.set_up = set_up(task, command, run.choice.kind, log=log, say=run.say)


def _go_on(run: Run, before: Mapping[str, Any]) -> None:
    """See that the run is still the one that it was. Raises CannotResume."""
    for difference in require_same(before, run.facts):
        run.say(f"other than before: {difference}")
    run.facts["started"] = before["started"]
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(run.began))
    run.facts["resumed"] = [*before.get("resumed", []), now]


def _folder(run: Run, number: int) -> Path:
    return attempt_folders(run.folder, run.options)[number - 1]


def _finished(run: Run, config: AnyConfig, number: int) -> Attempt | None:
    """An attempt that was over when the run was ended."""
    if run.before is None or run.options.attempts == 1:
        return None
    seed = run.options.first_seed + number - 1
    attempt = finished_attempt(_folder(run, number), seed, config)
    if attempt is not None:
        run.say(f"attempt {number} was over already: {attempt.outcome.reason.value}")
    return attempt


def _at_once(
    run: Run,
    loaded: LoadedModel,
    config: AnyConfig,
    shared: SharedPrompt | None,
    attempts: list[Attempt],
) -> None:
    """Make all attempts side by side; what one of them raised is raised when all are over."""
    count = run.options.attempts
    with Serving(loaded.model, count) as serving:

        def one(number: int) -> Attempt:
            # A tokenizer's settings change while it encodes: no two threads may share one.
            own = replace(loaded, tokenizer=copy.deepcopy(loaded.tokenizer))
            chat = Chat(own.tokenizer, own.name)
            return _finished(run, config, number) or _attempt(
                run, own, chat, config, number, shared, serving
            )

        works = [partial(one, number) for number in range(1, count + 1)]
        found = side_by_side(works, stop=serving.stop)
        run.facts["serving"] = {"steps": serving.steps, "tokens": serving.fed}
    attempts += [each for each in found if isinstance(each, Attempt)]
    for each in found:
        if isinstance(each, BaseException):
            raise each


def _attempt(
    run: Run,
    loaded: LoadedModel,
    chat: Chat,
    config: AnyConfig,
    number: int,
    shared: SharedPrompt | None,
    engine: Engine | None = None,
) -> Attempt:
    """One attempt: a fresh sandbox, a fresh log, a cache that holds the first prompt at most.

    Attempts differ in the seed they sample with; that of the cache is the same for all, since they
    share what it keeps of the first prompt.
    """
    options = run.options
    seed = options.first_seed + number - 1
    several = options.attempts > 1
    if shared is not None and engine is None:
        shared.last = number == options.attempts
    folder, task = _folder(run, number), run.task
    resumed = run.before is not None
    kept = StateFolder(folder).task() if resumed else None
    if kept is not None and isinstance(task, RepoTask):
        task = ResumedRepoTask(task, kept, StateFolder(folder))
    if several:
        run.say(f"\nattempt {number} of {options.attempts}, seed {seed}")
    budget = token_budget(config)
    terminal = TerminalWatcher(run.console, budget=budget, quiet=run.quiet)
    lines = LineWatcher(run.console, f"attempt {number}", budget=budget, quiet=run.quiet)
    if engine is None:
        terminal.start()
    try:
        attempt = make_attempt(
            task,
            loaded,
            chat,
            config,
            options,
            folder,
            seed=seed,
            sandbox=run.choice.kind,
            watcher=terminal if engine is None else lines,
            shared=shared,
            keep=KeepOptions(turns=options.snapshot_turns, seconds=options.snapshot_seconds),
            resume=resumed,
            engine=engine,
            say=run.say,
        )
    finally:
        terminal.stop()
        if isinstance(task, ResumedRepoTask):
            task.close()
    run.facts["sandbox"]["unenforced"] = list(attempt.unenforced)
    if several:
        # Kept at once, ungraded: a crash in a later attempt must not lose this one.
        write_report(folder, attempt_data(run.task, attempt))
    return attempt


def _graded(run: Run, attempt: Attempt) -> Verdict:
    _grade(run, attempt)
    return attempt.verdict or Verdict(False, "ungraded")


def _grade(run: Run, attempt: Attempt) -> None:
    status = "grading in a fresh sandbox"
    with run.console.status(status) if not run.quiet else _nothing():
        grade_attempt(run.task, attempt)


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
    return 1 if all(reason in _FAILED for reason in reasons) else 0


def _budget_words(config: AnyConfig, gib: float | None = None) -> str:
    budget = getattr(config, "budget", None)
    if budget is None:
        return "no budget, nothing is evicted"
    if tokens := getattr(budget, "tokens", None):
        size = "" if gib is None else f" ({gib:g} GiB)"
        return f"a budget of {tokens:,} tokens{size}"
    return f"{budget.density:.0%} of {budget.density_base}"


class _nothing:
    """A status line that is not there."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None
