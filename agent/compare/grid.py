"""What is compared: the cells of a grid, read from YAML or made from flags, and their runs."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from agent.batch.item import Item, Row, config_digest, make_items, settled
from agent.run_options import RunOptions, parse_options

DENSE = "dense"
# What all cells have in common: options of a run that are no axis of the grid.
COMMON = (
    "model",
    "dtype",
    "device",
    "device_map",
    "quantize",
    "tools",
    "prefill_eviction",
    "chunk",
    "temperature",
    "top_p",
    "sandbox",
    "overrides",
)
# `agent run` fits the first prompt to a token budget. Compared are caches, so all cells get the
# whole of it, whatever their budget.
SAME_PROMPT = "context.share=1000"

Protocol = Literal["true_eviction", "full_context"]
Scope = Literal["prefill", "prefill+decode"]


class GridError(ValueError):
    """A grid that cannot be read, or whose cells no run can have."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Axes(_Strict):
    """Lists whose product is the grid. Every density and every budget is a size of the cache."""

    methods: tuple[str, ...] = Field((DENSE, "nexus", "h2o", "morphkv"), min_length=1)
    protocols: tuple[Protocol, ...] = Field(("true_eviction", "full_context"), min_length=1)
    scopes: tuple[Scope, ...] = Field(("prefill+decode",), min_length=1)
    densities: tuple[Annotated[float, Field(gt=0, le=1)], ...] = ()
    budgets: tuple[Annotated[int, Field(ge=1)], ...] = ()
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field((0,), min_length=1)

    @field_validator("*")
    @classmethod
    def _each_once(cls, value: Any) -> Any:
        if isinstance(value, tuple):
            for item in value:
                if isinstance(item, str | int | float) and value.count(item) > 1:
                    raise ValueError(f"{item} is there twice")
        return value

    @property
    def sizes(self) -> tuple[tuple[int | None, float | None], ...]:
        """(budget, density) of each size; the paper's 20 % where none is given."""
        densities = self.densities if self.densities or self.budgets else (0.2,)
        return (*((None, share) for share in densities), *((size, None) for size in self.budgets))


