"""Budgets of layers and heads: exact, within bounds, and those of the definitions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import allocation_oracles as oracle
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from cache import preset
from cache.allocation import apportion, head_counts, layer_counts, pyramid_shares
from cache.budgets import blocks_to_keep
from cache.config import DensityBudget

many = settings(max_examples=150, deadline=None)
counts = st.integers(0, 60)
alphas = st.sampled_from([0.0, 0.1, 0.2, 0.25, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0])


def pyramid_config(**changes: Any) -> Any:
    return preset("snapkv", layer_budgets="pyramid", **changes)


# --- apportion ----------------------------------------------------------------------------------


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[float], int, list[int]]:
    """Ideals, in eighths so that floats hold them exactly, a total, and caps."""
    length = draw(st.integers(1, 9))
    eighths = draw(st.lists(st.integers(0, 400), min_size=length, max_size=length))
    caps = draw(st.lists(counts, min_size=length, max_size=length))
    return [n / 8 for n in eighths], draw(st.integers(0, sum(caps) + 5)), caps


@many
@given(problems())
@example(([0.0], 0, [0]))
@example(([1.5, 1.5], 3, [2, 2]))
@example(([2.5, 2.5, 0.0], 5, [5, 5, 5]))
@example(([100.0, 0.0, 0.0], 10, [4, 9, 9]))
def test_shares_add_up_and_stay_in_bounds(problem: tuple[list[float], int, list[int]]) -> None:
    ideal, total, caps = problem
    got = apportion(ideal, total, caps)
    assert all(isinstance(x, int) for x in got)
    assert sum(got) == min(total, sum(caps))
    assert all(0 <= x <= cap for x, cap in zip(got, caps, strict=True))
    assert got == oracle.apportion(ideal, total, caps)


@many
@given(st.lists(st.integers(0, 200), min_size=1, max_size=9))
def test_shares_are_the_ideals_rounded_where_these_add_up(quarters: list[int]) -> None:
    assume(sum(quarters) % 4 == 0)
    ideal = [n / 4 for n in quarters]
    got = apportion(ideal, sum(quarters) // 4, [100] * len(ideal))
    assert all(abs(x - i) < 1 for x, i in zip(got, ideal, strict=True))


@many
@given(problems(), counts)
def test_a_larger_ideal_never_gets_less(
    problem: tuple[list[float], int, list[int]], cap: int
) -> None:
    ideal, total, _ = problem
    got = apportion(ideal, total, [cap] * len(ideal))
    cut = [min(share, cap) for share in ideal]  # beyond the cap all are alike
    for i, x in zip(cut, got, strict=True):
        assert all(x >= y for j, y in zip(cut, got, strict=True) if i > j)


def test_equal_remainders_go_to_the_lower_index() -> None:
    assert apportion([1.5, 1.5, 1.5, 1.5], 6, [9] * 4) == [2, 2, 1, 1]
    assert apportion([0.0, 0.0, 0.0], 4, [9] * 3) == [2, 1, 1]


def test_what_a_full_one_cannot_take_is_spread_evenly() -> None:
    assert apportion([12.0, 3.0, 0.0], 15, [6, 9, 9]) == [6, 6, 3]
    assert apportion([12.0, 3.0, 0.0], 15, [6, 4, 9]) == [6, 4, 5]


# --- layers -------------------------------------------------------------------------------------


@many
@given(st.integers(1, 40), st.integers(0, 300), st.floats(1, 50), st.integers(0, 900))
@example(1, 7, 20.0, 900)
@example(32, 0, 20.0, 900)
@example(4, 10, 1.0, 900)
@example(4, 10, 20.0, 10)
def test_a_pyramid_is_an_arithmetic_progression(
    layers: int, mean: int, beta: float, room: int
) -> None:
    cap = mean + room
    shares = pyramid_shares(mean, layers, beta, cap)
    expected = oracle.pyramid(mean, layers, beta, cap)
    assert len(shares) == layers
    assert [float(x) for x in shares] == pytest.approx([float(x) for x in expected], abs=1e-9)
    assert float(sum(shares)) == pytest.approx(layers * mean)
    if layers > 1:
        low, high = float(shares[-1]), float(shares[0])
        assert -1e-9 <= low <= high + 1e-9 <= cap + 2e-9
        assert low == pytest.approx(mean / beta) or high == pytest.approx(cap)
        steps = [float(a - b) for a, b in itertools.pairwise(shares)]
        assert steps == pytest.approx([(high - low) / (layers - 1)] * (layers - 1), abs=1e-9)


@st.composite
def layer_problems(draw: st.DrawFn) -> tuple[bool, dict[str, Any]]:
    """Whether heads may differ, what layers hold, and a target between what is forced and what
    they hold on average."""
    adaptive = draw(st.booleans())
    layers, heads = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    forced = draw(st.integers(0, 6))
    unit = 1 if adaptive else heads
    held = st.integers(forced * heads, 80 * heads).map(lambda count: count // unit * unit)
    present = draw(
        st.one_of(
            st.integers(forced, 80).map(lambda n: [n * heads] * layers),
            st.lists(held, min_size=layers, max_size=layers).map(lambda ns: sorted(ns)[::-1]),
        )
    )
    target = draw(st.integers(forced, max(forced, sum(present) // (layers * heads))))
    return adaptive, {"target": target, "forced": forced, "present": present, "heads": heads}


@many
@given(layer_problems(), st.sampled_from([1, 1.5, 2, 4, 20, 100]))
@example((False, {"target": 3, "forced": 3, "present": [18, 18, 18], "heads": 2}), 20)
@example((True, {"target": 5, "forced": 1, "present": [27], "heads": 3}), 20)
@example((True, {"target": 4, "forced": 1, "present": [27, 13, 8], "heads": 3}), 20)
def test_layers_add_up_keep_what_is_forced_and_have_what_they_keep(
    problem: tuple[bool, dict[str, Any]], beta: float
) -> None:
    adaptive, sizes = problem
    present, heads = sizes["present"], sizes["heads"]
    config = pyramid_config(pyramid_beta=beta, head_budgets="adaptive" if adaptive else "uniform")
    got = layer_counts(config, **sizes)
    assert all(isinstance(count, int) for count in got)
    assert sum(got) == len(present) * heads * sizes["target"]  # on the block, not on average
    must = sizes["forced"] * heads
    assert all(must <= x <= y for x, y in zip(got, present, strict=True))
    assert got == sorted(got, reverse=True), "a higher layer got more"
    assert got == [must + free for free in oracle.layer_free(config, **sizes)]
    if not adaptive:
        assert all(count % heads == 0 for count in got)
    if beta == 1 and len(set(present)) == 1:
        assert got == [sizes["target"] * heads] * len(present)


@many
@given(layer_problems())
def test_without_a_pyramid_layers_are_equal(problem: tuple[bool, dict[str, Any]]) -> None:
    adaptive, sizes = problem
    config: Any = preset("snapkv", head_budgets="adaptive" if adaptive else "uniform")
    got = layer_counts(config, **sizes)
    assert got == [sizes["target"] * sizes["heads"]] * len(sizes["present"])


def factory(length: int, capacity: int, window: int, layers: int, beta: int = 20) -> list[int]:
    """Blocks per layer by the rule that baselines.md gives for KVCache-Factory: integer steps."""
    base = capacity - window
    low = base // beta
    high = 2 * base - low
    if high >= length - window:
        high, low = length - window, 2 * base - (length - window)
    step = (high - low) // (layers - 1)
    return [high - layer * step + window for layer in range(layers)]


@pytest.mark.parametrize(
    ("length", "window", "target", "table"),
    [
        (4096, 64, 819, (1537, 111, 824)),
        (4096, 8, 819, (1590, 71, 830)),
        (8192, 64, 1638, (3134, 158, 1646)),
    ],
)
def test_the_progression_is_factorys_but_for_its_rounding(
    length: int, window: int, target: int, table: tuple[int, int, int]
) -> None:
    """Factory floors the step between layers, and so overshoots; ours is exact (fault 14)."""
    theirs = factory(length, target, window, 32)
    assert (theirs[0], theirs[-1], math.floor(sum(theirs) / 32)) == table
    got = layer_counts(
        pyramid_config(window=window), target=target, forced=window, present=[length] * 32, heads=1
    )
    assert sum(got) == 32 * target < sum(theirs)
    # Their step is short of the true one by less than 1, and their ends by less than 1 and 2.
    for layer, (x, y) in enumerate(zip(got, theirs, strict=True)):
        assert -2 - layer <= x - y <= 2
    steps = [a - b for a, b in itertools.pairwise(got)]
    assert max(steps) - min(steps) <= 1


def test_a_pyramid_is_never_uniform_in_silence() -> None:
    """kvpress falls back to equal layers unless the top one keeps a whole window (fault 14).

    Here a pyramid is one for every window and density, until a layer has no room above the mean.
    """
    for window in (8, 64, 256):
        for target in range(window + 8, 1000, 16):
            got = layer_counts(
                pyramid_config(window=window),
                target=target,
                forced=window,
                present=[1024] * 32,
                heads=1,
            )
            assert got[0] > target > got[-1] >= window
    full = layer_counts(pyramid_config(), target=1024, forced=32, present=[1024] * 32, heads=1)
    assert full == [1024] * 32


# --- heads --------------------------------------------------------------------------------------


@st.composite
def head_problems(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Scores [H, N] with ties, which of them are candidates, and how many stay."""
    heads, blocks = draw(st.integers(1, 6)), draw(st.integers(1, 14))
    size = heads * blocks
    values = draw(st.lists(st.integers(0, 20), min_size=size, max_size=size))
    chosen = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    candidates = torch.tensor(chosen).view(heads, blocks)
    scores = torch.tensor(values, dtype=torch.float64).view(heads, blocks) / 16
    return scores, candidates, draw(st.integers(0, int(candidates.sum())))


