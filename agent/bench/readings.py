"""What was measured, kept run by run, and what is said of it: medians, spreads, paired ratios.

Runs take turns (`order`), since other work may share the machine: a ratio is formed within a
repeat, and the median is taken of the ratios.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Point:
    """One thing that is measured: `who` at a length.

    kind: "prefill" (reading `tokens` from nothing) or "decode" (writing behind `tokens`).
    """

    kind: str
    who: str
    tokens: int
    batch: int = 1


@dataclass(frozen=True)
class Reading:
    """One run: values by name. Seconds and counts are as measured; nothing is averaged yet."""

    point: Point
    repeat: int
    values: dict[str, float] = field(default_factory=dict)

    def data(self) -> dict[str, Any]:
        """As plain data, for JSON and CSV."""
        place = self.point
        head = {"kind": place.kind, "who": place.who, "tokens": place.tokens, "batch": place.batch}
        return {**head, "repeat": self.repeat, **self.values}


@dataclass(frozen=True)
class Spread:
    """Median, least and most of some values."""

    median: float
    low: float
    high: float
    count: int


def spread(values: Sequence[float]) -> Spread | None:
    """Of all values; None for none."""
    if not values:
        return None
    return Spread(statistics.median(values), min(values), max(values), len(values))


def order(things: Sequence[T], repeat: int) -> list[T]:
    """The order of one repeat: every other one backwards, so that nothing always comes first."""
    return list(things) if repeat % 2 == 0 else list(things)[::-1]


class Readings:
    """All runs of a bench, in the order in which they were made."""

    def __init__(self, runs: Iterable[Reading] = ()) -> None:
        self.runs = list(runs)

    def add(self, reading: Reading) -> None:
        """Keep one more run."""
        self.runs.append(reading)

    @property
    def points(self) -> list[Point]:
        """What there are runs of, in order of first appearance."""
        return list(dict.fromkeys(run.point for run in self.runs))

    def values(self, point: Point, name: str) -> dict[int, float]:
        """One value of each run of `point` that has it, by repeat."""
        return {
            run.repeat: run.values[name]
            for run in self.runs
            if run.point == point and name in run.values
        }

    def spread(self, point: Point, name: str) -> Spread | None:
        """Over the repeats."""
        return spread(list(self.values(point, name).values()))

    def ratio(self, point: Point, against: Point, name: str) -> Spread | None:
        """`point` over `against`, repeat by repeat; repeats that lack one of them do not count."""
        ours, theirs = self.values(point, name), self.values(against, name)
        return spread([ours[r] / theirs[r] for r in ours if theirs.get(r)])


def show(found: Spread | None, text: Callable[[float], str]) -> str:
    """Median and extremes in a table's cell; a dash where there is nothing."""
    if found is None:
        return "–"
    if found.count == 1 or found.low == found.high:
        return text(found.median)
    return f"{text(found.median)} ({text(found.low)} to {text(found.high)})"
