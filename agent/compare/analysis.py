"""Runs of a comparison -> one row for each configuration, with what must be said of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from agent.compare.grid import DENSE, Cell
from agent.compare.runs import PHASES, Run
from agent.compare.statistics import Estimate, Paired, Slope, mean, paired, pass_at_1, slope

NEXUS = "nexus"
REFERENCES = (DENSE, NEXUS)
# A turn's time as far as the cache has a part in it.
MODEL_PHASES = ("prefill", "decode", "eviction")


@dataclass(frozen=True, slots=True)
class Expected:
    """A run that was asked for."""

    key: str
    instance_id: str
    cell: str  # its name


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration over all its instances and seeds. Means are over graded and ungraded runs,
    those of turns over all their turns. `resident` is the most held after a turn, `peak` the most
    held at any time."""

    name: str
    cell: Cell  # its seed says nothing
    seeds: tuple[int, ...]
    expected: int
    finished: int
    errors: int
    missing: int
    graded: int
    resolved: int
    statuses: Mapping[str, int]
    exits: Mapping[str, int]
    pass_at_1: Estimate | None
    against: Mapping[str, Paired | None]  # by reference
    turns: float | None
    fed: float | None
    sampled: float | None
    evictions: float | None
    evicted_runs: int
    peak_tokens: float | None
    peak_bytes: float | None
    resident_tokens: float | None
    resident_bytes: float | None
    seconds: Mapping[str, float | None]  # a turn's, by phase
    growth: Slope | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Growth:
    """How time per turn grows under a protocol, for caches that evict and for those that do not."""

    protocol: str
    evicts: bool
    seconds: Slope | None  # prefill, decode and eviction
    prefill: Slope | None


@dataclass(frozen=True, slots=True)
class Analysis:
    """What a comparison shows, and what must be known to read it."""

    rows: tuple[Row, ...]
    growth: tuple[Growth, ...]
    instances: tuple[str, ...]
    notes: tuple[str, ...]
    groups: tuple[tuple[str, tuple[Run, ...]], ...]  # runs by row, errors among them


@dataclass(frozen=True)
class _Group:
    """Runs of one configuration, errors included."""

    name: str
    cell: Cell
    own: str
    rest: str
    runs: tuple[Run, ...]

    @cached_property
    def done(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.ending != "error")

    @cached_property
    def verdicts(self) -> dict[tuple[str, int], bool]:
        return {run.pair: run.resolved for run in self.runs if run.ending == "graded"}


def analyse(runs: Iterable[Run], expected: Sequence[Expected] | None = None) -> Analysis:
    """The rows of a comparison. `expected`: what was asked for; None takes what is there.

    Results that were not asked for (of another config, or of a task that has changed) are left out
    and counted in the notes. Rows come in the order in which they were asked for.
    """
    runs = list(runs)
    notes: list[str] = []
    if expected is not None:
        keys = {item.key for item in expected}
        strangers = [run for run in runs if run.key not in keys]
        runs = [run for run in runs if run.key in keys]
        if strangers:
            notes.append(
                f"{len(strangers)} results in the folder are of other options or tasks than those "
                "asked for, and are left out"
            )
    groups = _groups(runs, expected)
    if older := len(runs) - sum(len(group.runs) for group in groups):
        notes.append(
            f"{older} results are of runs made again with another tool set, model file or "
            "task: the newest counts"
        )
    wanted = _wanted(groups, expected)
    rows = tuple(_row(group, groups, wanted[group.name]) for group in groups)
    instances = sorted(
        {item.instance_id for item in expected}
        if expected is not None
        else {run.instance_id for run in runs}
    )
    return Analysis(
        rows=rows,
        growth=_growth(groups),
        instances=tuple(instances),
        notes=(*notes, *_notes(rows, groups)),
        groups=tuple((group.name, group.runs) for group in groups),
    )


def slope_of(runs: Iterable[Run], phases: Sequence[str] = MODEL_PHASES) -> Slope | None:
    """How a turn's seconds grow with its number, from the second turn on: the first reads the
    instructions, under every protocol alike."""
    return slope(list(enumerate(run.seconds(*phases), 1))[1:] for run in runs)


