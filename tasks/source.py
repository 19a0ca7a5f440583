"""Where instances come from: the package's own pairs, a file, or a data set of the hub.

Whatever the source, an instance is an `Entry`. Which kind it is follows from the fields of its row.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from tasks.instance import SandboxOpener, Task, TaskError
from tasks.rows import Row, read_rows
from tasks.swe_bench_rows import ID_PATTERN

PAIRS = "pairs"  # the source that comes with the package

Kind = Literal["release_pair", "swe_bench", "r2e_gym", "made"]
# fields by which a row is known, in the order in which they are looked for
MARKS: Mapping[Kind, tuple[str, ...]] = {
    "made": ("made_from",),
    "release_pair": ("sdist_old", "sdist_new"),
    "r2e_gym": ("docker_image", "expected_output_json"),
    "swe_bench": ("instance_id", "FAIL_TO_PASS", "problem_statement"),
}
_MODELS: Mapping[Kind, str] = {
    "made": "tasks.made:MadeRow",
    "release_pair": "tasks.release_pair:ReleasePair",
    "r2e_gym": "tasks.r2e_gym:R2eRow",
    "swe_bench": "tasks.swe_bench_rows:SweRow",
}
_TASKS: Mapping[Kind, str] = {  # each is called with the row and an opener of sandboxes
    "made": "tasks.made:MadeTask",
    "r2e_gym": "tasks.r2e_gym:R2eTask",
    "swe_bench": "tasks.swe_bench:SweBenchTask",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One instance of a source, whatever its kind."""

    instance_id: str
    kind: Kind
    title: str
    repo: str
    problem: str
    digest: str  # sha256 of the row as read: what grading depends on
    row: BaseModel = field(repr=False, compare=False)  # all of it; never to be shown to an agent
    _task: Callable[[SandboxOpener | None], Task] = field(repr=False, compare=False)
    _reference: Callable[[], bytes] = field(repr=False, compare=False)

    def task(self, open_sandbox: SandboxOpener | None = None) -> Task:
        """The task, ready to be worked on; `open_sandbox` opens the sandbox of its grading."""
        return self._task(open_sandbox)

    def reference_patch(self) -> bytes:
        """The known fix, for validation. Never to be shown to an agent. TaskError without one."""
        patch = self._reference()
        if not patch.strip():
            raise TaskError(f"{self.instance_id}: its row holds no reference patch")
        return patch


@dataclass(frozen=True, slots=True)
class TaskSource:
    """The instances of a source, in its order."""

    name: str
    entries: tuple[Entry, ...]
    notes: tuple[str, ...] = ()  # rows left out, and why

    def find(self, instance_id: str) -> Entry:
        """The entry of an id. TaskError names those that are like it."""
        for entry in self.entries:
            if entry.instance_id == instance_id:
                return entry
        raise TaskError(_unknown([instance_id], self.entries))


def open_source(src: str = PAIRS, *, split: str = "test", only: Collection[str] = ()) -> TaskSource:
    """Read a source: `pairs`, a .json, .jsonl or .parquet file, a folder of such files, or a data
    set of the hub as `owner/name`, `owner/name@revision` or `owner/name:split`.

    `split` says which files of a folder or data set are meant. `only` passes over all rows with
    other ids, which is faster where a few of a large source are needed. Raises TaskError, which
    names file and row.
    """
    kind: Kind | None = None
    first = ""
    rows: list[tuple[str, BaseModel]] = []
    places: dict[str, str] = {}
    notes: list[str] = []
    for item in _pairs() if src == PAIRS else read_rows(src, split):
        place, row = item.place, item.fields
        found = _kind(place, row)
        kind, first = kind or found, first or place
        if found != kind:
            raise TaskError(
                f"{place} is a row of kind {found}, but {first} is of kind {kind}; "
                "a source holds rows of one kind"
            )
        name = _id(kind, row)
        if not isinstance(name, str) or not re.fullmatch(ID_PATTERN, name):
            raise TaskError(
                f"{place}: {name!r} is no instance id; it names folders, so it takes letters, "
                "digits and . _ + - only"
            )
        if name in places:
            raise TaskError(f"{place} has the same id as {places[name]}: {name}")
        places[name] = place
        if only and name not in only and kind != "release_pair":  # pairs share an environment
            continue
        if kind == "made":  # its other files lie beside
            row = {**row, "folder": item.folder}
        model = _parsed(kind, place, row)
        if unfit := _unfit(model):
            notes.append(f"{name} is left out: {unfit}")
        else:
            rows.append((name, model))
    if kind is None:
        raise TaskError(f"{src} holds no instances")
    models = [model for _, model in rows]
    make = _pair_entry if kind == "release_pair" else partial(_row_entry, kind)
    chosen = [(name, model) for name, model in rows if not only or name in only]
    return TaskSource(src, tuple(make(name, model, models) for name, model in chosen), tuple(notes))


