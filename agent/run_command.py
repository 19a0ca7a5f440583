"""One `agent run`: task, model and sandbox are made ready, attempts are made, graded, reported."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from rich.text import Text

from agent.chat import Chat
from agent.display import TerminalWatcher, show_end, show_patch
from agent.exits import ExitReason
from agent.interrupts import interruptible
from agent.loop import Loop, Outcome
from agent.models import LoadedModel, load
from agent.progress import TerminalProgress
from agent.prompts import make_dialect
from agent.protocol import make_protocol
from agent.report import (
    attempt_report,
    eviction_words,
    git_commit,
    hardware,
    merged,
    pass_at_k,
    versions,
)
from agent.run_options import DEMO_INSTANCE, OptionError, RunOptions
from agent.settings import AgentSettings
from agent.shared_prompt import SharedPrompt
from agent.trajectory import Trajectory, new_run_folder, write_report
from cache import AnyConfig, Sampling, preset
from environments import Choice, Patch, choose, open_sandbox
from tasks import Task, Verdict, release_pair
from tasks.image import ImageTask, place_tree
from tasks.repo import RepoTask, read_issue

_FAILED = (ExitReason.ERROR, ExitReason.SANDBOX_LOST)


@dataclass(slots=True)
class Attempt:
    """One attempt: where it is kept, how it ended, how it was graded."""

    folder: Path
    seed: int
    outcome: Outcome
    cache: AnyConfig
    verdict: Verdict | None = None
    prediction: Patch | None = None  # what was graded: the patch without changes to tests


@dataclass(slots=True)
class Run:
    """What stays the same over the attempts of a run."""

    options: RunOptions
    settings: AgentSettings
    task: Task
    choice: Choice
    folder: Path
    console: Console
    quiet: bool
    began: float = field(default_factory=time.time)
    facts: dict[str, Any] = field(default_factory=dict)

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
    with interruptible():
        settings = options.settings()
        task = make_task(options)
        try:
            choice = choose(_kind(options))
            folder = new_run_folder(out, task.instance.instance_id)
            run = Run(options, settings, task, choice, folder, console, quiet)
            return _made(run)
        finally:
            if isinstance(task, RepoTask):
                task.close()


def make_task(options: RunOptions) -> Task:
    """The task the options name; the demo's where they name none. Raises TaskError."""
    if options.repo is not None:
        issue = read_issue(options.issue or "")
        command = options.test_command
        return RepoTask(Path(options.repo), issue, test_command=command, image=options.image)
    if options.image is not None:
        issue = read_issue(options.issue or "")
        return ImageTask(options.image, issue, test_command=options.test_command)
    instance_id, file = release_pair.parse_ref(options.instance or DEMO_INSTANCE)
    kind = options.sandbox
    return release_pair.load(instance_id, file, open_sandbox=lambda spec: open_sandbox(spec, kind))


def _kind(options: RunOptions) -> str:
    """An image can only be used by an engine, so `auto` does not fall back from it."""
    return "docker" if options.image and options.sandbox == "auto" else options.sandbox


def cache_config(options: RunOptions, seed: int) -> AnyConfig:
    """The eviction config. Raises OptionError for a method or field that is not there."""
    try:
        return preset(options.method, **options.cache_data(seed))
    except ValidationError as error:
        first = error.errors()[0]
        path = [str(part) for part in first["loc"]]
        if path[:1] == [options.method]:  # the union's tag
            path = path[1:]
        raise OptionError(f"method {options.method}: {'.'.join(path)}: {first['msg']}") from error
    except ValueError as error:
        raise OptionError(str(error)) from error


