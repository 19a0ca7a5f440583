"""Intervals, tests and slopes against scipy, numpy and plain counting."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from agent.compare.statistics import (
    bootstrap,
    mcnemar,
    mean,
    paired,
    pass_at_1,
    slope,
    wilson,
)

quick = settings(max_examples=60, deadline=None)


@pytest.mark.parametrize("n", [1, 2, 3, 13, 50, 300])
def test_wilson_is_scipys(n: int) -> None:
    for successes in sorted({0, 1, n // 3, n // 2, n - 1, n}):
        theirs = binomtest(successes, n).proportion_ci(0.95, method="wilson")
        assert wilson(successes / n, n) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


@quick
@given(st.integers(1, 400), st.data())
def test_wilson_bounds_are_the_shares_that_the_sample_just_does_not_reject(
    n: int, data: st.DataObject
) -> None:
    share = data.draw(st.integers(0, n)) / n
    low, high = wilson(share, n)
    assert 0 <= low <= share <= high <= 1
    for bound in {low, high} - {0.0, 1.0}:
        distance = 1.959963984540054 * math.sqrt(bound * (1 - bound) / n)
        assert abs(share - bound) == pytest.approx(distance, rel=1e-6)


def test_wilson_at_the_ends_and_what_it_refuses() -> None:
    assert wilson(0, 1) == (0.0, pytest.approx(3.8414588 / 4.8414588))
    for n in range(1, 400):  # rounding misses the end for some of them
        assert (wilson(0, n)[0], wilson(1, n)[1]) == (0.0, 1.0)
    assert wilson(0.5, 10, level=0.5)[0] > wilson(0.5, 10)[0]
    for share, n in ((0.5, 0), (-0.1, 3), (1.1, 3)):
        with pytest.raises(ValueError, match="is no share"):
            wilson(share, n)


def test_mcnemar_counts_coins() -> None:
    """All 2^n outcomes of n fair coins: how many are as uneven as what was seen."""
    for n in range(11):
        heads = Counter(sum(coins) for coins in itertools.product((0, 1), repeat=n))
        for ours in range(n + 1):
            uneven = abs(2 * ours - n)
            count = sum(c for k, c in heads.items() if abs(2 * k - n) >= uneven)
            assert mcnemar(ours, n - ours) == pytest.approx(count / 2**n)


@quick
@given(st.integers(0, 200), st.integers(0, 200))
def test_mcnemar_is_scipys_binomial_test(ours: int, theirs: int) -> None:
    assert mcnemar(ours, theirs) == mcnemar(theirs, ours)
    if ours + theirs:
        expected = binomtest(ours, ours + theirs).pvalue
        assert mcnemar(ours, theirs) == pytest.approx(expected, rel=1e-9, abs=1e-300)


def test_mcnemar_known_values() -> None:
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(0, 5) == 2 / 32
    assert mcnemar(6, 0) == 2 / 64
    assert mcnemar(1, 7) == 18 / 256
    assert mcnemar(3000, 2000) < 1e-40  # no float holds 2 ** 5000
    with pytest.raises(ValueError, match="no counts"):
        mcnemar(-1, 2)


def test_pass_at_1_of_single_runs_is_the_share_with_wilson() -> None:
    estimate = pass_at_1({"a": [True], "b": [False], "c": [True]})
    assert estimate is not None
    assert (estimate.value, estimate.n, estimate.kind) == (pytest.approx(2 / 3), 3, "wilson")
    assert (estimate.low, estimate.high) == wilson(2 / 3, 3)
    assert pass_at_1({}) is None
    assert pass_at_1({"a": []}) is None


def test_pass_at_1_weighs_instances_and_not_runs() -> None:
    estimate = pass_at_1({"a": [True], "b": [False, False, False], "c": []})
    assert estimate is not None
    assert (estimate.value, estimate.n, estimate.kind) == (0.5, 2, "bootstrap")


def test_pass_at_1_without_spread_has_an_interval_all_the_same() -> None:
    """Four seeds that all failed on two instances do not show that the rate is 0."""
    estimate = pass_at_1({"a": [False] * 4, "b": [False] * 4})
    assert estimate is not None
    assert estimate.kind == "wilson over instances"
    assert (estimate.low, estimate.high) == wilson(0, 2)
    half = pass_at_1({name: [True, False] for name in "abc"})
    assert half is not None
    assert half.low < 0.5 < half.high


@pytest.mark.parametrize("rates", [[0, 0.5, 1, 1], [0, 0, 0, 0.25, 1], [0.2, 0.4, 0.6, 0.6, 1]])
def test_bootstrap_has_the_quantiles_of_all_resamples(rates: list[float]) -> None:
    every = [sum(draw) / len(rates) for draw in itertools.product(rates, repeat=len(rates))]
    # Between 2.3 % and 2.7 %, since a quantile that falls between two atoms is found roughly.
    for bound, share in zip(bootstrap(rates), (0.025, 0.975), strict=True):
        least, most = np.quantile(every, [share - 0.002, share + 0.002])
        assert least - 1e-9 <= bound <= most + 1e-9


@quick
@given(st.lists(st.sampled_from([0, 1 / 3, 0.5, 1]), min_size=1, max_size=60))
def test_bootstrap_is_the_same_each_time_and_inside_the_data(rates: list[float]) -> None:
    low, high = bootstrap(rates, resamples=500)
    assert (low, high) == bootstrap(list(reversed(rates)), resamples=500)
    assert min(rates) - 1e-12 <= low <= high <= max(rates) + 1e-12


def test_bootstrap_narrows_with_the_root_of_n() -> None:
    low, high = bootstrap([0, 1] * 50)
    wide_low, wide_high = bootstrap([0, 1] * 8)
    assert (wide_high - wide_low) / (high - low) == pytest.approx(2.5, rel=0.1)
    assert high - low == pytest.approx(2 * 1.96 * 0.05, rel=0.05)


def test_pairs_are_runs_that_both_sides_have() -> None:
    ours = {("a", 0): True, ("b", 0): True, ("c", 0): False, ("d", 0): True}
    theirs = {("a", 0): True, ("b", 0): False, ("c", 0): True, ("e", 0): False, ("d", 1): False}
    found = paired(ours, theirs)
    assert found is not None
    assert (found.pairs, found.only_ours, found.only_theirs) == (3, 1, 1)
    assert found.p == 1.0
    assert not found.repeated
    assert paired(ours, {("z", 0): True}) is None


def test_pairs_of_several_seeds_are_said_to_depend() -> None:
    ours = {("a", seed): True for seed in range(6)}
    theirs = {("a", seed): False for seed in range(6)}
    found = paired(ours, theirs)
    assert found is not None
    assert (found.only_ours, found.p, found.repeated) == (6, 2 / 64, True)


points = st.lists(
    st.tuples(st.integers(1, 40), st.floats(0, 500, allow_nan=False)),
    min_size=2,
    max_size=12,
    unique_by=lambda point: point[0],
)


@quick
@given(st.lists(points, min_size=1, max_size=5))
def test_slope_is_least_squares_with_an_intercept_for_each_run(
    runs: list[list[tuple[float, float]]],
) -> None:
    rows, values = [], []
    for number, run in enumerate(runs):
        for turn, seconds in run:
            rows.append([turn, *(float(number == other) for other in range(len(runs)))])
            values.append(seconds)
    expected = np.linalg.lstsq(np.array(rows), np.array(values), rcond=None)[0][0]
    found = slope(runs)
    assert found is not None
    assert found.per_turn == pytest.approx(expected, abs=1e-6)
    assert (found.n, found.runs) == (len(values), len(runs))


def test_slope_of_one_run_is_the_line() -> None:
    turns = np.arange(2, 9)
    seconds = 3 + 0.5 * turns + np.array([0.1, -0.2, 0.0, 0.3, -0.1, 0.0, -0.1])
    found = slope([list(zip(turns.tolist(), seconds.tolist(), strict=True))])
    assert found is not None
    assert found.per_turn == pytest.approx(np.polyfit(turns, seconds, 1)[0])


def test_slope_is_not_tilted_by_a_slow_run_that_ends_early() -> None:
    short = [(2.0, 90.0), (3.0, 91.0)]
    long = [(float(turn), 1.0 + turn) for turn in range(2, 12)]
    found = slope([short, long, [(2.0, 5.0)], []])
    assert found is not None
    assert found.per_turn == pytest.approx(1.0)
    assert (found.n, found.runs) == (12, 2)  # one turn alone shows no slope
    assert slope([[(2.0, 5.0)], []]) is None


def test_mean() -> None:
    assert mean([]) is None
    assert mean(iter([1, 2, 6])) == 3
