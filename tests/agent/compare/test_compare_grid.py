"""Cells from YAML and from flags: which there are, what they are called, what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.compare import grid as grid_module
from agent.compare.grid import SAME_PROMPT, Cell, Grid, GridError, read_grid
from cache import preset

GRIDS = Path(__file__).parents[3] / "benchmarks" / "grids"


@dataclass(frozen=True)
class Entry:
    instance_id: str
    digest: str = "d"


Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(text: str) -> Path:
        file = tmp_path / "grid.yaml"
        file.write_text(text)
        return file

    return written


def names(grid: Grid) -> list[str]:
    return [cell.name for cell in grid.cells()]


def test_names_of_cells_from_flags() -> None:
    grid = read_grid(
        None,
        {
            "methods": ("dense", "nexus"),
            "protocols": ("true_eviction",),
            "scopes": ("prefill", "prefill+decode"),
            "densities": (0.2,),
            "budgets": (768,),
            "seeds": (0, 1),
        },
    )
    assert names(grid) == [
        "dense/true_eviction/s0",
        "dense/true_eviction/s1",
        "nexus/true_eviction/prefill/d0.2/s0",
        "nexus/true_eviction/prefill/d0.2/s1",
        "nexus/true_eviction/prefill/b768/s0",
        "nexus/true_eviction/prefill/b768/s1",
        "nexus/true_eviction/prefill+decode/d0.2/s0",
        "nexus/true_eviction/prefill+decode/d0.2/s1",
        "nexus/true_eviction/prefill+decode/b768/s0",
        "nexus/true_eviction/prefill+decode/b768/s1",
    ]


def test_without_a_size_the_papers_density_is_taken_and_a_budget_stands_alone() -> None:
    base = {"methods": ("nexus",), "protocols": ("full_context",)}
    assert names(read_grid(None, base)) == ["nexus/full_context/prefill+decode/d0.2/s0"]
    sized = read_grid(None, {**base, "budgets": (512,)})
    assert names(sized) == ["nexus/full_context/prefill+decode/b512/s0"]


axes = st.fixed_dictionaries(
    {
        "methods": st.lists(
            st.sampled_from(["dense", "nexus", "snapkv", "h2o", "random"]), min_size=1, unique=True
        ),
        "protocols": st.lists(
            st.sampled_from(["true_eviction", "full_context"]), min_size=1, unique=True
        ),
        "scopes": st.lists(st.sampled_from(["prefill", "prefill+decode"]), min_size=1, unique=True),
        "densities": st.lists(st.floats(0.01, 1), max_size=3, unique=True),
        "budgets": st.lists(st.integers(1, 9000), max_size=3, unique=True),
        "seeds": st.lists(st.integers(0, 99), min_size=1, max_size=3, unique=True),
    }
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(axes)
def test_every_combination_once_and_dense_once_for_each_protocol_and_seed(
    axes: dict[str, list[Any]],
) -> None:
    cells = read_grid(None, axes).cells()
    sizes = max(1, len(axes["densities"]) + len(axes["budgets"]))
    runs = len(axes["protocols"]) * len(axes["seeds"])
    evicting = [method for method in axes["methods"] if method != "dense"]
    dense = "dense" in axes["methods"]
    assert len(cells) == runs * (len(evicting) * len(axes["scopes"]) * sizes + dense)
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in cells:
        if cell.method == "dense":
            assert (cell.scope, cell.budget, cell.density) == (None, None, None)
        else:
            assert (cell.budget is None) != (cell.density is None)
    combined = {(c.method, c.protocol, c.scope, c.seed) for c in cells if c.method != "dense"}
    assert combined == set(
        itertools.product(evicting, axes["protocols"], axes["scopes"], axes["seeds"])
    )


def test_parts_take_the_files_axes_but_for_their_own(write: Write) -> None:
    file = write(
        """
        protocols: [true_eviction]
        seeds: [3]
        parts:
          - {scopes: [prefill], methods: [dense, snapkv]}
          - {scopes: [prefill+decode], methods: [dense, h2o], densities: [0.5]}
        """
    )
    assert names(read_grid(file, {})) == [
        "dense/true_eviction/s3",
        "snapkv/true_eviction/prefill/d0.2/s3",
        "h2o/true_eviction/prefill+decode/d0.5/s3",
    ]
    flags = read_grid(file, {"budgets": (64,), "seeds": (1,)})
    assert names(flags) == [
        "dense/true_eviction/s1",
        "snapkv/true_eviction/prefill/b64/s1",
        "h2o/true_eviction/prefill+decode/b64/s1",
    ]


def test_flags_lie_over_the_files_options(write: Write) -> None:
    file = write("options: {model: a, chunk: 64, overrides: [limits.steps=3]}\nids: [x]")
    grid = read_grid(
        file, {"options": {"model": "b", "overrides": ("limits.steps=9",)}, "tasks": "t.jsonl"}
    )
    assert grid.options["model"] == "b"
    assert grid.options["chunk"] == 64
    assert tuple(grid.options["overrides"]) == ("limits.steps=3", "limits.steps=9")
    assert (grid.tasks, grid.ids) == ("t.jsonl", ("x",))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("method: [nexus]", "there is no 'method'; did you mean 'methods'?"),
        ("parts: [{density: [0.2]}]", "part 1: there is no 'density'; did you mean 'densities'?"),
        ("options: {modle: x}", "there is no 'modle'; did you mean 'model'?"),
        ("options: {budget: 9}", "there is no 'budget'"),
        ("options: {overrides: limits.steps=2}", "overrides must be a list"),
        ("scopes: [decode]", "scopes.0: Input should be 'prefill' or 'prefill+decode'"),
        ("densities: [1.5]", "densities.0: Input should be less than or equal to 1"),
        ("budgets: [0]", "budgets.0: Input should be greater than or equal to 1"),
        ("seeds: [-1]", "seeds.0"),
        ("methods: [nexus, nexus]", "methods: nexus is there twice"),
        ("methods: []", "methods: Tuple should have at least 1 item"),
        ("methods: nexus", "methods: Input should be a valid tuple"),
        ("parts: [7]", "parts.0"),
        ("[1, 2]", "must be a mapping, not list"),
        ("a: [", "no valid YAML"),
    ],
)
def test_what_a_grid_cannot_say_is_refused_by_name(write: Write, text: str, said: str) -> None:
    with pytest.raises(GridError) as error:
        read_grid(write(text), {}).cells()
    assert said in str(error.value)
    assert "grid" in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(GridError, match=r"nothing\.yaml cannot be read"):
        read_grid(tmp_path / "nothing.yaml", {})


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            {"methods": ("dense", "nexsu")},
            "cell nexsu/true_eviction/prefill+decode/d0.2/s0: unknown",
        ),
        ({"options": {"dtype": 7}}, "s0: --dtype"),
        (
            {"options": {"overrides": ["cache.windw=3"]}},
            "cell nexus/true_eviction/prefill+decode/d0.2/s0: windw: Extra inputs",
        ),
        (
            {"options": {"overrides": ["limits.stepz=3"]}},
            "cell dense/true_eviction/s0: tool set 'compact': limits.stepz",
        ),
        (
            {"cache": {"h2o": {"recent_shar": 1}}},
            "h2o/true_eviction/prefill+decode/d0.2/s0: recent",
        ),
        ({"cache": {"snapkv": {"window": 8}}}, "cache: 'snapkv' is no method of this grid"),
        ({"cache": {"dense": {"block_size": 8}}}, "cache: 'dense' is no method of this grid"),
    ],
)
def test_a_cell_that_no_run_can_have_is_refused(data: dict[str, Any], said: str) -> None:
    grid = Grid.model_validate({"methods": ("dense", "nexus", "h2o"), **data})
    with pytest.raises(GridError) as error:
        grid.check()
    assert said in str(error.value)


def test_options_of_cells_differ_in_the_cell_alone() -> None:
    grid = Grid(
        methods=("dense", "nexus", "snapkv"),
        budgets=(768,),
        options={"model": "m", "overrides": ("limits.steps=8", "cache.sinks=2")},
        cache={"snapkv": {"pooling": "avg"}},
    )
    grid.check()
    own = set(Cell.model_fields) | {"prefill_eviction", "overrides"}
    seen = []
    for cell in grid.cells():
        options = grid.run_options(cell)
        assert all(getattr(options, name) == value for name, value in cell)
        assert SAME_PROMPT in options.overrides  # or a small budget would cut the prompt
        assert "limits.steps=8" in options.overrides
        dense = cell.method == "dense"
        assert options.prefill_eviction == (None if dense else "end")
        config = preset(cell.method, **options.cache_data(cell.seed))
        assert getattr(config, "sinks", None) == (None if dense else 2)
        assert getattr(config, "pooling", None) == ("avg" if cell.method == "snapkv" else None)
        seen.append(options.model_dump(exclude=own))
    assert all(other == seen[0] for other in seen)


def test_what_the_user_says_of_prompt_and_schedule_holds() -> None:
    said = {"prefill_eviction": "chunk", "overrides": ("context.share=0.5",)}
    cell = Cell(method="nexus", protocol="true_eviction", budget=768)
    options = Grid(options=said).run_options(cell)
    assert options.prefill_eviction == "chunk"
    assert options.settings().context.share == 0.5
    assert Grid().run_options(cell).settings().context.share == 1000


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `auto` comes to, without asking the machine."""

    def settled(options: Any) -> Any:
        return options.model_copy(
            update={"sandbox": "bubblewrap", "device": "cpu", "dtype": "int8"}
        )

    monkeypatch.setattr(grid_module, "settled", settled)
    monkeypatch.setattr(grid_module, "config_digest", lambda options: options.method)


