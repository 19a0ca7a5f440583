"""Intervals, tests and slopes of a comparison. Pure functions that know nothing of runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Literal

import numpy as np

LEVEL = 0.95
RESAMPLES = 10_000
BOOTSTRAP_SEED = 0  # fixed, so that a report can be made again

RunKey = tuple[str, int]  # instance, seed
IntervalKind = Literal["wilson", "bootstrap", "wilson over instances"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A share with its 95 % interval. `n` instances; `kind`: how the interval was made."""

    value: float
    low: float
    high: float
    n: int
    kind: IntervalKind


@dataclass(frozen=True, slots=True)
class Paired:
    """The same runs under two configurations. `only_ours`, `only_theirs`: resolved by one alone.

    `repeated`: an instance is there several times (seeds), so that pairs depend on each other and
    p is too small.
    """

    pairs: int
    only_ours: int
    only_theirs: int
    p: float
    repeated: bool


@dataclass(frozen=True, slots=True)
class Slope:
    """A line fitted by least squares: seconds that a turn takes longer than the one before it."""

    per_turn: float
    n: int  # turns
    runs: int


def wilson(share: float, n: int, level: float = LEVEL) -> tuple[float, float]:
    """Wilson's score interval of a share of `n` trials. Raises ValueError for what is no share."""
    if not 0 <= share <= 1 or n < 1:
        raise ValueError(f"{share} of {n} trials is no share")
    z = NormalDist().inv_cdf((1 + level) / 2)
    square = z * z
    middle = (share + square / (2 * n)) / (1 + square / n)
    half = z / (1 + square / n) * math.sqrt(share * (1 - share) / n + square / (4 * n * n))
    # At the ends the bound is the end itself, which rounding would miss.
    return (0.0 if share == 0 else middle - half), (1.0 if share == 1 else middle + half)


def pass_at_1(outcomes: Mapping[str, Sequence[bool]]) -> Estimate | None:
    """Pass@1: the mean over instances of the share of their runs that resolved them.

    outcomes: by instance, one value a run; instances without a run are passed over. None where no
    run is left. The interval is Wilson's where each instance ran once. Else instances are drawn
    anew (a bootstrap over clusters), and where all have the same rate, so that drawing shows no
    spread, it is Wilson's with each instance as one trial: wider than need be, never zero wide.
    """
    rates = [fmean(runs) for runs in outcomes.values() if runs]
    if not rates:
        return None
    n, value = len(rates), fmean(rates)
    if max(len(runs) for runs in outcomes.values()) == 1:
        return Estimate(value, *wilson(value, n), n, "wilson")
    if min(rates) == max(rates):
        return Estimate(value, *wilson(value, n), n, "wilson over instances")
    return Estimate(value, *bootstrap(rates), n, "bootstrap")


def bootstrap(
    rates: Sequence[float],
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = BOOTSTRAP_SEED,
) -> tuple[float, float]:
    """Percentile interval of the mean, from samples of `rates` with replacement.

    How often each distinct rate is drawn is multinomial, so samples are drawn as counts.
    """
    values, counts = np.unique(np.asarray(rates, dtype=np.float64), return_counts=True)
    draws = np.random.default_rng(seed).multinomial(len(rates), counts / len(rates), size=resamples)
    tail = (1 - level) / 2
    low, high = np.quantile(draws @ values / len(rates), [tail, 1 - tail])
    return float(low), float(high)


def mcnemar(only_ours: int, only_theirs: int) -> float:
    """Exact McNemar test, two-sided: the discordant pairs against a fair coin. 1 without any."""
    if only_ours < 0 or only_theirs < 0:
        raise ValueError(f"{only_ours} and {only_theirs} are no counts of pairs")
    n, fewer = only_ours + only_theirs, min(only_ours, only_theirs)
    tail, ways = 0, 1  # ways: n over k
    for k in range(fewer + 1):
        tail += ways
        ways = ways * (n - k) // (k + 1)
    return min(1.0, 2 * tail / 2**n)


def paired(ours: Mapping[RunKey, bool], theirs: Mapping[RunKey, bool]) -> Paired | None:
    """Compare the runs that both sides have. None where they share none."""
    both = ours.keys() & theirs.keys()
    if not both:
        return None
    only_ours = sum(ours[key] and not theirs[key] for key in both)
    only_theirs = sum(theirs[key] and not ours[key] for key in both)
    repeated = len({instance for instance, _ in both}) < len(both)
    return Paired(len(both), only_ours, only_theirs, mcnemar(only_ours, only_theirs), repeated)


def slope(runs: Iterable[Sequence[tuple[float, float]]]) -> Slope | None:
    """The common slope of (turn, seconds) points, each run with an intercept of its own.

    So a run that is slower throughout, or that ends early, does not tilt the line. None where no
    run has two turns.
    """
    products = squares = 0.0
    n = used = 0
    for points in runs:
        if len({x for x, _ in points}) < 2:
            continue
        middle_x, middle_y = fmean(x for x, _ in points), fmean(y for _, y in points)
        products += sum((x - middle_x) * (y - middle_y) for x, y in points)
        squares += sum((x - middle_x) ** 2 for x, _ in points)
        n, used = n + len(points), used + 1
    return Slope(products / squares, n, used) if used else None


def mean(values: Iterable[float]) -> float | None:
    """The mean, None of nothing."""
    found = list(values)
    return fmean(found) if found else None