def by_block(scores: torch.Tensor, candidates: torch.Tensor) -> list[dict[int, float]]:
    return [
        {block: float(x) for block, (x, c) in enumerate(zip(row, own, strict=True)) if c}
        for row, own in zip(scores, candidates, strict=True)
    ]


def split(
    scores: torch.Tensor,
    candidates: torch.Tensor,
    total: int,
    alpha: float,
    normalize: bool = False,
) -> list[int]:
    out = head_counts(scores, candidates, total, floor=alpha, normalize=normalize)
    assert len(out) == scores.shape[0]
    assert all(isinstance(count, int) for count in out)
    return out


@many
@given(head_problems(), alphas)
def test_heads_add_up_and_are_as_defined(
    problem: tuple[torch.Tensor, torch.Tensor, int], alpha: float
) -> None:
    scores, candidates, total = problem
    got = split(scores, candidates, total, alpha)
    assert sum(got) == total
    caps = candidates.sum(-1).tolist()
    assert all(0 <= x <= cap for x, cap in zip(got, caps, strict=True))
    assert got == oracle.head_free(by_block(scores, candidates), total, alpha=alpha)


@many
@given(head_problems())
def test_without_a_floor_the_best_of_the_layer_stay(
    problem: tuple[torch.Tensor, torch.Tensor, int],
) -> None:
    scores, candidates, total = problem
    got = split(scores, candidates, total, 0.0)
    assert got == oracle.votes(by_block(scores, candidates), total)


