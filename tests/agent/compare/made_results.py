"""Results as a batch leaves them, made up: real items, numbers that a test chooses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from agent.batch.item import DECIDING, Item
from agent.compare.analysis import Expected
from agent.compare.grid import Cell, Grid
from agent.run_options import RunOptions

MIB = 2**20
BUDGET = 768


def cell(method: str, protocol: Any = "true_eviction", *, seed: int = 0, **sizes: Any) -> Cell:
    """A cell; what evicts has a scope and 768 tokens unless told otherwise."""
    if method != "dense" and not sizes:
        sizes = {"scope": "prefill+decode", "budget": BUDGET}
    return Cell(method=method, protocol=protocol, seed=seed, **sizes)


def item(cell: Cell, instance: str, *, attempt: int = 1, **common: Any) -> Item:
    """The item that `agent compare` makes for a run, without asking this machine anything."""
    return Item(
        source="pairs",
        instance_id=instance,
        digest="d",
        cell=cell.name,
        options=_options(cell, tuple(sorted(common.items()))),
        config="c",
        attempt=attempt,
    )


@cache
def _options(cell: Cell, common: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    options = Grid(options=dict(common)).run_options(cell)
    return options.model_dump(mode="json", include=set(DECIDING))


def plain_item(options: RunOptions, instance: str, *, attempt: int = 1) -> Item:
    """An item of `agent eval`: it has no cell."""
    data = options.model_dump(mode="json", include=set(DECIDING))
    return Item(source="pairs", instance_id=instance, digest="d", options=data, attempt=attempt)


def turn(**changes: float) -> dict[str, float]:
    """One turn's row of a report."""
    return {
        "fed": 100,
        "sampled": 10,
        "resident": 500,
        "peak_tokens": 600,
        "cache_bytes": 5 * MIB,
        "peak_bytes": 6 * MIB,
        "evictions": 1,
        "evicted_tokens": 32,
        "prefill_seconds": 1.0,
        "decode_seconds": 2.0,
        "eviction_seconds": 0.25,
        "tool_seconds": 4.0,
        **changes,
    }


def result(
    item: Item,
    resolved: bool | None = True,
    *,
    turns: Sequence[dict[str, float]] | None = None,
    error: str | None = None,
    status: str | None = None,
    exit: str = "submitted",
    ended: str = "2026-11-30T00:00:00Z",
    versions: dict[str, str] | None = None,
) -> dict[str, Any]:
    """A result file. resolved None: there were no hidden tests."""
    turns = [turn(), turn()] if turns is None else list(turns)
    verdict = None
    if resolved is not None and error is None:
        status = status or ("resolved" if resolved else "unresolved")
        verdict = {"resolved": resolved, "status": status, "detail": "", "seconds": 1.0}
    added = ("fed", "sampled", "evictions", "evicted_tokens")
    totals: dict[str, float] = {name: sum(row[name] for row in turns) for name in added}
    for name in ("peak_tokens", "peak_bytes"):
        totals[name] = max((row[name] for row in turns), default=0)
    return {
        "format": 1,
        "key": item.key,
        "item": item.model_dump(mode="json"),
        "state": "error" if error else "finished",
        "verdict": verdict,
        "exit": None if error else exit,
        "patch_sha256": None,
        "totals": {} if error else {**totals, "steps": len(turns)},
        "turns": [] if error else [{"turn": n, **row} for n, row in enumerate(turns, 1)],
        "seconds": {"run": 10.0, "grade": 1.0, "total": 12.0},
        "error": error,
        "started": "2026-11-30T00:00:00Z",
        "ended": ended,
        "versions": versions or {"torch": "2.13.0"},
        "git_commit": "abc",
    }


def expected(items: Sequence[Item]) -> list[Expected]:
    """What was asked for, where that are these."""
    return [Expected(item.key, item.instance_id, item.cell) for item in items]
