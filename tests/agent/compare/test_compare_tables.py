"""Tables and plots of one small comparison, down to the letters that a reader sees."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path

import pytest
from made_results import MIB, cell, expected, item, result, turn
from rich.console import Console

from agent.compare.analysis import Analysis, analyse
from agent.compare.grid import Cell
from agent.compare.paper import paper
from agent.compare.plots import PlotsMissing, turn_means, write_plots
from agent.compare.runs import Run, parse
from agent.compare.statistics import Paired
from agent.compare.tables import csv_text, estimate_words, markdown, paired_words, show, write

DENSE, NEXUS, SNAPKV = cell("dense"), cell("nexus"), cell("snapkv")
GROWING = [
    turn(fed=900, resident=910, peak_tokens=910, evictions=0, cache_bytes=9 * MIB),
    turn(fed=80, resident=1000, peak_tokens=1000, evictions=0, peak_bytes=10 * MIB),
    turn(fed=90, resident=1100, evictions=0, prefill_seconds=1.5, eviction_seconds=0.0),
]
FLAT = [
    turn(fed=900, resident=768, peak_tokens=910, evictions=2),
    turn(fed=80, resident=768, peak_tokens=850, evictions=1),
]
IDLE = [turn(fed=900, resident=300, evictions=0)]


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    """dense: a b resolved. nexus: a. snapkv: one failure, one error, one not there."""
    asked = expected([item(c, name) for name in "abc" for c in (DENSE, NEXUS, SNAPKV)])
    results = [
        *(result(item(DENSE, name), name != "c", turns=GROWING) for name in "abc"),
        *(result(item(NEXUS, name), name == "a", turns=FLAT) for name in "abc"),
        result(item(SNAPKV, "a"), False, turns=IDLE),
        result(item(SNAPKV, "b"), error="WorkerDied: killed"),
    ]
    return analyse(map(parse, results), asked)


def test_the_paper_is_table_3_and_is_labelled() -> None:
    table = paper()
    assert (table.n, table.model, table.density) == (50, "DeepSWE-Preview", 0.2)
    assert len(table.rows) == 20
    scope = "prefill+decode"
    for method, protocol, expected_ in (
        ("dense", "true_eviction", 12),
        ("nexus", "true_eviction", 8),
        ("nexus-paper", "full_context", 7),
        ("morphkv", "true_eviction", 9),
        ("h2o", "true_eviction", 4),
        ("snapkv", "true_eviction", None),  # which the paper ran in the other scope
    ):
        sizes = {} if method == "dense" else {"scope": scope, "budget": 768}
        assert table.resolved(cell(method, protocol, **sizes)) == expected_
    pyramid = Cell(method="pyramidkv", protocol="true_eviction", scope="prefill", density=0.2)
    assert table.resolved(pyramid) == 1
    assert "DeepSWE-Preview" in table.label
    assert "SWE-bench" in table.label


def test_markdown_letter_by_letter(analysis: Analysis) -> None:
    lines = [
        " ".join(line.replace("|", " | ").split())
        for line in markdown(analysis, paper()).splitlines()
    ]
    rows = [line for line in lines if line.startswith("|")]
    assert rows[0] == (
        "| configuration | resolved | Pass@1 [95 %] | against dense | against nexus "
        "| paper, of 50* |"
    )
    assert rows[2:5] == [
        "| dense/true_eviction | 2 of 3 | 0.67 [0.21, 0.94] | – | – | 12 |",
        "| nexus/true_eviction/prefill+decode/b768 | 1 of 3 | 0.33 [0.06, 0.79] "
        "| +0 −1, p = 1.000 | – | 8 |",
        "| snapkv/true_eviction/prefill+decode/b768 | 0 of 1 (1 error, 1 missing) "
        "| 0.00 [0.00, 0.79] | +0 −1, p = 1.000 | +0 −1, p = 1.000 | – |",
    ]
    assert rows[5] == (
        "| configuration | turns | tokens fed | peak | peak MiB | resident | resident MiB "
        "| times evicted |"
    )
    assert rows[7:10] == [
        "| dense/true_eviction | 3.0 | 1,070 | 1,000 | 10.0 | 1,100 | 9.0 | 0.0 |",
        "| nexus/true_eviction/prefill+decode/b768 | 2.0 | 980 | 910 | 6.0 | 768 | 5.0 | 3.0 |",
        "| snapkv/true_eviction/prefill+decode/b768 | 1.0 | 900 | 600 | 6.0 | 300 | 5.0 | 0.0 |",
    ]
    # dense: turn 2 takes 1 + 2 + .25, turn 3 takes 1.5 + 2; its means are over 3 turns
    assert rows[12:15] == [
        "| dense/true_eviction | 1.17 | 2.00 | 0.17 | 4.00 | +0.25 (n=6) |",
        "| nexus/true_eviction/prefill+decode/b768 | 1.00 | 2.00 | 0.25 | 4.00 | – |",
        "| snapkv/true_eviction/prefill+decode/b768 | 1.00 | 2.00 | 0.25 | 4.00 | – |",
    ]
    assert rows[17] == "| true_eviction | dense | +0.25 (n=6) | +0.50 (n=6) | 6 | 3 |"
    text = "\n".join(lines)
    for said in (
        "3 instances. Intervals: Wilson's, one run for each instance.",
        "\\* the paper's: DeepSWE-Preview, 50 tasks of SWE-bench, 20% density",
        "not to be compared number by number",
        "b768: incomplete: 1 of 3 runs are missing.",
        "b768: 1 run ended in an error of the infrastructure, counted nowhere else.",
        "snapkv/true_eviction/prefill+decode/b768: never evicted: says nothing of the method.",
        "P values are of 3 tests and not corrected for their number.",
    ):
        assert said in text


@pytest.mark.parametrize("width", [80, 120, 200])
def test_the_terminal_shows_names_and_figures_whole(analysis: Analysis, width: int) -> None:
    text = io.StringIO()
    show(Console(file=text, width=width), analysis, paper())
    shown = text.getvalue()
    tables = shown.split("3 instances.")[0]
    assert "…" not in tables
    for word in ("nexus", "true_eviction", "prefill+decode", "b768", "2 of 3", "1,070", "0.67"):
        assert word in tables
    assert ("nexus/true_eviction/prefill+decode/b768" in tables) == (width == 200)


def test_csv_has_every_figure_unrounded_and_the_papers_in_columns_of_their_own(
    analysis: Analysis,
) -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text(analysis, paper()))))
    dense, nexus, snapkv = rows
    assert float(dense["pass_at_1"]) == 2 / 3
    assert (dense["scope"], dense["budget"], dense["density"]) == ("", "", "")
    assert (nexus["method"], nexus["scope"], nexus["budget"]) == ("nexus", "prefill+decode", "768")
    assert (nexus["vs_dense_only_this"], nexus["vs_dense_only_other"]) == ("0", "1")
    assert float(nexus["vs_dense_p"]) == 1.0
    assert float(dense["prefill_seconds_per_turn"]) == pytest.approx(3.5 / 3)
    assert float(dense["peak_bytes"]) == 10 * MIB
    assert (snapkv["errors"], snapkv["missing"], snapkv["graded"]) == ("1", "1", "1")
    assert "never evicted" in snapkv["notes"]
    theirs = ("paper_resolved", "paper_n", "paper_model", "paper_benchmark")
    assert [nexus[name] for name in theirs] == [
        "8", "50", "DeepSWE-Preview", "50 tasks of SWE-bench",
    ]  # fmt: skip
    assert [snapkv[name] for name in theirs] == ["", "", "", ""]
    assert [row["resolved"] for row in rows] == ["2", "1", "0"]


def test_the_report_says_what_produced_it_and_keeps_the_paper_apart(
    analysis: Analysis, tmp_path: Path
) -> None:
    files = write(tmp_path, analysis, paper(), {"seeds": [0], "hardware": {"cores": 2}})
    assert sorted(path.name for path in files) == [
        "comparison.csv",
        "comparison.md",
        "report.json",
    ]
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["seeds"] == [0]
    assert data["hardware"] == {"cores": 2}
    assert data["statistics"]["bootstrap"] == {"resamples": 10_000, "seed": 0}
    assert data["instances"] == ["a", "b", "c"]
    nexus = data["rows"][1]
    assert nexus["cell"] == {
        "method": "nexus",
        "protocol": "true_eviction",
        "scope": "prefill+decode",
        "budget": 768,
        "density": None,
    }
    assert nexus["against"]["dense"]["only_theirs"] == 1
    assert data["paper"]["model"] == "DeepSWE-Preview"
    assert "paper" not in json.dumps(data["rows"])
    # every run that is there, errors among them
    assert len(data["runs"]) == 8
    assert [run["status"] for run in data["runs"] if run["ending"] == "error"] == [
        "WorkerDied: killed"
    ]


def test_an_empty_comparison_can_be_written(tmp_path: Path) -> None:
    nothing = analyse([], expected([item(NEXUS, "a")]))
    write(tmp_path, nothing, paper(), {})
    assert "incomplete: 1 of 1" in (tmp_path / "comparison.md").read_text()
    assert write_plots(tmp_path, nothing, paper()) == []


def test_words() -> None:
    assert estimate_words(None) == "–"
    assert paired_words(None) == "–"
    assert paired_words(Paired(20, 12, 1, 0.00342, False)) == "+12 −1, p = 0.003"
    assert paired_words(Paired(20, 15, 0, 0.00006, False)) == "+15 −0, p < 0.001"


def test_plots_are_pictures_of_what_was_measured(analysis: Analysis, tmp_path: Path) -> None:
    names = [path.name for path in write_plots(tmp_path, analysis, paper())]
    assert names == ["resolved.png", "seconds_per_turn.png", "resident.png"]
    for name in names:
        data = (tmp_path / name).read_bytes()
        assert data.startswith(b"\x89PNG\r\n")
        assert len(data) > 10_000


def test_plotted_means_are_over_the_runs_that_got_that_far(analysis: Analysis) -> None:
    runs = [run for _, found in analysis.groups for run in found if run.ending != "error"]

    def resident(run: Run) -> list[float]:
        return [row["resident"] for row in run.turns]

    points = turn_means(runs, resident)
    assert points == [
        (1, pytest.approx((3 * 910 + 3 * 768 + 300) / 7)),
        (2, pytest.approx((3 * 1000 + 3 * 768) / 6)),
        (3, 1100.0),
    ]


def test_the_lines_of_a_plot_are_those_means(analysis: Analysis) -> None:
    from matplotlib.figure import Figure

    from agent.compare.plots import _resident, _resolved, _seconds

    figure = Figure()
    assert _resident(figure, analysis, paper())
    tokens = figure.axes[0]
    lines = {line.get_label(): line.get_ydata() for line in tokens.lines}
    assert list(lines["dense"]) == [910, 1000, 1100]
    assert list(lines["nexus/prefill+decode/b768"]) == [768, 768]
    assert list(figure.axes[1].lines[0].get_ydata()) == [9, 5, 5]  # MiB
    figure = Figure()
    assert _seconds(figure, analysis, paper())
    assert list(figure.axes[0].lines[0].get_ydata()) == [3.25, 3.25, 3.5]  # without tools
    figure = Figure()
    assert _resolved(figure, analysis, paper())
    marks = [line.get_xdata()[0] for line in figure.axes[0].lines if len(line.get_xdata()) == 1]
    assert marks == pytest.approx([2 / 3, 12 / 50, 1 / 3, 8 / 50, 0])
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels[0] == "dense/true_eviction  (2 of 3)"


def test_without_matplotlib_it_says_what_to_install(
    analysis: Analysis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(PlotsMissing, match=r"pip install 'nexus-agent\[plots\]'"):
        write_plots(tmp_path, analysis, paper())
