"""`agent compare` from flags to files, with an engine that makes its results up."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import made_engine
import pytest
import typer
from click.testing import Result
from made_results import plain_item, result
from typer.testing import CliRunner

from agent.batch.item import Item
from agent.batch.store import Store
from agent.cli_compare import compare
from agent.compare import grid as grid_module
from agent.run_options import RunOptions

HERE = Path(__file__).parent
app = typer.Typer()
app.command()(compare)
TASKS = ("--ids", "tinydb-4.8.2,cachetools-7.1.8")
SMALL = (*TASKS, "--methods", "dense,nexus", "--protocols", "true_eviction", "--budgets", "768")
Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command; what it asks of this machine has a fixed answer."""
    made_engine.reset()
    settled = {"sandbox": "bubblewrap", "device": "cpu", "dtype": "int8"}
    monkeypatch.setattr(grid_module, "settled", lambda o: o.model_copy(update=settled))
    monkeypatch.setattr(grid_module, "config_digest", lambda options: options.method)

    def called(*words: object, plots: bool = False) -> Result:
        engine = ("--engine", "made_engine:Engine", "--work", "made_engine:work")
        drawn = () if plots else ("--no-plots",)
        return CliRunner().invoke(app, [*map(str, words), *engine, *drawn])

    return called


def table(folder: Path) -> dict[str, dict[str, str]]:
    with (folder / "comparison.csv").open() as file:
        return {row["configuration"]: row for row in csv.DictReader(file)}


def test_dry_run_shows_cells_and_counts_and_makes_nothing(run: Run, tmp_path: Path) -> None:
    said = run(*SMALL, "--seeds", "0,1", "--dry-run")
    assert said.exit_code == 0, said.output
    assert said.stdout.splitlines() == [
        "dense/true_eviction/s0",
        "nexus/true_eviction/prefill+decode/b768/s0",
        "dense/true_eviction/s1",
        "nexus/true_eviction/prefill+decode/b768/s1",
        "4 cells x 2 instances = 8 runs",
    ]
    again = run(*SMALL, "--dry-run", "--out", tmp_path / "none")
    assert "= 4 runs, 0 of them finished" in again.stdout
    assert made_engine.calls == []
    assert list(tmp_path.iterdir()) == []


