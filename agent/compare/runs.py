"""Finished runs as a batch leaves them: `result.json` files, read for their numbers alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from agent.batch.store import Store
from agent.compare.grid import DENSE, Cell

Ending = Literal["graded", "ungraded", "error"]
PHASES = ("prefill", "decode", "eviction", "tool")


class ResultError(ValueError):
    """A result that cannot be read."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run. `ending`: graded; ungraded, where no hidden test decides; error, where it was not
    the model that failed, so that nothing is known of it."""

    key: str
    instance_id: str
    cell: Cell  # with the seed of this very attempt
    own: str  # other options of the cache, as canonical JSON
    rest: str  # all others: runs that differ here are neither pooled nor compared
    ending: Ending
    resolved: bool
    status: str  # of the verdict, or what the error was
    exit: str
    totals: Mapping[str, float]
    turns: tuple[Mapping[str, float], ...]
    versions: Mapping[str, str | None]
    ended: str

    @property
    def pair(self) -> tuple[str, int]:
        """What a run of another configuration must agree in to be compared with this one."""
        return self.instance_id, self.cell.seed

    @property
    def evictions(self) -> int:
        return int(self.totals.get("evictions", 0))

    def seconds(self, *phases: str) -> list[float]:
        """Seconds of each turn in these phases together."""
        return [sum(turn.get(f"{phase}_seconds", 0.0) for phase in phases) for turn in self.turns]


def read_results(folder: Path) -> list[Run]:
    """Every result in a batch's folder, whatever it was asked with. Raises ResultError."""
    results = Store(folder).results()
    return [parse(result, f"result {number} in {folder}") for number, result in enumerate(results)]


def parse(result: Mapping[str, Any], where: str = "result") -> Run:
    """A result as a run. Raises ResultError naming `where` and what is missing."""
    try:
        item = result["item"]
        options = dict(item["options"])
        error = result["state"] != "finished"
        verdict = result.get("verdict")
        cell = _cell(options, int(item["attempt"]))
        own, rest = _others(options)
        run = Run(
            key=result["key"],
            instance_id=item["instance_id"],
            cell=cell,
            own=own,
            rest=rest,
            ending="graded",
            resolved=False,
            status="",
            exit=str(result.get("exit") or ""),
            totals=result.get("totals") or {},
            turns=tuple(result.get("turns") or ()),
            versions={**(result.get("versions") or {}), "commit": result.get("git_commit")},
            ended=str(result.get("ended") or ""),
        )
    except (KeyError, TypeError, ValueError) as fault:
        raise ResultError(f"{where} is no result of a batch: {fault!r}") from fault
    return _graded(run, verdict, error, str(result.get("error") or ""))


def _graded(run: Run, verdict: Mapping[str, Any] | None, failed: bool, said: str) -> Run:
    if failed or (verdict is not None and verdict["status"] == "error"):
        detail = said or str((verdict or {}).get("detail") or "")
        return replace(run, ending="error", status=detail or "error")
    if verdict is None or verdict["status"] == "ungraded":
        return replace(run, ending="ungraded", status="ungraded")
    return replace(run, resolved=bool(verdict["resolved"]), status=str(verdict["status"]))


def _cell(options: Mapping[str, Any], attempt: int) -> Cell:
    values = {name: options.get(name) for name in Cell.model_fields}
    if values["method"] == DENSE:  # whatever it was given, it had no use for it
        values.update(scope=None, budget=None, density=None)
    return Cell.model_validate({**values, "seed": (values["seed"] or 0) + attempt - 1})


def _others(options: Mapping[str, Any]) -> tuple[str, str]:
    """The options that are no part of the cell, as canonical JSON: the cache's, and the rest."""
    others = {name: value for name, value in options.items() if name not in Cell.model_fields}
    overrides = others.pop("overrides", None) or ()
    cache = [item for item in overrides if item.strip().startswith("cache.")]
    rest = [item for item in overrides if item not in cache]
    own = {"prefill_eviction": others.pop("prefill_eviction", None), "overrides": cache}
    return json.dumps(own, sort_keys=True), json.dumps(
        {**others, "overrides": rest}, sort_keys=True
    )
