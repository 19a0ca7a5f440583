"""One attempt at a task, as `agent run` and batches make it: sandbox, loop, patch, grading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agent.chat import Chat, UnbridgeableTemplate
from agent.dialects.json_calls import JsonCalls
from agent.engines import Engine
from agent.keeper import KeepOptions, RunKeeper
from agent.loop import Loop, Outcome, Watcher
from agent.models import LoadedModel
from agent.planner import budget_tokens
from agent.prompts import make_dialect, tool_schemas
from agent.protocol import KeptProtocol, make_protocol
from agent.report import attempt_report, git_commit, hardware, versions
from agent.run_options import OptionError, RunOptions
from agent.run_state import SavedState, StateFolder
from agent.settings import AgentSettings
from agent.shared_prompt import SharedPrompt
from agent.token_log import TokenLog
from agent.trajectory import TRAJECTORY, Trajectory, write_atomic
from cache import AnyConfig, EvictingConfig, Sampling, preset
from cache.methods import make_method
from environments import Patch, Sandbox, open_sandbox
from environments.treesave import clock, restore_tree, save_tree
from environments.workspace import DISK_HOME
from tasks import Task, Verdict
from tasks.image import leave_out_made, place_tree
from tasks.repo import RepoTask


@dataclass(slots=True)
class Attempt:
    """One attempt: where it is kept, how it ended, how it was graded."""

    folder: Path
    seed: int
    outcome: Outcome
    cache: AnyConfig
    unenforced: tuple[str, ...] = ()  # limits that this host's sandbox could not enforce
    verdict: Verdict | None = None
    prediction: Patch | None = None  # what was graded: the patch without changes to tests


def make_attempt(
    task: Task,
    loaded: LoadedModel,
    chat: Chat,
    config: AnyConfig,
    options: RunOptions,
    folder: Path,
    *,
    seed: int,
    sandbox: str,
    watcher: Watcher | None = None,
    shared: SharedPrompt | None = None,
    keep: KeepOptions | None = None,
    resume: bool = False,
    engine: Engine | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Attempt:
    """Let the model work in a fresh sandbox of the kind `sandbox`, with a fresh log.

    `folder` gets the trajectory, the patch and, where `keep` says so, what another process needs to
    go on; with `resume` that process is this one (where no state was saved yet, it begins).
    engine: what uses the model, where other attempts do so too.
    seed: of sampling; the cache has its own. Raises SandboxError and TaskError when the sandbox or
    its tree cannot be had, NoState when what was saved cannot be used; what happens afterwards is
    the attempt's outcome.
    """
    context = getattr(loaded.model.config, "max_position_embeddings", None)
    settings = _within(options.settings(), context)
    chat = _chat(chat, loaded, settings, task)
    if keep is not None and not keep.turns:
        keep = None
    states = StateFolder(folder)
    saved = states.newest() if resume and states.begun else None
    with _trajectory(folder, saved, resume=resume) as trajectory:
        with open_sandbox(task.spec(), sandbox, progress=say) as box:
            # Which limits this host cannot enforce is known once a sandbox is open.
            unenforced = tuple(getattr(box, "unenforced", ()))
            since = _place(task, box, states, kept=keep is not None, saved=saved)
            protocol = _protocol(
                loaded, chat, config, options, settings, seed=seed, shared=shared, engine=engine
            )
            keeper = None
            if keep is not None:
                keeper = RunKeeper(
                    folder,
                    box,
                    protocol,
                    trajectory,
                    keep,
                    since=since,
                    model_id=loaded.sha256,
                    say=say,
                    tree=None if saved is None else saved.tree,
                )
            try:
                if saved is not None:
                    _catch_up(protocol, saved, states, trajectory, loaded, watcher)
                outcome = Loop(
                    task.instance,
                    box,
                    chat,
                    protocol,
                    make_dialect(settings, task.instance, opens_in_thought=chat.opens_in_thought),
                    settings,
                    trajectory,
                    budget=token_budget(config),
                    watcher=watcher,
                    keeper=keeper,
                ).run(None if saved is None else saved.loop)
            finally:
                protocol.close()
    return Attempt(folder, seed, outcome, config, unenforced)


def _chat(chat: Chat, loaded: LoadedModel, settings: AgentSettings, task: Task) -> Chat:
    """The chat of a tool set: told of the tools where the model's template describes them.

    Raises UnbridgeableTemplate for a model whose template cannot do what the set asks for.
    """
    schemas = tool_schemas(settings, task.instance) if settings.dialect == JsonCalls.name else None
    if schemas is not None or settings.thinking is not None:
        chat = Chat(loaded.tokenizer, loaded.name, schemas, thinking=settings.thinking)
    if settings.observation_role not in chat.roles:
        raise UnbridgeableTemplate(
            f"the chat template of {chat.name} has no messages of role "
            f"{settings.observation_role!r}, which tool set {settings.name!r} needs: choose "
            "another set, or --set observation_role=user"
        )
    return chat


def _protocol(
    loaded: LoadedModel,
    chat: Chat,
    config: AnyConfig,
    options: RunOptions,
    settings: AgentSettings,
    *,
    seed: int,
    shared: SharedPrompt | None,
    engine: Engine | None,
) -> KeptProtocol:
    try:
        return make_protocol(
            options.protocol,
            loaded.model,
            chat,
            config,
            sampling=Sampling(**options.sampling(settings).model_dump(), seed=seed),
            chunk=options.chunk,
            shared=shared,
            history=settings.history,
            engine=engine,
        )
    except ValueError as error:  # what only the loaded model shows
        raise OptionError(str(error)) from error


def _trajectory(folder: Path, saved: SavedState | None, *, resume: bool) -> Trajectory:
    if resume and (folder / TRAJECTORY).exists():
        return Trajectory.reopen(folder, 0 if saved is None else saved.trajectory_bytes)
    return Trajectory(folder)


def _place(
    task: Task, box: Sandbox, states: StateFolder, *, kept: bool, saved: SavedState | None
) -> int:
    """Bring the tree into the sandbox. Returns when it was there and nothing else was."""
    base = states.base()  # of a run that is gone on with, even before its first turn
    if base is None:
        place_tree(task, box)
    else:
        restore_tree(box, base, scratch=(DISK_HOME,))
        leave_out_made(task, box)
        box.mark_base()
    since = clock(box)
    if saved is not None:
        restore_tree(box, saved.tree)
    elif kept and isinstance(task, RepoTask):  # a tree that may be another one tomorrow
        kept_task = {
            "instance": asdict(task.instance),
            "spec": task.spec().model_dump(mode="json"),
            "made": list(task.made()),
        }
        if (tree := task.archive()) is not None:
            states.keep_archives(tree, task.extras().get(DISK_HOME), kept_task)
        else:
            states.keep_base(save_tree(box, 0, scratch=(DISK_HOME,)), kept_task)
    return since


def _catch_up(
    protocol: KeptProtocol,
    saved: SavedState,
    states: StateFolder,
    trajectory: Trajectory,
    loaded: LoadedModel,
    watcher: Watcher | None,
) -> None:
    """Make of a fresh protocol the one that stood at the saved state."""
    caches = [path for _, path in states.caches(saved.turn)]
    log = TokenLog.from_dict(saved.loop["log"])
    fed = protocol.resume(
        log, caches, model_id=loaded.sha256, on_replay=watcher.prefill if watcher else None
    )
    trajectory.append("resume", {"step": saved.turn, "ids": len(log), "replayed": fed})


def grade_attempt(task: Task, attempt: Attempt) -> None:
    """Grade in a fresh sandbox; a task without hidden tests has no verdict.

    Changes to tests are no part of a prediction: what decides are the hidden ones.
    """
    patch = attempt.outcome.patch
    prediction = patch.without(patch.tests(task.instance.test_paths))
    attempt.verdict = task.grade(prediction.data)
    if attempt.verdict is not None:
        attempt.prediction = prediction
        write_atomic(attempt.folder / "prediction.diff", prediction.data)


def attempt_data(task: Task, attempt: Attempt) -> dict[str, Any]:
    """What a report says of one attempt."""
    data = {
        "seed": attempt.seed,
        "folder": attempt.folder.name,
        "cache": attempt.cache.model_dump(),
        "query_aware": query_aware(attempt.cache),
        **attempt_report(
            attempt.outcome, attempt.verdict, task.instance, evicts=attempt.cache.evicts
        ),
    }
    if attempt.prediction is not None:
        left_out = sorted(set(attempt.outcome.patch.files) - set(attempt.prediction.files))
        size = len(attempt.prediction.data)
        data["prediction"] = {"bytes": size, "tests_left_out": left_out}
    return data


def query_aware(config: AnyConfig) -> bool | None:
    """Whether what stays depends on the newest tokens; None where nothing is evicted."""
    return make_method(config).query_aware if isinstance(config, EvictingConfig) else None


def cache_config(options: RunOptions, seed: int) -> AnyConfig:
    """The eviction config. Raises OptionError for a method or field that is not there."""
    try:
        tokens = budget_tokens(options, seed) if options.cache_gib is not None else None
        return preset(options.method, **options.cache_data(seed, tokens))
    except ValidationError as error:
        first = error.errors()[0]
        path = [str(part) for part in first["loc"]]
        if path[:1] == [options.method]:  # the union's tag
            path = path[1:]
        raise OptionError(f"method {options.method}: {'.'.join(path)}: {first['msg']}") from error
    except ValueError as error:
        raise OptionError(str(error)) from error


def run_facts(
    task: Task,
    loaded: LoadedModel,
    options: RunOptions,
    *,
    sandbox: dict[str, str],
) -> dict[str, Any]:
    """What is known before an attempt: options, versions, hardware, task, model, sandbox.

    sandbox: its kind, and the reason for that choice.
    """
    instance, spec = task.instance, task.spec()
    settings = options.settings()
    sampling = options.sampling(settings).model_dump()
    return {
        "options": options.model_dump() | sampling,
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
            "devices": [str(device) for device in loaded.devices],
        },
        "protocol": options.protocol,
        "method": options.method,
        "sampling": {**sampling, "seed": options.first_seed},
        "tool_set": settings.model_dump(),
        "sandbox": {**sandbox, "image": spec.image, "limits": spec.limits.model_dump()},
    }


def _within(settings: AgentSettings, context: int | None) -> AgentSettings:
    """The limits of the tool set, at most what the model was made for."""
    limits = settings.limits
    if context is None or limits.total_tokens <= context:
        return settings
    limits = limits.model_copy(update={"total_tokens": context})
    return settings.model_copy(update={"limits": limits})


def token_budget(config: AnyConfig) -> int | None:
    """Tokens the cache holds at most; None for another kind of budget."""
    budget = getattr(config, "budget", None)
    return getattr(budget, "tokens", None)
