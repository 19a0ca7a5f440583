"""A comparison as PNG files. matplotlib is an optional extra, and is imported here only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from agent.compare.analysis import MODEL_PHASES, Analysis
from agent.compare.grid import DENSE
from agent.compare.paper import Paper
from agent.compare.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RESOLVED, SECONDS, RESIDENT = "resolved.png", "seconds_per_turn.png", "resident.png"
_MIB = 2**20


class PlotsMissing(RuntimeError):
    """matplotlib is not installed."""


def write_plots(folder: Path, analysis: Analysis, paper: Paper) -> list[Path]:
    """Draw the plots there is data for. Returns their paths. Raises PlotsMissing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotsMissing(
            "no plots: matplotlib is not installed (pip install 'nexus-agent[plots]'); "
            "the tables are written"
        ) from error
    drawn: list[Path] = []
    plots: dict[str, Callable[[Figure, Analysis, Paper], bool]] = {
        RESOLVED: _resolved,
        SECONDS: _seconds,
        RESIDENT: _resident,
    }
    for name, draw in plots.items():
        figure = Figure(layout="constrained")
        FigureCanvasAgg(figure)  # no window, no state that other code shares
        if draw(figure, analysis, paper):
            figure.savefig(folder / name, dpi=150, metadata={"Software": None})
            drawn.append(folder / name)
    return drawn


def turn_means(
    runs: Iterable[Run], values: Callable[[Run], Sequence[float]]
) -> list[tuple[int, float]]:
    """(turn, mean over the runs that got that far)."""
    by_turn: dict[int, list[float]] = {}
    for run in runs:
        for turn, value in enumerate(values(run), 1):
            by_turn.setdefault(turn, []).append(value)
    return [(turn, fmean(found)) for turn, found in sorted(by_turn.items())]


def _resolved(figure: Figure, analysis: Analysis, paper: Paper) -> bool:
    """Pass@1 of each row with its interval; the paper's shares as hollow marks."""
    rows = [(row, row.pass_at_1) for row in analysis.rows if row.pass_at_1 is not None]
    if not rows:
        return False
    figure.set_size_inches(8, 1.6 + 0.34 * len(rows))
    axes: Axes = figure.subplots()
    for place, (row, estimate) in enumerate(rows):
        assert estimate is not None
        spread = [[estimate.value - estimate.low], [estimate.high - estimate.value]]
        axes.errorbar(estimate.value, place, xerr=spread, fmt="o", color=_color(row.cell.method))
        theirs = paper.resolved(row.cell)
        if theirs is not None:
            axes.plot(theirs / paper.n, place, "D", mfc="none", mec="0.5", ms=6)
    axes.plot([], [], "D", mfc="none", mec="0.5", label=paper.label)
    axes.plot([], [], "ko", label=f"here: {len(analysis.instances)} instances, 95 % interval")
    axes.set(xlim=(-0.02, 1.02), xlabel="Pass@1", yticks=range(len(rows)))
    axes.set_yticklabels([f"{row.name}  ({row.resolved} of {row.graded})" for row, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)  # the first row on top
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center", fontsize="small", frameon=False)
    return True


def _seconds(figure: Figure, analysis: Analysis, paper: Paper) -> bool:
    """Seconds of a turn against its number: one panel a protocol, same axes."""

    def values(run: Run) -> Sequence[float]:
        return run.seconds(*MODEL_PHASES)

    return _panels(figure, analysis, [("seconds per turn without tools", values)])


def _resident(figure: Figure, analysis: Analysis, paper: Paper) -> bool:
    """What is held after each turn, in tokens and in bytes."""
    return _panels(
        figure,
        analysis,
        [
            ("tokens held after the turn", lambda run: _column(run, "resident", 1)),
            ("MiB held after the turn", lambda run: _column(run, "cache_bytes", _MIB)),
        ],
    )


def _panels(
    figure: Figure,
    analysis: Analysis,
    quantities: Sequence[tuple[str, Callable[[Run], Sequence[float]]]],
) -> bool:
    """Lines over turns: a row of panels for each quantity, a column for each protocol."""
    protocols: dict[str, dict[str, tuple[Run, ...]]] = {}
    for name, every in analysis.groups:
        runs = tuple(run for run in every if run.turns and run.ending != "error")
        if runs:
            protocols.setdefault(runs[0].cell.protocol, {})[name] = runs
    if not protocols:
        return False
    figure.set_size_inches(1 + 5 * len(protocols), 1.2 + 3.2 * len(quantities))
    grid = figure.subplots(len(quantities), len(protocols), sharey="row", squeeze=False)
    for line, (label, values) in zip(grid, quantities, strict=True):
        for axes, (protocol, groups) in zip(line, protocols.items(), strict=True):
            _lines(axes, protocol, groups, values)
            axes.set_title(protocol)
            axes.set_xlabel("turn (mean over the runs that got that far)")
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
        line[0].set_ylabel(label)
    for axes in grid[0]:
        axes.legend(fontsize="x-small", frameon=False)
    return True


def _lines(
    axes: Axes,
    protocol: str,
    groups: Mapping[str, tuple[Run, ...]],
    values: Callable[[Run], Sequence[float]],
) -> None:
    from matplotlib.ticker import MaxNLocator

    methods = [runs[0].cell.method for runs in groups.values()]
    for name, runs in groups.items():
        method = runs[0].cell.method
        points = turn_means(runs, values)
        label = name.replace(f"/{protocol}", "")
        axes.plot(
            [turn for turn, _ in points],
            [value for _, value in points],
            marker="o",
            ms=3,
            color=_color(method) if methods.count(method) == 1 else None,
            label=label,
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _column(run: Run, name: str, unit: float) -> list[float]:
    return [turn.get(name, 0) / unit for turn in run.turns]


_COLORS = {
    DENSE: "0.2",
    "nexus": "C3",
    "snapkv": "C0",
    "h2o": "C2",
    "morphkv": "C4",
    "streaming_llm": "C5",
    "random": "C7",
    "topk": "C1",
    "pyramidkv": "C6",
    "ada-snapkv": "C9",
    "ada-pyramidkv": "C8",
}


def _color(method: str) -> str:
    """The same method has the same colour in every plot."""
    return _COLORS.get(method.removesuffix("-paper"), "k")