@many
@given(head_problems(), alphas)
def test_a_floor_is_kept_where_there_is_enough(
    problem: tuple[torch.Tensor, torch.Tensor, int], alpha: float
) -> None:
    scores, _, total = problem
    everywhere = torch.ones_like(scores, dtype=torch.bool)
    heads, blocks = scores.shape
    got = split(scores, everywhere, total, alpha)
    # Nobody has more votes than candidates, so no head is over its cap and none loses its share.
    assert min(got) >= math.floor(Fraction(alpha) * Fraction(total, heads))
    if alpha == 1:
        assert max(got) - min(got) <= 1
        assert got == sorted(got, reverse=True)
    assert max(got) <= blocks


@many
@given(head_problems(), alphas)
def test_a_share_of_the_mass_can_be_counted_in(
    problem: tuple[torch.Tensor, torch.Tensor, int], alpha: float
) -> None:
    """Scores are powers of two, so that products with a share are compared without rounding."""
    scores, candidates, total = problem
    scores = 2.0 ** -(scores * 16).round()
    own = by_block(scores, candidates)
    weighted = oracle.normalized(own, total)
    flat = sorted(x for head in weighted for x in head.values())
    assume(all(b == a or b - a > 1e-9 * b for a, b in itertools.pairwise(flat)))
    got = split(scores, candidates, total, alpha, normalize=True)
    assert sum(got) == total
    assert got == oracle.head_free(own, total, alpha=alpha, normalize=True)