def test_items_are_entries_by_cells_seed_by_seed(here: None) -> None:
    entries = [Entry("a"), Entry("b")]
    grid = Grid(methods=("dense", "nexus"), protocols=("true_eviction",), seeds=(5, 6))
    items = grid.items(entries, "pairs")
    assert [(item.seed, item.instance_id, item.options["method"]) for item in items] == [
        (seed, name, method)
        for seed in (5, 6)
        for name in ("a", "b")
        for method in ("dense", "nexus")
    ]
    assert len({item.key for item in items}) == 8
    first = items[0]
    assert first.cell == "dense/true_eviction/s5"
    assert (first.source, first.digest, first.config, first.attempt) == ("pairs", "d", "dense", 1)
    assert first.options["sandbox"] == "bubblewrap"
    assert first.options["dtype"] == "int8"
    assert first.run_options().cache_data(5) == {}


@pytest.mark.parametrize("file", sorted(GRIDS.glob("*.yaml")), ids=lambda file: file.stem)
def test_the_grids_that_come_with_the_repository_can_be_run(file: Path) -> None:
    grid = read_grid(file, {})
    grid.check()
    assert len(grid.cells()) >= 8


def test_the_papers_grid_has_a_cell_for_each_number_of_its_table() -> None:
    from agent.compare.paper import paper

    cells = read_grid(GRIDS / "paper_agentic.yaml", {}).cells()
    found = {(cell.scope, cell.protocol, cell.method.removesuffix("-paper")) for cell in cells}
    wanted = {
        (None if row["method"] == "dense" else row["scope"], row["protocol"], row["method"])
        for row in paper().rows
    }
    assert found == wanted