def test_it_runs_compares_and_writes(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "cmp"
    said = run(*SMALL, "--out", out, "--steps", "8", plots=True)
    assert said.exit_code == 0, said.output
    names = [name for _, name in made_engine.calls]
    assert len(names) == 4
    assert (names[0], names[2]) == (names[1], names[3])  # so that a stop leaves pairs
    rows = table(out)
    assert rows["dense/true_eviction"]["resolved"] == "2"
    nexus = rows["nexus/true_eviction/prefill+decode/b768"]
    assert (nexus["resolved"], nexus["vs_dense_only_other"]) == ("1", "1")
    report = json.loads((out / "report.json").read_text())
    assert report["tasks"] == "pairs"
    assert report["cells"] == ["dense/true_eviction/s0", nexus["configuration"] + "/s0"]
    assert report["seeds"] == [0]
    assert report["grid"]["options"]["overrides"] == ["limits.steps=8"]
    session = report["sessions"][0]
    assert session["options"]["model"] == "qwen2.5-coder-1.5b"
    assert {"versions", "git_commit", "hardware", "argv"} <= set(session)
    assert session["hardware"]["cores"]
    assert {path.name for path in out.glob("*.png")} == {
        "resolved.png",
        "seconds_per_turn.png",
        "resident.png",
    }
    assert "1 of 2" in said.stdout
    assert "comparison.md" in said.stdout
    predictions = sorted(path.name for path in out.glob("predictions.*.jsonl"))
    assert len(predictions) == 2


def test_it_goes_on_with_the_folder_alone_and_can_be_extended(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "cmp"
    made_engine.stop_after.append(3)
    said = run(*SMALL, "--out", out, "--temperature", "0.3")
    assert said.exit_code == 130
    assert "The same command goes on from here." in said.output
    assert "incomplete: 1 of 2 runs are missing" in (out / "comparison.md").read_text()
    made_engine.stop_after.clear()
    assert run("--out", out).exit_code == 0
    assert len(made_engine.calls) == len(set(made_engine.calls)) == 4
    assert table(out)["dense/true_eviction"]["finished"] == "2"
    assert run("--out", out).exit_code == 0
    assert len(made_engine.calls) == 4  # nothing is left
    assert run("--out", out, "--seeds", "0,1").exit_code == 0
    assert len(made_engine.calls) == len(set(made_engine.calls)) == 8
    dense = table(out)["dense/true_eviction"]
    assert (dense["seeds"], dense["graded"], dense["interval"]) == (
        "0 1",
        "4",
        "wilson over instances",
    )
    assert dense["turns"] == "2.5"
    stored = [found["item"]["options"]["temperature"] for found in Store(out).results()]
    assert stored == [0.3] * 8


def test_the_folder_remembers_which_instances_were_chosen(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "cmp"
    run("--slice", "1:3", *SMALL[2:], "--out", out)
    chosen = {name for _, name in made_engine.calls}
    assert len(chosen) == 2
    run("--out", out, "--seeds", "1")
    assert len(made_engine.calls) == 8
    assert {name for _, name in made_engine.calls} == chosen


def test_stopped_before_the_first_result(run: Run, tmp_path: Path) -> None:
    made_engine.stop_after.append(0)
    said = run(*SMALL, "--out", tmp_path / "cmp")
    assert said.exit_code == 130
    assert "interrupted" in said.output


def test_errors_are_said_and_tried_again(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "cmp"
    made_engine.errors.add("tinydb-4.8.2")
    said = run(*SMALL, "--out", out)
    assert said.exit_code == 1
    assert "1 run ended in an error of the infrastructure" in (out / "comparison.md").read_text()
    assert table(out)["dense/true_eviction"]["errors"] == "1"
    made_engine.errors.clear()
    assert run("--out", out).exit_code == 0
    assert len(made_engine.calls) == 6  # those with errors once more
    assert table(out)["dense/true_eviction"]["errors"] == "0"


def test_another_grid_in_the_same_folder_does_not_count_the_old_one(
    run: Run, tmp_path: Path
) -> None:
    out = tmp_path / "cmp"
    run(*SMALL, "--out", out)
    said = run("--out", out, "--budgets", "512")
    assert said.exit_code == 0
    assert len(made_engine.calls) == 6  # dense is the same
    assert list(table(out)) == ["dense/true_eviction", "nexus/true_eviction/prefill+decode/b512"]
    assert "2 results in the folder are of other options" in (out / "comparison.md").read_text()


def test_a_grid_file_names_tasks_and_flags_win(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text(
        "ids: [tinydb-4.8.2]\nmethods: [dense, h2o]\nbudgets: [512]\n"
        "options: {temperature: 0}\ncache: {h2o: {recent_share: 0.2}}\n"
    )
    out = tmp_path / "cmp"
    assert run("--grid", file, "--out", out, "--protocols", "full_context").exit_code == 0
    assert made_engine.calls == [
        ("dense/full_context/s0", "tinydb-4.8.2"),
        ("h2o/full_context/prefill+decode/b512/s0", "tinydb-4.8.2"),
    ]
    asked = [found["item"]["options"] for found in Store(out).results()]
    assert [options["temperature"] for options in asked] == [0, 0]
    assert ["cache.recent_share=0.2" in options["overrides"] for options in asked] == [False, True]


def test_report_alone_reads_a_folder_and_runs_nothing(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "cmp"
    run(*SMALL, "--out", out)
    (out / "comparison.csv").unlink()
    calls = len(made_engine.calls)
    said = run("--report", out, "--json")
    assert said.exit_code == 0, said.output
    assert json.loads(said.stdout)["rows"][0]["resolved"] == 2
    assert table(out)["dense/true_eviction"]["resolved"] == "2"
    assert len(made_engine.calls) == calls


def test_report_of_an_eval_folder_leaves_its_report_alone(run: Run, tmp_path: Path) -> None:
    store = Store(tmp_path / "eval")
    with store.lock():
        store.note_session({"command": "eval"})
        store.report({"theirs": True})
        for method in ("dense", "nexus"):
            options = RunOptions(instance="any", method=method, seed=0)
            for name in "ab":
                item = plain_item(options, name)
                store.write(item, result(item, method == "dense"))
    said = run("--report", store.folder)
    assert said.exit_code == 0, said.output
    assert table(store.folder)["nexus/true_eviction"]["vs_dense_only_other"] == "2"
    assert json.loads((store.folder / "report.json").read_text()) == {"theirs": True}
    assert (store.folder / "comparison.json").is_file()


def test_without_matplotlib_tables_are_written_and_it_says_so(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    said = run(*SMALL, "--out", tmp_path / "cmp", plots=True)
    assert said.exit_code == 0
    assert "pip install 'nexus-agent[plots]'" in said.stderr
    assert table(tmp_path / "cmp")
    assert not list((tmp_path / "cmp").glob("*.png"))


def test_the_report_names_models_and_full_configs(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "cmp"
    run(*SMALL, "--out", out)
    store = Store(out)
    for number, found in enumerate(store.results()):
        item = Item.model_validate(found["item"])
        data = {"model": {"name": "m", "sha256": "1" if number else "0"}, "cache": {"sinks": 2}}
        (store.folder_of(item) / "report.json").write_text(json.dumps(data))
    run("--report", out)
    report = json.loads((out / "report.json").read_text())
    assert [model["sha256"] for model in report["models"]] == ["0", "1"]
    assert set(report["caches"]) == set(report["cells"])
    assert all(config["sinks"] == 2 for config in report["caches"].values())
    assert any("different models" in note for note in report["notes"])


def test_the_local_engine_makes_the_runs(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real worker processes; the work is scripted."""
    paths = [str(HERE.parents[2]), str(HERE.parent)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("BATCH_LOG", str(tmp_path / "log"))
    out = tmp_path / "cmp"
    words = (*SMALL, "--out", str(out), "--no-plots", "--work", "batch_work:run_item")
    said = CliRunner().invoke(app, list(words))
    assert said.exit_code == 0, said.output
    assert {name: row["resolved"] for name, row in table(out).items()} == {
        "dense/true_eviction": "2",
        "nexus/true_eviction/prefill+decode/b768": "2",
    }
    assert table(out)["dense/true_eviction"]["turns"] == "4.0"


def test_times_of_several_machines_are_said_to_be_so(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "cmp"
    made_engine.stop_after.append(2)
    run(*SMALL, "--out", out)
    made_engine.stop_after.clear()
    run("--out", out)
    assert "several machines" not in (out / "comparison.md").read_text()
    run("--out", out, "--workers", "2")
    assert "several machines" in (out / "comparison.md").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*SMALL,), "give --out DIR, or --dry-run"),
        ((*TASKS, "--methods", "nexsu", "--dry-run"), "unknown method 'nexsu'"),
        ((*TASKS, "--budgets", "many", "--dry-run"), "budgets.0: Input should be a valid integer"),
        ((*TASKS, "--scopes", "all", "--dry-run"), "scopes.0"),
        (("--ids", "tinydb-9", "--dry-run"), "no such instance: tinydb-9"),
        (("--tasks", "nowhere.jsonl", "--dry-run"), "nowhere.jsonl"),
        (("--report", "nowhere"), "is no folder of `agent compare` or `agent eval`"),
        (("--report", "nowhere", "--dry-run"), "--report runs nothing; give it alone"),
    ],
)
def test_what_does_not_fit_ends_with_2_and_says_why(run: Run, words: Any, said: str) -> None:
    found = run(*words)
    assert found.exit_code == 2, found.output
    assert said in " ".join(found.output.replace("│", " ").split())


def test_a_folder_of_other_things_is_not_touched(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    found = run(*SMALL, "--out", tmp_path)
    assert found.exit_code == 2
    assert "holds other things" in found.output
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