def _groups(runs: Sequence[Run], expected: Sequence[Expected] | None) -> list[_Group]:
    """Runs by configuration: in the order asked for, else dense first and by name."""

    def order(run: Run) -> tuple[str, str, str]:
        return run.cell.configuration, run.own, run.rest

    made = [list(found) for _, found in groupby(sorted(runs, key=order), order)]
    shared = Counter(found[0].cell.configuration for found in made)
    number: Counter[str] = Counter()
    groups: dict[str, _Group] = {}
    for found in made:
        first = found[0]
        name = first.cell.configuration
        if shared[name] > 1:  # told apart by more than a row's name says
            number[name] += 1
            name = f"{name} #{number[name]}"
        latest = {run.pair: run for run in sorted(found, key=lambda run: run.ended)}
        members = tuple(latest[pair] for pair in sorted(latest))
        groups[name] = _Group(name, first.cell, first.own, first.rest, members)
    if expected is None:
        return sorted(groups.values(), key=_display_order)
    names = dict.fromkeys(configuration(item.cell) for item in expected)
    for name in names:
        if not any(group.cell.configuration == name for group in groups.values()):
            groups[name] = _Group(name, _named(name), "", "", ())
    place = {name: number for number, name in enumerate(names)}
    return sorted(groups.values(), key=lambda group: place[group.cell.configuration])


def configuration(cell_name: str) -> str:
    """A cell's name without its seed."""
    return cell_name.rpartition("/")[0]


def _named(name: str) -> Cell:
    """The configuration of a name that `Cell.configuration` made."""
    method, protocol, *more = name.split("/")
    values: dict[str, object] = {"method": method, "protocol": protocol}
    for part in more:
        if part.startswith("prefill"):
            values["scope"] = part
        elif part.startswith("d"):
            values["density"] = float(part[1:])
        else:
            values["budget"] = int(part[1:])
    return Cell.model_validate(values)


def _display_order(group: _Group) -> tuple[str, str, str, bool, bool, str]:
    cell = group.cell
    size = f"{cell.density or 0:.6f}/{cell.budget or 0:09d}"
    dense, nexus = cell.method != DENSE, cell.method != NEXUS
    return cell.protocol, cell.scope or "", size, dense, nexus, group.name


def _wanted(
    groups: Sequence[_Group], expected: Sequence[Expected] | None
) -> dict[str, list[tuple[str, int]]]:
    """(instance, seed) of every run that each row should have; where nothing says so, all that
    any row has."""
    if expected is not None:
        asked: dict[str, list[tuple[str, int]]] = {}
        for item in expected:
            name, _, seed = item.cell.rpartition("/s")
            asked.setdefault(name, []).append((item.instance_id, int(seed)))
        return {group.name: asked[group.cell.configuration] for group in groups}
    union = sorted({run.pair for group in groups for run in group.runs})
    return {group.name: union for group in groups}


def _row(group: _Group, groups: Sequence[_Group], wanted: Sequence[tuple[str, int]]) -> Row:
    done = group.done
    graded = [run for run in done if run.ending == "graded"]
    outcomes: dict[str, list[bool]] = {}
    for run in graded:
        outcomes.setdefault(run.instance_id, []).append(run.resolved)
    errors = len(group.runs) - len(done)
    row = Row(
        name=group.name,
        cell=group.cell,
        seeds=tuple(sorted({seed for _, seed in wanted})),
        expected=len(wanted),
        finished=len(done),
        errors=errors,
        missing=max(0, len(wanted) - len(group.runs)),
        graded=len(graded),
        resolved=sum(run.resolved for run in graded),
        statuses=_counts(run.status for run in graded),
        exits=_counts(run.exit for run in done),
        pass_at_1=pass_at_1(outcomes),
        against={name: _against(group, _reference(group, groups, name)) for name in REFERENCES},
        turns=mean(run.totals.get("steps", len(run.turns)) for run in done),
        fed=_total(done, "fed"),
        sampled=_total(done, "sampled"),
        evictions=_total(done, "evictions"),
        evicted_runs=sum(run.evictions > 0 for run in done),
        peak_tokens=_total(done, "peak_tokens"),
        peak_bytes=_total(done, "peak_bytes"),
        resident_tokens=_most(done, "resident"),
        resident_bytes=_most(done, "cache_bytes"),
        seconds={
            phase: mean(second for run in done for second in run.seconds(phase)) for phase in PHASES
        },
        growth=slope_of(done),
        notes=(),
    )
    return _with_notes(row)


