"""A comparison as tables: for the terminal, as Markdown, as CSV, and as `report.json`."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent.compare.analysis import REFERENCES, Analysis, Growth, Row
from agent.compare.paper import Paper
from agent.compare.runs import PHASES
from agent.compare.statistics import BOOTSTRAP_SEED, LEVEL, RESAMPLES, Estimate, Paired, Slope
from agent.trajectory import write_atomic

REPORT, CSV, MARKDOWN = "report.json", "comparison.csv", "comparison.md"
FORMAT = 1
_NOTHING = "–"
_WIDE = 140  # columns of a terminal from which on names fit on one line
_WIDTH = 240  # of the Markdown: no cell is broken


def outcome_table(
    analysis: Analysis, paper: Paper, style: box.Box = box.SIMPLE_HEAD, *, stacked: bool = False
) -> Table:
    """What was resolved, and whether that differs from dense and from Nexus. `stacked`: names of
    rows take several lines."""
    table = Table(box=style, pad_edge=False, collapse_padding=True)
    for title in ("configuration", "resolved", "Pass@1 [95 %]", *_reference_titles()):
        table.add_column(title, no_wrap=title == "configuration")
    table.add_column(f"paper, of {paper.n}*", justify="right")
    for row in analysis.rows:
        theirs = paper.resolved(row.cell)
        table.add_row(
            Text(_name(row, stacked)),
            Text(resolved_words(row)),
            Text(estimate_words(row.pass_at_1)),
            *(Text(paired_words(row.against[name])) for name in REFERENCES),
            Text(_NOTHING if theirs is None else str(theirs), "dim"),
        )
    return table


def memory_table(
    analysis: Analysis, style: box.Box = box.SIMPLE_HEAD, *, stacked: bool = False
) -> Table:
    """What a run took in tokens and bytes: means over runs."""
    table = Table(box=style, pad_edge=False, collapse_padding=True)
    table.add_column("configuration", no_wrap=True)
    for title in (
        "turns",
        "tokens fed",
        "peak",
        "peak MiB",
        "resident",
        "resident MiB",
        "times evicted",
    ):
        table.add_column(title, justify="right")
    for row in analysis.rows:
        table.add_row(
            Text(_name(row, stacked)),
            _number(row.turns, 1),
            _number(row.fed),
            _number(row.peak_tokens),
            _mib(row.peak_bytes),
            _number(row.resident_tokens),
            _mib(row.resident_bytes),
            _number(row.evictions, 1),
        )
    return table


def time_table(
    analysis: Analysis, style: box.Box = box.SIMPLE_HEAD, *, stacked: bool = False
) -> Table:
    """What a turn took in seconds: means over turns, and how that grows."""
    table = Table(box=style, pad_edge=False, collapse_padding=True)
    table.add_column("seconds per turn", no_wrap=True)
    for title in (*("tools" if phase == "tool" else phase for phase in PHASES), "more each turn"):
        table.add_column(title, justify="right")
    for row in analysis.rows:
        table.add_row(
            Text(_name(row, stacked)),
            *(_number(row.seconds[phase], 2) for phase in PHASES),
            slope_words(row.growth),
        )
    return table


def growth_table(analysis: Analysis, style: box.Box = box.SIMPLE_HEAD) -> Table:
    """How a turn's time grows from turn to turn, by protocol."""
    table = Table(box=style, pad_edge=False, collapse_padding=True)
    for title in ("seconds more each turn", "cache"):
        table.add_column(title)
    for title in ("without tools", "prefill alone", "turns", "runs"):
        table.add_column(title, justify="right")
    for line in analysis.growth:
        fit = line.seconds
        table.add_row(
            line.protocol,
            "evicts" if line.evicts else "dense",
            slope_words(line.seconds),
            slope_words(line.prefill),
            str(fit.n if fit else 0),
            str(fit.runs if fit else 0),
        )
    return table