def _made(run: Run) -> tuple[dict[str, Any], int]:
    options, task = run.options, run.task
    config = cache_config(options, options.first_seed)
    run.say(f"task {task.instance.instance_id}: {task.instance.problem.splitlines()[0]}")
    run.say(f"sandbox: {run.choice.kind} ({run.choice.reason})")
    with TerminalProgress(run.console) as progress:
        loaded = load(options.model, dtype=options.dtype, device=options.device, progress=progress)
    chat = Chat(loaded.tokenizer, loaded.name)
    run.say(f"model: {loaded.name}, {loaded.precision}, {loaded.device}")
    run.say(f"cache: {options.method}, {options.protocol}; {_budget_words(config)}")
    run.say(f"run folder: {run.folder}")
    run.facts = _facts(run, loaded)
    write_report(run.folder, merged({"state": "running"}, run.facts))
    attempts: list[Attempt] = []
    shared = SharedPrompt() if options.attempts > 1 else None
    try:
        for number in range(1, options.attempts + 1):
            attempts.append(_attempt(run, loaded, chat, config, number, shared))
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
    report = _report(run, attempts, "finished", "")
    write_report(run.folder, report)
    _show(run, attempts, report)
    if options.apply and isinstance(task, RepoTask) and attempts[0].outcome.patch:
        task.apply(attempts[0].outcome.patch.data)
        run.say(f"applied to {task.path}")
    return report, _exit_code(attempts)


def _attempt(
    run: Run,
    loaded: LoadedModel,
    chat: Chat,
    config: AnyConfig,
    number: int,
    shared: SharedPrompt | None,
) -> Attempt:
    """One attempt: a fresh sandbox, a fresh log, a cache that holds the first prompt at most.

    Attempts differ in the seed they sample with; that of the cache is the same for all, since they
    share what it keeps of the first prompt.
    """
    options, task = run.options, run.task
    seed = options.first_seed + number - 1
    several = options.attempts > 1
    if shared is not None:
        shared.last = number == options.attempts
    folder = run.folder / f"attempt-{number}" if several else run.folder
    if several:
        run.say(f"\nattempt {number} of {options.attempts}, seed {seed}")
    watcher = TerminalWatcher(run.console, budget=_budget(config), quiet=run.quiet)
    context = getattr(loaded.model.config, "max_position_embeddings", None)
    settings = _within(run.settings, context)
    with Trajectory(folder) as trajectory:
        with open_sandbox(task.spec(), run.choice.kind, progress=run.say) as sandbox:
            # Which limits this host cannot enforce is known once a sandbox is open.
            run.facts["sandbox"]["unenforced"] = list(getattr(sandbox, "unenforced", ()))
            place_tree(task, sandbox)
            protocol = make_protocol(
                options.protocol,
                loaded.model,
                chat,
                config,
                sampling=Sampling(temperature=options.temperature, top_p=options.top_p, seed=seed),
                chunk=options.chunk,
                shared=shared,
            )
            watcher.start()
            try:
                outcome = Loop(
                    task.instance,
                    sandbox,
                    chat,
                    protocol,
                    make_dialect(settings, task.instance, opens_in_thought=chat.opens_in_thought),
                    settings,
                    trajectory,
                    budget=_budget(config),
                    watcher=watcher,
                ).run()
            finally:
                watcher.stop()
                protocol.close()
    attempt = Attempt(folder, seed, outcome, config)
    if several:
        # Kept at once, ungraded: a crash in a later attempt must not lose this one.
        write_report(folder, _attempt_data(run, attempt))
    return attempt


def _graded(run: Run, attempt: Attempt) -> Verdict:
    _grade(run, attempt)
    return attempt.verdict or Verdict(False, "ungraded")


def _grade(run: Run, attempt: Attempt) -> None:
    """Grade in a fresh sandbox; a task without hidden tests has no verdict.

    Changes to tests are no part of a prediction: what decides are the hidden ones.
    """
    patch = attempt.outcome.patch
    prediction = patch.without(patch.tests(run.task.instance.test_paths))
    status = "grading in a fresh sandbox"
    with run.console.status(status) if not run.quiet else _nothing():
        attempt.verdict = run.task.grade(prediction.data)
    if attempt.verdict is not None:
        attempt.prediction = prediction
        (attempt.folder / "prediction.diff").write_bytes(prediction.data)