def select(
    entries: Iterable[Entry],
    *,
    ids: Iterable[str] = (),
    filter: str = "",
    shuffle: bool = False,
    seed: int = 0,
    slice: str = "",
) -> list[Entry]:
    """Some of the entries: those with these ids, of them those whose id the pattern `filter` is
    found in, of them (shuffled or as they are) those of the `slice` START:STOP[:STEP].

    Which order a seed gives depends on the ids alone. TaskError says what does not fit.
    """
    chosen = list(entries)
    wanted = list(dict.fromkeys(ids))
    if wanted:
        known = {entry.instance_id for entry in chosen}
        if missing := [name for name in wanted if name not in known]:
            raise TaskError(_unknown(missing, chosen))
        chosen = [entry for entry in chosen if entry.instance_id in wanted]
    if filter:
        try:
            pattern = re.compile(filter)
        except re.error as error:
            raise TaskError(f"{filter!r} is no regular expression: {error}") from error
        chosen = [entry for entry in chosen if pattern.search(entry.instance_id)]
        if not chosen:
            raise TaskError(f"no instance id matches {filter!r}")
    if shuffle:
        chosen.sort(key=lambda entry: _sum(f"{seed}:{entry.instance_id}"))
    if slice:
        left = chosen[_slice(slice)]
        if not left:
            raise TaskError(f"{slice!r} leaves none of {len(chosen)} instances")
        chosen = left
    return chosen


def _slice(text: str) -> slice:
    if not re.fullmatch(r"(-?\d+)?:(-?\d+)?(:\d+)?", text) or text.endswith(":0"):
        raise TaskError(
            f"{text!r} is no slice; write START:STOP or START:STOP:STEP, each may be left out "
            "(0:10 takes the first ten)"
        )
    return slice(*(int(part) if part else None for part in text.split(":")))


def canonical(model: BaseModel) -> str:
    """A row as text that does not depend on the order of its fields or on how the file wrote it.

    Fields at their default are left out, so that a field added later changes no old row's text.
    """
    data = model.model_dump(mode="json", exclude_defaults=True)
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def _unknown(missing: Sequence[str], entries: Sequence[Entry]) -> str:
    known = [entry.instance_id for entry in entries]
    close = [name for id_ in missing for name in difflib.get_close_matches(id_, known, 3, 0.5)]
    shown = list(dict.fromkeys(close)) or known[:5]
    what = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
    return f"no such instance: {what}; of {len(known)} there are for example {', '.join(shown)}"


def _pairs() -> Iterator[Row]:
    from tasks import release_pair

    for number, pair in enumerate(release_pair.read(), 1):
        yield Row(f"pairs, row {number}", pair.model_dump(), Path())


def _kind(place: str, row: Mapping[str, Any]) -> Kind:
    for kind, marks in MARKS.items():
        if all(mark in row or mark.lower() in row for mark in marks):
            return kind
    wanted = "; ".join(f"{kind}: {', '.join(marks)}" for kind, marks in MARKS.items())
    has = ", ".join(list(row)[:12]) or "no fields"
    raise TaskError(f"{place} is no instance of a known kind ({wanted}); it has {has}")


def _id(kind: Kind, row: Mapping[str, Any]) -> Any:
    if kind == "r2e_gym" and "instance_id" not in row:
        return f"{row.get('repo_name')}__{row.get('commit_hash')}"
    return row.get("instance_id")


def _parsed(kind: Kind, place: str, row: Mapping[str, Any]) -> BaseModel:
    try:
        model = _model(kind).model_validate(row)
        if kind == "release_pair":
            # a release pair by its kind
            _ = model.old, model.new  # type: ignore[attr-defined]
        return model
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the row"
        raise TaskError(f"{place} is no row of kind {kind}: {where}: {first['msg']}") from error


def _model(kind: Kind) -> type[BaseModel]:
    model: type[BaseModel] = _load(_MODELS[kind])
    return model


def _load(place: str) -> Any:
    """What `module:name` is; modules are imported for the kinds that are there only."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def _unfit(model: Any) -> str:
    """Why a row can say nothing about any patch; empty if it can."""
    if hasattr(model, "expected"):
        return "" if model.expected else "it expects no test result"
    return "" if model.fail_to_pass else "no test has to be fixed (FAIL_TO_PASS is empty)"


def _pair_entry(name: str, pair: Any, pairs: Sequence[BaseModel]) -> Entry:
    from tasks import release_pair

    return Entry(
        name,
        "release_pair",
        pair.issue_title,
        pair.package,
        f"{pair.issue_title}\n\n{pair.issue_text}",
        _sum(canonical(pair)),
        pair,
        # all of them are release pairs: the source has one kind
        lambda opener: release_pair.task_of(pair, pairs, open_sandbox=opener),  # type: ignore[arg-type]
        partial(release_pair.reference_of, pair),
    )


def _row_entry(kind: Kind, name: str, row: Any, _: Sequence[BaseModel]) -> Entry:
    """An entry of a row that holds its reference in the field `patch`."""
    problem = row.problem if kind == "r2e_gym" else row.problem_statement

    def task(open_sandbox: SandboxOpener | None) -> Task:
        made: Task = _load(_TASKS[kind])(row, open_sandbox or _opener())
        return made

    return Entry(
        name,
        kind,
        _title(problem),
        row.repo_name if kind == "r2e_gym" else row.repo,
        problem,
        _sum(canonical(row)),
        row,
        task,
        lambda: row.patch.encode("utf-8", "surrogateescape"),
    )


def _title(problem: str) -> str:
    """The first line of an issue that says something, without Markdown's marks."""
    lines = (line.replace("**", "").strip(" \t\r#`") for line in problem.splitlines())
    return next((line.removeprefix("Title:").strip() for line in lines if line), "")


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _opener() -> SandboxOpener:
    from environments import open_sandbox

    return open_sandbox