def caption(analysis: Analysis, paper: Paper) -> list[str]:
    """How the tables are to be read, and what must be known of these ones."""
    kinds = sorted({row.pass_at_1.kind for row in analysis.rows if row.pass_at_1})
    ways = {
        "wilson": "Wilson's, one run for each instance",
        "bootstrap": "a bootstrap over instances",
        "wilson over instances": "Wilson's over instances, where all have the same rate",
    }
    count = len(analysis.instances)
    lines = [
        f"{count} instance{'s' * (count != 1)}. Intervals: "
        + ("; ".join(ways[kind] for kind in kinds) or "none, nothing was graded")
        + ".",
        "+a −b: runs resolved by this row alone and by the other alone; p: exact McNemar test, "
        "two-sided.",
        "Resident: the most tokens held after a turn; peak: at any time; means over runs.",
        "More each turn: seconds that a turn takes longer than the one before it, tools left out "
        "(least squares from turn 2 on, each run with its own intercept; n turns).",
        f"* {paper.label} ({paper.source}). Another model, other tasks and another size of cache "
        "than here: not to be compared number by number.",
    ]
    for row in analysis.rows:
        lines += [f"{row.name}: {note}." for note in row.notes]
    return [*lines, *(f"{note[0].upper()}{note[1:]}." for note in analysis.notes)]


def show(console: Console, analysis: Analysis, paper: Paper) -> None:
    """All of it in the terminal."""
    stacked = console.width < _WIDE
    for table in (
        outcome_table(analysis, paper, stacked=stacked),
        memory_table(analysis, stacked=stacked),
        time_table(analysis, stacked=stacked),
        growth_table(analysis),
    ):
        console.print(table)
    for line in caption(analysis, paper):
        console.print(Text(line), highlight=False)


def markdown(analysis: Analysis, paper: Paper) -> str:
    """The tables and their caption, for a page."""
    text = io.StringIO()
    console = Console(file=text, width=_WIDTH, color_system=None)
    style = box.MARKDOWN
    for table in (
        outcome_table(analysis, paper, style),
        memory_table(analysis, style),
        time_table(analysis, style),
        growth_table(analysis, style),
    ):
        console.print(table)
    lines = [line.strip() for line in text.getvalue().splitlines()]
    caption_lines = [f"- {line}".replace("*", "\\*") for line in caption(analysis, paper)]
    return "\n".join([*lines, *caption_lines]).strip() + "\n"


def csv_text(analysis: Analysis, paper: Paper) -> str:
    """One line a row, every figure in a column of its own, nothing rounded."""
    records = [csv_record(row, paper) for row in analysis.rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]) if records else ["configuration"])
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def csv_record(row: Row, paper: Paper) -> dict[str, Any]:
    """A row of the CSV."""
    estimate = row.pass_at_1
    record: dict[str, Any] = {
        "configuration": row.name,
        **row.cell.model_dump(exclude={"seed"}),
        "seeds": " ".join(map(str, row.seeds)),
        "expected": row.expected,
        "finished": row.finished,
        "errors": row.errors,
        "missing": row.missing,
        "graded": row.graded,
        "resolved": row.resolved,
        "pass_at_1": estimate and estimate.value,
        "low": estimate and estimate.low,
        "high": estimate and estimate.high,
        "interval": estimate and estimate.kind,
    }
    for name in REFERENCES:
        pair = row.against[name]
        record |= {
            f"vs_{name}_pairs": pair and pair.pairs,
            f"vs_{name}_only_this": pair and pair.only_ours,
            f"vs_{name}_only_other": pair and pair.only_theirs,
            f"vs_{name}_p": pair and pair.p,
        }
    record |= {
        "turns": row.turns,
        "fed": row.fed,
        "sampled": row.sampled,
        "evictions": row.evictions,
        "runs_that_evicted": row.evicted_runs,
        "peak_tokens": row.peak_tokens,
        "peak_bytes": row.peak_bytes,
        "resident_tokens": row.resident_tokens,
        "resident_bytes": row.resident_bytes,
        **{f"{phase}_seconds_per_turn": row.seconds[phase] for phase in PHASES},
        "seconds_each_turn": row.growth and row.growth.per_turn,
        "seconds_each_turn_n": row.growth and row.growth.n,
    }
    theirs = paper.resolved(row.cell)
    known = theirs is not None
    return record | {
        "notes": "; ".join(row.notes),
        "paper_resolved": theirs,
        "paper_n": paper.n if known else None,
        "paper_model": paper.model if known else None,
        "paper_benchmark": paper.benchmark if known else None,
        "paper_density": paper.density if known else None,
    }