def _with_notes(row: Row) -> Row:
    notes: list[str] = []
    if row.missing:
        notes.append(f"incomplete: {row.missing} of {row.expected} runs are missing")
    if row.errors:
        count = "1 run" if row.errors == 1 else f"{row.errors} runs"
        notes.append(f"{count} ended in an error of the infrastructure, counted nowhere else")
    if ungraded := row.finished - row.graded:
        notes.append(f"{ungraded} without a verdict: no hidden tests")
    if row.cell.method != DENSE and row.finished:
        if not row.evicted_runs:
            notes.append("never evicted: says nothing of the method")
        elif row.evicted_runs < row.finished:
            notes.append(f"evicted in {row.evicted_runs} of {row.finished} runs only")
    return replace(row, notes=tuple(notes))


def _reference(group: _Group, groups: Sequence[_Group], method: str) -> _Group | None:
    """The row to compare with: the same protocol, and for a method that evicts the same scope and
    size; all options that are not the cache's are the same."""
    if group.cell.method == method:
        return None
    sought = group.cell.model_copy(update={"method": method})
    if method == DENSE:
        sought = sought.model_copy(update={"scope": None, "budget": None, "density": None})
    found = [
        other
        for other in groups
        if other.cell.configuration == sought.configuration and other.rest == group.rest
    ]
    alike = [other for other in found if other.own == group.own]
    return found[0] if len(found) == 1 else alike[0] if len(alike) == 1 else None


def _against(group: _Group, reference: _Group | None) -> Paired | None:
    return None if reference is None else paired(group.verdicts, reference.verdicts)


def _growth(groups: Sequence[_Group]) -> tuple[Growth, ...]:
    found = []
    for protocol in dict.fromkeys(group.cell.protocol for group in groups):
        for evicts in (False, True):
            runs = [
                run
                for group in groups
                if group.cell.protocol == protocol and (group.cell.method != DENSE) == evicts
                for run in group.done
            ]
            if runs:
                found.append(Growth(protocol, evicts, slope_of(runs), slope_of(runs, ("prefill",))))
    return tuple(found)


def _notes(rows: Sequence[Row], groups: Sequence[_Group]) -> list[str]:
    notes: list[str] = []
    tests = [pair for row in rows for pair in row.against.values() if pair is not None]
    if len(tests) > 1:
        notes.append(f"p values are of {len(tests)} tests and not corrected for their number")
    if any(pair.repeated for pair in tests):
        notes.append(
            "instances ran with several seeds, so pairs depend on each other: p is too small"
        )
    done = [run for group in groups for run in group.done]
    if unlike := _unlike_prompts(done):
        notes.append(
            f"the first turn was not fed as many tokens in every cell ({', '.join(unlike)}), so "
            "cells differ in more than the cache"
        )
    if len({json.dumps(run.versions, sort_keys=True) for run in done}) > 1:
        notes.append("runs were made with different versions or commits of the software")
    if len({group.rest for group in groups if group.runs}) > 1:
        notes.append(
            "rows were run with different options (model, sampling or limits); those are not "
            "compared with each other"
        )
    return notes


def _unlike_prompts(runs: Iterable[Run]) -> list[str]:
    fed: dict[tuple[str, str], set[float]] = {}
    for run in runs:
        if run.turns:
            fed.setdefault((run.instance_id, run.rest), set()).add(run.turns[0].get("fed", 0))
    return sorted({instance for (instance, _), counts in fed.items() if len(counts) > 1})


def _total(runs: Iterable[Run], name: str) -> float | None:
    return mean(run.totals.get(name, 0) for run in runs)


def _most(runs: Iterable[Run], name: str) -> float | None:
    return mean(max(turn.get(name, 0) for turn in run.turns) for run in runs if run.turns)


def _counts(words: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(words).items()))
