"""The work function of batches: one attempt of a model at an instance, graded."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agent.attempt import (
    Attempt,
    attempt_data,
    cache_config,
    grade_attempt,
    make_attempt,
    run_facts,
    token_budget,
)
from agent.batch.item import Item
from agent.batch.worker_state import WorkerState
from agent.chat import Chat
from agent.exits import ExitReason
from agent.loop import Silence, Step
from agent.models import LoadedModel, load, pull, resolve
from agent.progress import Progress
from agent.report import merged, verdict_data
from agent.run_options import RunOptions
from agent.serving import Serving
from agent.timestamps import utc
from agent.trajectory import write_report
from environments import choose, open_sandbox
from tasks import Task
from tasks.source import open_source

Tell = Callable[[Mapping[str, Any]], None]


class Told(Silence):
    """Tells how far an attempt is."""

    def __init__(self, tell: Tell, budget: int | None) -> None:
        self._tell, self._budget, self._steps = tell, budget, 0

    def prefill(self, fed: int, total: int) -> None:
        self._say("reading")

    def text(self, reply_so_far: str) -> None:
        self._say("writing")

    def step(self, step: Step) -> None:
        self._steps = step.number
        self._say("tools", resident=step.reply.stats.resident)

    def _say(self, phase: str, **more: Any) -> None:
        self._tell({"phase": phase, "step": self._steps, "budget": self._budget, **more})


def prepare(options: RunOptions, progress: Progress | None) -> None:
    """Bring the model onto this disk, once, before workers load it. Raises ModelError."""
    pull(resolve(options.model), progress)


def run_item(item: Item, folder: Path, tell: Tell, state: WorkerState) -> dict[str, Any]:
    """One attempt, kept in `folder` as `agent run` keeps it; see `agent.batch.engine.Work`."""
    options = item.run_options()
    tell({"phase": "loading"})
    how = _loading(options)
    with state.use(
        "model",
        tuple(how.values()),
        lambda: _Model(load(**how), state.sessions),
        stop=_Model.stop,
        end=_Model.end,
    ) as model:
        return _run(item, options, folder, tell, model)


def _run(
    item: Item, options: RunOptions, folder: Path, tell: Tell, model: _Model
) -> dict[str, Any]:
    loaded = model.own()
    choice = choose(options.sandbox)
    task = _task(item, choice.kind)
    # The eviction's seed is that of the first attempt, as in `agent run --attempts`.
    config = cache_config(options, item.seed - item.attempt + 1)
    facts = {
        "started": utc(),
        "item": item.model_dump(mode="json"),
        **run_facts(task, loaded, options, sandbox={"kind": choice.kind, "reason": choice.reason}),
    }
    began = time.monotonic()
    attempt = make_attempt(
        task,
        loaded,
        Chat(loaded.tokenizer, loaded.name),
        config,
        options,
        folder,
        seed=item.seed,
        sandbox=choice.kind,
        watcher=Told(tell, token_budget(config)),
        engine=model.serving,
    )
    ran = time.monotonic() - began
    if attempt.outcome.reason is not ExitReason.INTERRUPTED:
        tell({"phase": "grading", "step": attempt.outcome.steps})
        grade_attempt(task, attempt)
    facts["sandbox"]["unenforced"] = list(attempt.unenforced)
    data = attempt_data(task, attempt)
    write_report(folder, merged({"state": "finished"}, facts, data))
    return _result(attempt, data, ran, time.monotonic() - began - ran)


def _loading(options: RunOptions) -> dict[str, Any]:
    """The options that decide what is loaded, and where, as `load` takes them."""
    how = options.model_dump(include={"model", "dtype", "device", "device_map", "quantize"})
    return {"name_or_path": how.pop("model"), **how}


class _Model:
    """A model with what lets several sessions use it."""

    def __init__(self, loaded: LoadedModel, sessions: int) -> None:
        self._loaded = loaded
        self.serving = Serving(loaded.model, sessions) if sessions > 1 else None

    def own(self) -> LoadedModel:
        """What a session is to work with."""
        return self._loaded if self.serving is None else self._loaded.for_thread()

    def stop(self, why: str) -> None:
        """End all sessions at what they do with the model next."""
        if self.serving is not None:
            self.serving.stop(why)

    def end(self) -> None:
        """No session uses it any more."""
        if self.serving is not None:
            self.serving.close()


def _task(item: Item, kind: str) -> Task:
    source = open_source(item.source, only=(item.instance_id,))
    entry = source.find(item.instance_id)
    if entry.digest != item.digest:
        raise RuntimeError(
            f"the row of {item.instance_id} in {item.source} is another one than when this batch "
            "was begun; start a batch anew for it"
        )
    return entry.task(lambda spec: open_sandbox(spec, kind))


def _result(attempt: Attempt, data: Mapping[str, Any], ran: float, graded: float) -> dict[str, Any]:
    """What the store keeps. A run that failed for a reason of ours says nothing of the patch."""
    outcome = attempt.outcome
    result: dict[str, Any] = {
        "verdict": None if attempt.verdict is None else verdict_data(attempt.verdict),
        "exit": outcome.reason.value,
        "evictions": data["evictions"],
        "query_aware": data["query_aware"],
        "totals": data["totals"],
        "turns": data["turns"],
        "seconds": {"run": round(ran, 3), "grade": round(graded, 3)},
    }
    if outcome.reason is ExitReason.ERROR:
        lines = outcome.detail.strip().splitlines()
        result |= {"state": "error", "error": lines[-1] if lines else "Error"}
    return result