def report(analysis: Analysis, paper: Paper, about: Mapping[str, Any]) -> dict[str, Any]:
    """`report.json`: what was asked, on what machine, and every row and run. The paper's numbers
    stand under a key of their own."""
    return {
        "format": FORMAT,
        "kind": "compare",
        **about,
        "statistics": {
            "level": LEVEL,
            "bootstrap": {"resamples": RESAMPLES, "seed": BOOTSTRAP_SEED},
            "slope": "least squares from turn 2 on, an intercept for each run",
        },
        "instances": list(analysis.instances),
        "rows": [_row_data(row) for row in analysis.rows],
        "growth": [_growth_data(line) for line in analysis.growth],
        "notes": list(analysis.notes),
        "runs": [
            {
                "row": name,
                "instance_id": run.instance_id,
                "seed": run.cell.seed,
                "key": run.key,
                "ending": run.ending,
                "status": run.status,
                "resolved": run.resolved if run.ending == "graded" else None,
                "exit": run.exit,
                "totals": dict(run.totals),
            }
            for name, runs in analysis.groups
            for run in runs
        ],
        "paper": {**asdict(paper), "label": paper.label},
    }


def write(
    folder: Path,
    analysis: Analysis,
    paper: Paper,
    about: Mapping[str, Any],
    report_name: str = REPORT,
) -> list[Path]:
    """Write report, CSV and Markdown, each in one step. Returns their paths."""
    data = json.dumps(report(analysis, paper, about), indent=2, ensure_ascii=True) + "\n"
    texts = {
        report_name: data,
        CSV: csv_text(analysis, paper),
        MARKDOWN: markdown(analysis, paper),
    }
    for name, text in texts.items():
        write_atomic(folder / name, text.encode())
    return [folder / name for name in texts]


def resolved_words(row: Row) -> str:
    """`3 of 9`, with what is not counted in it."""
    words = f"{row.resolved} of {row.graded}"
    left = [
        f"{count} {what}"
        for count, what in (
            (row.errors, "error" if row.errors == 1 else "errors"),
            (row.missing, "missing"),
            (row.finished - row.graded, "ungraded"),
        )
        if count
    ]
    return f"{words} ({', '.join(left)})" if left else words


def estimate_words(estimate: Estimate | None) -> str:
    if estimate is None:
        return _NOTHING
    return f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"


def paired_words(pair: Paired | None) -> str:
    if pair is None:
        return _NOTHING
    p = "p < 0.001" if pair.p < 0.001 else f"p = {pair.p:.3f}"
    return f"+{pair.only_ours} −{pair.only_theirs}, {p}"


def slope_words(fit: Slope | None) -> str:
    return _NOTHING if fit is None else f"{fit.per_turn:+.2f} (n={fit.n})"


def _name(row: Row, stacked: bool) -> str:
    return row.name.replace("/", "\n") if stacked else row.name


def _reference_titles() -> Iterable[str]:
    return (f"against {name}" for name in REFERENCES)


def _number(value: float | None, digits: int = 0) -> str:
    return _NOTHING if value is None else f"{value:,.{digits}f}"


def _mib(value: float | None) -> str:
    return _NOTHING if value is None else f"{value / 2**20:,.1f}"


def _row_data(row: Row) -> dict[str, Any]:
    data = asdict(row)
    data["cell"] = row.cell.model_dump(exclude={"seed"})
    return data


def _growth_data(line: Growth) -> dict[str, Any]:
    return asdict(line)