class Grid(Axes):
    """A comparison: its axes, the tasks, and the options that all cells share.

    `parts` are grids in the grid: each takes the file's axes but for those it names itself. So
    methods that belong to one scope can be listed under it. `cache` has fields of a method's own
    config, by method: `{h2o: {recent_share: 0.2}}`; what all methods have goes into `options`, as
    overrides.
    """

    tasks: str = "pairs"
    ids: tuple[str, ...] = ()
    options: dict[str, Any] = Field(default_factory=dict)
    cache: dict[str, dict[str, Any]] = Field(default_factory=dict)
    parts: tuple[dict[str, Any], ...] = ()

    @field_validator("options")
    @classmethod
    def _known(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if name not in COMMON:
                raise ValueError(unknown_key(name, COMMON))
        if not isinstance(value.get("overrides", []), list | tuple):
            raise ValueError("overrides must be a list of key=value")
        return value

    def axes(self) -> Iterator[Axes]:
        """Axes of each part; the grid's own where it has no parts. Raises GridError."""
        own = {name: getattr(self, name) for name in Axes.model_fields}
        for number, part in enumerate(self.parts, 1):
            yield _checked(Axes, {**own, **part}, f"part {number}")
        if not self.parts:
            yield Axes.model_validate(own)

    def cells(self) -> tuple[Cell, ...]:
        """The cells, by protocol, scope, size, method and seed, each once. Raises GridError."""
        found: dict[str, Cell] = {}
        for axes in self.axes():
            for cell in _product(axes):
                found.setdefault(cell.name, cell)
        return tuple(found.values())

    def run_options(self, cell: Cell, changes: Mapping[str, Any] | None = None) -> RunOptions:
        """Options of a cell's runs; `changes` lie over the grid's. Raises OptionError."""
        values = {
            "prefill_eviction": "end",
            **self.options,
            **(changes or {}),
            **cell.model_dump(),
        }
        own = self.cache.get(cell.method, {})
        overrides = (
            SAME_PROMPT,
            *values.get("overrides", ()),
            *(f"cache.{name}={json.dumps(value)}" for name, value in own.items()),
        )
        if cell.method == DENSE:  # which has none of the settings of eviction
            values["prefill_eviction"] = None
            overrides = tuple(item for item in overrides if not item.strip().startswith("cache."))
        # The instance is the run's own; options without one would be the demo's.
        return parse_options({**values, "instance": "any", "overrides": overrides})

    def check(self) -> None:
        """Raise GridError for the first cell that no run can have: before hours of others."""
        from cache import preset  # brings torch

        cells = self.cells()
        for method in self.cache:
            if method == DENSE or all(cell.method != method for cell in cells):
                there = ", ".join(dict.fromkeys(cell.method for cell in cells))
                raise GridError(
                    f"cache: {method!r} is no method of this grid that evicts ({there})"
                )
        for cell in cells:
            try:
                preset(cell.method, **self.run_options(cell).cache_data(cell.seed))
            except ValidationError as error:
                first = error.errors()[0]
                field = ".".join(str(part) for part in first["loc"] if part != cell.method)
                raise GridError(f"cell {cell.name}: {field}: {first['msg']}") from error
            except ValueError as error:  # OptionError is one
                raise GridError(f"cell {cell.name}: {error}") from error

    def items(self, entries: Iterable[Row], source: str) -> list[Item]:
        """The runs: each entry in each cell, by seed and then by entry.

        So whenever it is stopped, what is there was done under (nearly) all configurations. Raises
        OptionError, ModelError and SandboxError for what this machine lacks.
        """
        entries, cells = list(entries), self.cells()
        # What `auto` comes to here is the same for all.
        first = settled(self.run_options(cells[0]))
        here = first.model_dump(include={"sandbox", "device", "dtype"})
        options = {cell: self.run_options(cell, here) for cell in cells}
        config = {cell: config_digest(options[cell]) for cell in cells}
        return [
            item
            for seed in dict.fromkeys(cell.seed for cell in cells)
            for entry in entries
            for cell in cells
            if cell.seed == seed
            for item in make_items(
                source, [entry], options[cell], cell=cell.name, config=config[cell]
            )
        ]


Model = TypeVar("Model", bound=Axes)


class Cell(_Strict):
    """One configuration and seed. `dense` has no scope and no size."""

    method: str
    protocol: Protocol
    scope: Scope | None = None
    budget: int | None = None
    density: float | None = None
    seed: int = 0

    @property
    def configuration(self) -> str:
        """The name without the seed: what a row of the table is about."""
        parts = [self.method, self.protocol, self.scope]
        if self.density is not None:
            parts.append(f"d{self.density}")
        if self.budget is not None:
            parts.append(f"b{self.budget}")
        return "/".join(part for part in parts if part)

    @property
    def name(self) -> str:
        return f"{self.configuration}/s{self.seed}"


def _product(axes: Axes) -> Iterator[Cell]:
    for protocol in axes.protocols:
        for scope in axes.scopes:
            for budget, density in axes.sizes:
                for method in axes.methods:
                    for seed in axes.seeds:
                        if method == DENSE:
                            yield Cell(method=method, protocol=protocol, seed=seed)
                            continue
                        yield Cell(
                            method=method,
                            protocol=protocol,
                            scope=scope,
                            budget=budget,
                            density=density,
                            seed=seed,
                        )


def read_grid(
    file: Path | None, changes: Mapping[str, Any], base: Mapping[str, Any] | None = None
) -> Grid:
    """The grid of a YAML file (else of `base`, else the default one) with what flags say on top.

    changes: fields of `Grid`. An axis also takes the place of the parts' own, and sizes go
    together: budgets from flags leave no density of the file. `options` are laid over the file's,
    overrides added to its own. Raises GridError.
    """
    data = dict(base or {}) if file is None else _read(file)
    where = "flags" if file is None else str(file)
    changes = dict(changes)
    if "budgets" in changes or "densities" in changes:
        changes = {"budgets": (), "densities": (), **changes}
    parts = data.get("parts")
    if isinstance(parts, list) and all(isinstance(part, dict) for part in parts):
        data["parts"] = [{k: v for k, v in part.items() if k not in changes} for part in parts]
    options, old = changes.pop("options", {}), data.get("options", {})
    if options and isinstance(old, dict):
        both = [*(old.get("overrides") or ()), *options.get("overrides", ())]
        changes["options"] = {**old, **options, "overrides": both}
    return _checked(Grid, {**data, **changes}, where)


def unknown_key(name: str, known: Iterable[str]) -> str:
    """What to say of a key that is not there."""
    known = list(known)
    close = difflib.get_close_matches(name, known, 1)
    meant = f"; did you mean {close[0]!r}?" if close else ""
    return f"there is no {name!r}{meant} (there are: {', '.join(known)})"


def _read(file: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise GridError(f"grid {file} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise GridError(f"grid {file} is no valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise GridError(f"grid {file} must be a mapping, not {type(data).__name__}")
    return data


def _checked(model: type[Model], data: Mapping[str, Any], where: str) -> Model:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "extra_forbidden":
            said = unknown_key(str(first["loc"][0]), model.model_fields)
            raise GridError(f"grid {where}: {said}") from error
        place = ".".join(str(part) for part in first["loc"])
        message = str(first["msg"]).removeprefix("Value error, ")
        raise GridError(f"grid {where}: {place}: {message}") from error
