"""What `agent bench speed` says: tables for people, and everything as JSON and CSV."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from agent.bench.contestants import AGAIN, DYNAMIC, STATIC
from agent.bench.origin import at_end, markdown, origin_lines, save_all
from agent.bench.readings import Point, Readings, show
from agent.bench.speed import Bench

Table = tuple[str, list[str], list[list[str]]]

_LONG = {"ms a step", "eviction ms", "noting %", "storing %", "held", "MiB", "evictions"}
_SHORT = {"first token s": "1st s", "eviction %": "evict %", "x least seen": "x least"}

NOTES = [
    "Median (least to most) over the repeats. Runs of all methods and lengths take turns, every "
    "other repeat backwards; a ratio is formed within each repeat. tokens/s of a batch are those "
    "of all its sequences together.",
    f"`dense`: nothing is evicted, on our own store. `{DYNAMIC}`, `{STATIC}`: transformers' "
    "DynamicCache and StaticCache (which attends to its whole length), attention by SDPA. "
    f"`{AGAIN}`: a fresh dense cache every turn. NAME@N: a method with a budget of N tokens (below "
    "1: that share of the tokens seen). NAME+fixed: decoded by static shapes with lengths on the "
    "device, which is one graph on CUDA.",
    "first token: reading the observation behind what was seen, the eviction due then included, "
    "until the first new token is known. eviction: `cache.evict` per step that evicted, and as a "
    "share of decode (or prefill) time. noting: keeping queries, lengths and block numbers; "
    "storing: writing new keys and values. These shares come from a stretch of their own behind "
    "the timed one. bytes: all tensors of the caches at the end of a run, and the most there were "
    "at once, without the weights; device peak: what the allocator saw beyond the weights and the "
    "contexts that are kept for the runs.",
]


def tables(readings: Readings, against: str) -> list[Table]:
    """Of everything that was measured; ratios are against the contestant of that name."""
    found = []
    for kind, make in (("prefill", _prefill_row), ("decode", _decode_row)):
        points = [point for point in readings.points if point.kind == kind]
        points.sort(key=lambda point: (point.batch, point.tokens))
        if points:
            cells = [make(readings, point, against) for point in points]
            header = [name for name in cells[0] if any(row[name] != "–" for row in cells)]
            title = "Reading from nothing" if kind == "prefill" else "Writing behind N tokens"
            found.append((title, header, [[row[name] for name in header] for row in cells]))
    return found


def short_table(table: Table) -> Table:
    """The same for a terminal: medians, and of spreads only that of tokens/s."""
    title, header, rows = table
    kept = [name for name in header if name not in _LONG]
    found = [kept]
    for row in rows:
        cells = dict(zip(header, row, strict=True))
        spread = cells["tokens/s"].partition(" (")[2].rstrip(")").replace(" to ", "-")
        short = {name: cells[name].partition(" (")[0] for name in kept}
        found.append(list(short.values()))
        found[-1].insert(kept.index("tokens/s") + 1, spread or "–")
    names = [_SHORT.get(name, name) for name in kept]
    names.insert(kept.index("tokens/s") + 1, "least-most")
    return title, names, found[1:]


def data(bench: Bench, origin: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Everything, for JSON."""
    return {
        "origin": at_end(origin),
        "settings": {**settings, **asdict(bench.request)},
        "complete": bench.finished and not bench.failed,
        "runs": [run.data() for run in bench.readings.runs],
        "failed": [{**asdict(point), "why": why} for point, why in bench.failed.items()],
    }


def write(path: Path, found: dict[str, Any], bench: Bench, against: str, words: str) -> None:
    """The JSON file, and beside it the same as CSV and Markdown."""
    lines = ["# Speed and bytes", *origin_lines(found["origin"]), words]
    if not found["complete"]:
        lines.append("**Broken off, or in part failed: not everything was measured.**")
    for title, header, rows in tables(bench.readings, against):
        lines += [f"## {title}", markdown(header, rows)]
    lines += [f"{where(point)}: not measured, {why}." for point, why in bench.failed.items()]
    save_all(path, found, found["runs"], [*lines, *NOTES])


def where(point: Point) -> str:
    """A point in words."""
    batch = f", batch {point.batch}" if point.batch > 1 else ""
    return f"{point.who}, {point.kind} at {point.tokens:,}{batch}"


def _prefill_row(readings: Readings, point: Point, against: str) -> dict[str, str]:
    other = Point(point.kind, against, point.tokens, point.batch)
    return {
        "method": point.who,
        "tokens": f"{point.tokens:,}",
        "tokens/s": show(readings.spread(point, "tokens_per_s"), _number),
        f"x {against}": _ratio(readings, point, other),
        "eviction ms": show(readings.spread(point, "eviction_ms"), _number),
        "eviction %": show(readings.spread(point, "evicting_share"), _percent),
        "evictions": _plain(readings, point, "evictions", "{:,.0f}"),
        **_sizes(readings, point),
    }


def _decode_row(readings: Readings, point: Point, against: str) -> dict[str, str]:
    other = Point(point.kind, against, point.tokens, point.batch)
    least = min(
        p.tokens
        for p in readings.points
        if (p.kind, p.who, p.batch) == (point.kind, point.who, point.batch)
    )
    first = Point(point.kind, point.who, least, point.batch)
    solo = Point(point.kind, point.who, point.tokens, 1)
    return {
        "method": point.who,
        "seen": f"{point.tokens:,}",
        "batch": str(point.batch) if point.batch > 1 else "–",
        "tokens/s": show(readings.spread(point, "tokens_per_s"), _number),
        "ms a step": show(readings.spread(point, "step_ms"), _number),
        f"x {against}": _ratio(readings, point, other),
        "x least seen": "–" if first == point else _ratio(readings, point, first),
        "x batch 1": "–" if solo == point else _ratio(readings, point, solo),
        "first token s": show(readings.spread(point, "first_token_s"), _number),
        "eviction ms": show(readings.spread(point, "eviction_ms"), _number),
        "eviction %": show(readings.spread(point, "evicting_share"), _percent),
        "noting %": show(readings.spread(point, "noting_share"), _percent),
        "storing %": show(readings.spread(point, "storing_share"), _percent),
        **_sizes(readings, point),
    }


def _sizes(readings: Readings, point: Point) -> dict[str, str]:
    names = {"MiB": "bytes", "peak MiB": "peak_bytes", "device peak MiB": "device_peak_bytes"}
    sizes = {title: show(readings.spread(point, name), _mib) for title, name in names.items()}
    return {"held": _plain(readings, point, "resident", "{:,.0f}"), **sizes}


def _plain(readings: Readings, point: Point, name: str, form: str) -> str:
    return show(readings.spread(point, name), form.format)


def _ratio(readings: Readings, point: Point, other: Point) -> str:
    return show(readings.ratio(point, other, "tokens_per_s"), "{:.2f}".format)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _percent(value: float) -> str:
    return f"{value:.1%}" if value >= 0.01 else f"{value:.2%}"


def _mib(value: float) -> str:
    return f"{value / 2**20:,.1f}"
