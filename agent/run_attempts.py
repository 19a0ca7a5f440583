"""The attempts of one `agent run`, in turn or side by side, with their grading."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from agent.attempt import Attempt, attempt_data, grade_attempt, make_attempt, token_budget
from agent.chat import Chat
from agent.display import TerminalWatcher
from agent.engines import Engine
from agent.exits import ExitReason
from agent.keeper import KeepOptions
from agent.models import LoadedModel
from agent.parallel import LineWatcher, side_by_side
from agent.resume import ResumedRepoTask, attempt_folders, finished_attempt
from agent.run_options import RunOptions
from agent.run_state import StateFolder
from agent.serving import Serving
from agent.setup_step import SetUp
from agent.shared_prompt import SharedPrompt
from agent.trajectory import write_report
from cache import AnyConfig
from environments import Choice
from tasks import Task
from tasks.repo import RepoTask


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
        """A line on the console."""
        if not self.quiet:
            self.console.print(Text(text), highlight=False)

    def status(self, text: str) -> AbstractContextManager[object]:
        """A line that stands there while something is done."""
        return nullcontext() if self.quiet else self.console.status(text)


def make_attempts(
    run: Run, loaded: LoadedModel, chat: Chat, config: AnyConfig, attempts: list[Attempt]
) -> None:
    """Make the attempts, up to one that is interrupted or, where so asked, resolves; grade them.

    Each is in `attempts` when it is over, so that what is raised later loses none.
    """
    options = run.options
    shared = SharedPrompt() if options.attempts > 1 else None
    if options.parallel:
        _side_by_side(run, loaded, config, shared, attempts)
    else:
        for number in range(1, options.attempts + 1):
            attempts.append(_attempt(run, loaded, chat, config, number, shared))
            if attempts[-1].outcome.reason is ExitReason.INTERRUPTED:
                break
            if options.until_resolved and _resolves(run, attempts[-1]):
                break
    if shared is not None:
        shared.close()
        run.facts["shared_prompt"] = {"tokens": shared.tokens, "bytes": shared.nbytes}
    for attempt in attempts:
        if attempt.verdict is None and attempt.outcome.reason is not ExitReason.INTERRUPTED:
            _grade(run, attempt)


def _side_by_side(
    run: Run,
    loaded: LoadedModel,
    config: AnyConfig,
    shared: SharedPrompt | None,
    attempts: list[Attempt],
) -> None:
    """Make all attempts at once; what one of them raised is raised when all are over."""
    count = run.options.attempts
    with Serving(loaded.model, count) as serving:

        def one(number: int) -> Attempt:
            own = loaded.for_thread()
            chat = Chat(own.tokenizer, own.name)
            return _attempt(run, own, chat, config, number, shared, serving)

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
    several = options.attempts > 1
    seed, folder = options.first_seed + number - 1, attempt_folders(run.folder, options)[number - 1]
    resumed, task, states = run.before is not None, run.task, StateFolder(folder)
    if resumed and several and (over := finished_attempt(folder, seed, config)) is not None:
        run.say(f"attempt {number} was over already: {over.outcome.reason.value}")
        return over
    if shared is not None and engine is None:
        shared.last = number == options.attempts
    kept = states.task() if resumed else None
    if kept is not None and isinstance(task, RepoTask):
        task = ResumedRepoTask(task, kept, states)
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


def _resolves(run: Run, attempt: Attempt) -> bool:
    _grade(run, attempt)
    return attempt.verdict is not None and attempt.verdict.resolved


def _grade(run: Run, attempt: Attempt) -> None:
    with run.status("grading in a fresh sandbox"):
        grade_attempt(run.task, attempt)
