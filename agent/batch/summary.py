"""What came out of a batch, in numbers: one entry for each cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agent.batch.item import Item
from agent.batch.store import ERROR, FINISHED, Result

MEANS = ("steps", "tokens", "fed", "sampled")


def summary(items: Sequence[Item], results: Mapping[str, Result]) -> dict[str, dict[str, Any]]:
    """By cell, in the order in which cells come first: see `_cell`. Results go by key; an item
    without one counts as open."""
    cells: dict[str, list[Item]] = {}
    for item in items:
        cells.setdefault(item.cell, []).append(item)
    return {name: _cell(own, results) for name, own in cells.items()}


def _cell(items: list[Item], results: Mapping[str, Result]) -> dict[str, Any]:
    """runs: all that were asked for, `resolved` is of them: an error resolves nothing.

    Means are over finished runs, minutes without grading and without loading a model. `evicted`
    counts the finished runs in which something was evicted at all.
    """
    found = {item.key: results[item.key] for item in items if item.key in results}
    finished = [result for result in found.values() if result["state"] == FINISHED]
    errors = [result for result in found.values() if result["state"] == ERROR]
    resolved = [item for item in items if _resolved(found.get(item.key))]
    means = {name: _mean(result["totals"].get(name) for result in finished) for name in MEANS}
    seconds = _mean(result["seconds"].get("run") for result in finished)
    evictions = [result["totals"].get("evictions", 0) for result in finished]
    return {
        "runs": len(items),
        "finished": len(finished),
        "open": len(items) - len(found),
        "resolved": len(resolved),
        "instances": len({item.instance_id for item in items}),
        "instances_resolved": len({item.instance_id for item in resolved}),
        "attempts": max(item.attempt for item in items),
        "verdicts": dict(sorted(Counter(map(_status, finished)).items())),
        "exits": dict(sorted(Counter(str(result["exit"]) for result in finished).items())),
        "errors": dict(sorted(Counter(map(error_kind, errors)).items())),
        "evicts": any(item.options.get("method") != "dense" for item in items),
        "evicted": sum(count > 0 for count in evictions),
        "evictions": sum(evictions),
        "mean": {**means, "minutes": None if seconds is None else round(seconds / 60, 3)},
        "peak_bytes": max(
            (result["totals"].get("peak_bytes", 0) for result in finished), default=0
        ),
    }


def rows(
    items: Iterable[Item], results: Mapping[str, Result], folders: Mapping[str, str]
) -> list[dict[str, Any]]:
    """One line for each run, for reports."""
    table = []
    for item in items:
        result = results.get(item.key)
        row: dict[str, Any] = {
            "instance_id": item.instance_id,
            "cell": item.cell,
            "attempt": item.attempt,
            "seed": item.seed,
            "folder": folders[item.key],
            "state": "open" if result is None else result["state"],
        }
        if result is not None:
            totals = result["totals"]
            row |= {
                "resolved": _resolved(result),
                "status": _status(result),
                "exit": result["exit"],
                "error": result["error"],
                **{name: totals.get(name) for name in (*MEANS, "evictions", "peak_bytes")},
                "seconds": result["seconds"],
            }
        table.append(row)
    return table


def eviction_words(cell: Mapping[str, Any]) -> str:
    """Whether the method was put to the test at all."""
    if not cell["finished"]:
        return "no run is finished"
    if not cell["evicts"]:
        return "0 evictions: the method keeps everything"
    if not cell["evicted"]:
        return "0 evictions: nothing was ever evicted, so these runs say nothing of the method"
    return f"{cell['evictions']} evictions, in {cell['evicted']} of {cell['finished']} runs"


def error_kind(result: Result) -> str:
    """What sort of error it is: the text before the colon."""
    return str(result["error"] or "unknown").partition(":")[0][:60]


def _resolved(result: Result | None) -> bool:
    return (
        result is not None
        and result["state"] == FINISHED
        and bool((result["verdict"] or {}).get("resolved"))
    )


def _status(result: Result) -> str:
    return str((result["verdict"] or {}).get("status", "ungraded"))


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 3) if known else None