def test_one_head_gets_all_and_no_block_none() -> None:
    scores, everywhere = torch.rand(1, 9).double(), torch.ones(1, 9, dtype=torch.bool)
    assert split(scores, everywhere, 5, 0.2) == [5]
    assert split(torch.rand(3, 9).double(), torch.ones(3, 9, dtype=torch.bool), 0, 0.2) == [0] * 3
    assert split(torch.zeros(3, 9).double(), torch.ones(3, 9, dtype=torch.bool), 7, 0.2) == [
        3,
        2,
        2,
    ]


def test_a_peaked_head_gets_more() -> None:
    scores = torch.tensor([[8.0, 0.1, 0.1, 0.1], [4.0, 3.0, 2.0, 1.0]]).double()
    everywhere = torch.ones(2, 4, dtype=torch.bool)
    assert split(scores, everywhere, 4, 0.0) == [1, 3]
    assert split(scores, everywhere, 4, 0.5) == [2, 2]  # 1.5 and 2.5: the lower head
    assert split(scores, everywhere, 4, 1.0) == [2, 2]


# --- rounding -----------------------------------------------------------------------------------


def kept(density: float, tokens: int, **changes: Any) -> int:
    budget = DensityBudget(density=density, **{"min_free": 1, **changes})
    return blocks_to_keep(budget, base=tokens, forced=0, block_size=1)


def test_no_block_is_lost_to_rounding() -> None:
    """Elsewhere int(10 * (1 - .8)) is 1 and int(100 * (1 - .9)) is 9 (fault 13)."""
    assert (int(10 * (1 - 0.8)), int(100 * (1 - 0.9))) == (1, 9)
    assert (kept(1 - 0.8, 10), kept(1 - 0.9, 100)) == (2, 10)
    assert kept(0.01, 10) == 1  # never nothing
    for hundredths in range(1, 101):
        for tokens in range(1, 120):
            exact = Fraction(hundredths * tokens, 100)
            wanted = max(1, math.floor(exact + Fraction(1, 2)))
            # 1 - x in floats, as a caller with a compression ratio would say it.
            assert kept(1 - (100 - hundredths) / 100, tokens) in wanted_by(exact, wanted)
    for layers in range(1, 40):
        for target in range(1, 40):
            got = layer_counts(
                pyramid_config(), target=target, forced=0, present=[40] * layers, heads=1
            )
            assert sum(got) == layers * target
            assert got[0] >= 1
    for heads in range(1, 9):
        scores = torch.arange(heads * 20).double().view(heads, 20)
        everywhere = torch.ones_like(scores, dtype=torch.bool)
        for total in range(heads * 20 + 1):
            for tenths in range(11):
                assert sum(split(scores, everywhere, total, tenths / 10)) == total


def wanted_by(exact: Fraction, wanted: int) -> Sequence[int]:
    """A half may go either way: 1 - x is a float just above or below it."""
    return (wanted, wanted - 1) if exact % 1 == Fraction(1, 2) and wanted > 1 else (wanted,)