def _report(run: Run, attempts: list[Attempt], state: str, error: str) -> dict[str, Any]:
    ended: dict[str, Any] = {"state": state, "seconds": round(time.time() - run.began, 3)}
    if error:
        ended["error"] = error
    data = [_attempt_data(run, attempt) for attempt in attempts]
    if run.options.attempts == 1:
        return merged(ended, run.facts, data[0] if data else {})
    for attempt, entry in zip(attempts, data, strict=True):
        write_report(attempt.folder, merged(ended, run.facts, entry))
    verdicts = [attempt.verdict for attempt in attempts]
    label = pass_at_k(verdicts, until_resolved=run.options.until_resolved)
    return merged(ended, run.facts, {"pass_at_k": label, "attempts": data})


def _attempt_data(run: Run, attempt: Attempt) -> dict[str, Any]:
    return {
        "seed": attempt.seed,
        "folder": attempt.folder.name,
        "cache": attempt.cache.model_dump(),
        **attempt_report(
            attempt.outcome,
            attempt.verdict,
            run.task.instance,
            evicts=attempt.cache.evicts,
        ),
        **_prediction_data(attempt),
    }


def _prediction_data(attempt: Attempt) -> dict[str, Any]:
    if attempt.prediction is None:
        return {}
    left_out = sorted(set(attempt.outcome.patch.files) - set(attempt.prediction.files))
    size = len(attempt.prediction.data)
    return {"prediction": {"bytes": size, "tests_left_out": left_out}}


def _facts(run: Run, loaded: LoadedModel) -> dict[str, Any]:
    """What is known before the first attempt."""
    instance, options = run.task.instance, run.options
    spec = run.task.spec()
    return {
        "run": run.folder.name,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(run.began)),
        "argv": sys.argv[1:],
        "options": options.model_dump(),
        "versions": versions(),
        "git_commit": git_commit(),
        "hardware": hardware(),
        "task": {
            "kind": options.task,
            "instance": instance.instance_id,
            "package": instance.package,
            "problem": instance.problem,
            "test_command": instance.test_command,
        },
        "model": {
            "name": loaded.name,
            "sha256": loaded.sha256,
            "precision": loaded.precision,
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "device": str(loaded.device),
        },
        "protocol": options.protocol,
        "method": options.method,
        "sampling": {
            "temperature": options.temperature,
            "top_p": options.top_p,
            "seed": options.first_seed,
        },
        "tool_set": run.settings.model_dump(),
        "sandbox": {
            "kind": run.choice.kind,
            "reason": run.choice.reason,
            "image": spec.image,
            "limits": spec.limits.model_dump(),
        },
    }


def _show(run: Run, attempts: list[Attempt], report: dict[str, Any]) -> None:
    if run.quiet:
        return
    for number, attempt in enumerate(attempts, 1):
        if len(attempts) > 1:
            run.say(f"\nattempt {number}, seed {attempt.seed}")
        show_patch(run.console, attempt.outcome.patch.data)
        words = eviction_words(attempt.outcome, evicts=attempt.cache.evicts)
        show_end(run.console, attempt.outcome, attempt.verdict, words)
    if "pass_at_k" in report:
        run.say(report["pass_at_k"]["label"])
    run.say(f"kept in {run.folder}{os.sep}: trajectory.jsonl, patch.diff, report.json")


def _exit_code(attempts: list[Attempt]) -> int:
    reasons = [attempt.outcome.reason for attempt in attempts]
    if ExitReason.INTERRUPTED in reasons:
        return 130
    return 1 if all(reason in _FAILED for reason in reasons) else 0


def _within(settings: AgentSettings, context: int | None) -> AgentSettings:
    """The limits of the tool set, at most what the model was made for."""
    limits = settings.limits
    if context is None or limits.total_tokens <= context:
        return settings
    limits = limits.model_copy(update={"total_tokens": context})
    return settings.model_copy(update={"limits": limits})


def _budget(config: AnyConfig) -> int | None:
    budget = getattr(config, "budget", None)
    return getattr(budget, "tokens", None)


def _budget_words(config: AnyConfig) -> str:
    budget = getattr(config, "budget", None)
    if budget is None:
        return "no budget, nothing is evicted"
    if tokens := getattr(budget, "tokens", None):
        return f"a budget of {tokens:,} tokens"
    return f"{budget.density:.0%} of {budget.density_base}"


class _nothing:
    """A status line that is not there."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None
