"""The README's table of methods names every preset, and is what the bench measured last."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from cache import preset, preset_names

ROOT = Path(__file__).parent.parent


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import method_table

    return method_table


@pytest.fixture
def readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def presets() -> list[str]:
    """Those of this package: other tests register methods of their own."""
    return [name for name in preset_names() if type(preset(name)).__module__.startswith("cache.")]


def rows(text: str) -> dict[str, list[str]]:
    """By the name in the first cell: cells of a Markdown table's rows."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len({cells[0] for cells in found}) == len(found), "a name has two rows"
    return {cells[0].strip("`"): cells for cells in found}


def table_of(bench: ModuleType, readme: str) -> str:
    _, _, rest = readme.partition(bench.BEGIN)
    table, end, _ = rest.partition(bench.END)
    assert end
    return table.strip()


def test_every_preset_has_a_row(bench: ModuleType, readme: str) -> None:
    shown = rows(table_of(bench, readme))
    assert set(shown) == {name for name in presets() if not name.endswith("-paper")}
    for name, cells in shown.items():
        assert cells[1] == bench.SUMMARIES[name], name
        assert cells[2] == ("block" if preset(name).block_size > 1 else "token"), name
        assert all(cell and "?" not in cell for cell in cells), name


def test_the_presets_of_the_paper_are_those_of_the_rows(bench: ModuleType, readme: str) -> None:
    """They have no rows; the text below the table says what they are."""
    shown = rows(table_of(bench, readme))
    paper = {name.removesuffix("-paper") for name in presets() if name.endswith("-paper")}
    assert paper == set(shown) - {"dense"}
    assert "`NAME-paper`" in readme


def test_the_numbers_are_those_of_the_results_file(bench: ModuleType, readme: str) -> None:
    results = (ROOT / "benchmarks" / "results" / "method_table.md").read_text(encoding="utf-8")
    assert table_of(bench, readme) in results
    assert "Broken off" not in results


def test_a_new_table_takes_the_place_of_the_old_one(bench: ModuleType, readme: str) -> None:
    changed = bench.replace_in_readme(readme, "| `new` |")
    assert table_of(bench, changed) == "| `new` |"
    assert bench.replace_in_readme(changed, table_of(bench, readme)) == readme
    with pytest.raises(ValueError, match="markers"):
        bench.replace_in_readme(readme.replace(bench.END, ""), "")
