"""What the paper proves of Nexus Sampling, as tests with fixed seeds and stated tolerances.

Theorem 4.2 is tested before normalising: after it, at H = 2, E[c] is a* exactly, by
exchangeability, and the printed statement does not hold.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import oracles
import pytest
import torch
from scipy import stats

from cache import preset
from cache.methods.nexus import nexus_weights, walk, walk_row_indices
from cache.philox import uniforms
from cache.selection import keep_largest, reservoir_priorities

P = 0.001  # the tests' level; seeds are fixed, so a pass stays a pass


def many_draws(count: int, blocks: int, samples: int, seed: int = 0) -> torch.Tensor:
    """[count, blocks, samples] from the cache's own generator: blocks dealt out as trials."""
    flat = uniforms(
        seed, 0, torch.tensor(0), torch.tensor(0), torch.arange(count * blocks), samples
    )
    return flat.reshape(count, blocks, samples)


# --- the reservoir ----------------------------------------------------------------------------


def order_law(weights: list[float], length: int) -> dict[tuple[int, ...], float]:
    """Exact law of the first `length` items drawn without replacement in proportion to weight."""
    exact = [Fraction(w).limit_denominator(10**6) for w in weights]
    law = {}
    for order in itertools.permutations(range(len(weights)), length):
        left, chance = sum(exact), Fraction(1)
        for item in order:
            chance *= exact[item] / left
            left -= exact[item]
        law[order] = float(chance)
    return law


@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_n1_is_sampling_without_replacement_in_proportion_to_weight(scale):
    """Chi-square of the ordered first two of five against the exact law, 40,000 trials."""
    weights = [0.40, 0.25, 0.20, 0.10, 0.05]
    law = order_law(weights, 2)
    assert math.isclose(sum(law.values()), 1)
    priorities = reservoir_priorities(
        scale * torch.tensor(weights, dtype=torch.float64).expand(40_000, 5),
        many_draws(40_000, 5, 1),
    )
    firsts = priorities.argsort(-1, descending=True)[:, :2].tolist()
    seen = dict.fromkeys(law, 0)
    for first, second in firsts:
        seen[first, second] += 1
    expected = [law[order] * 40_000 for order in law]
    assert stats.chisquare([seen[order] for order in law], expected).pvalue > P


def test_n1_inclusion_by_the_kept_mask_with_a_forced_block():
    """The same law for what `keep_largest` keeps: a forced block takes a place, draws nothing."""
    weights = torch.tensor([0.1, 0.5, 0.05, 0.2, 0.15], dtype=torch.float64)
    forced = torch.tensor([True, False, False, False, False]).expand(30_000, 5)
    priorities = reservoir_priorities(weights.expand(30_000, 5), many_draws(30_000, 5, 1, seed=2))
    kept = keep_largest(priorities, forced, 3)
    assert (kept.sum(-1) == 3).all()
    assert kept[:, 0].all()
    law = order_law(weights[1:].tolist(), 2)
    pairs = list(itertools.combinations(range(4), 2))
    exact = [law[a, b] + law[b, a] for a, b in pairs]
    seen = [int((kept[:, 1 + a] & kept[:, 1 + b]).sum()) for a, b in pairs]
    assert stats.chisquare(seen, np.array(exact) * 30_000).pvalue > P


@pytest.mark.parametrize("samples", [1, 5])
def test_inclusion_is_positive_and_monotone_in_weight(samples):
    weights = torch.tensor([0.001, 0.01, 0.05, 0.1, 0.2, 0.4], dtype=torch.float64)
    priorities = reservoir_priorities(
        weights.expand(40_000, 6), many_draws(40_000, 6, samples, seed=3)
    )
    kept = keep_largest(priorities, torch.zeros(40_000, 6, dtype=torch.bool), 2)
    rates = kept.double().mean(0)
    assert rates[0] > 0
    assert (rates.diff() > 0).all()


def test_many_samples_tend_to_top_k():
    weights = torch.tensor([0.9, 0.7, 0.5, 0.3], dtype=torch.float64)
    none = torch.zeros(300, 4, dtype=torch.bool)
    priorities = reservoir_priorities(weights.expand(300, 4), many_draws(300, 4, 2000, seed=4))
    kept = keep_largest(priorities, none, 2)
    assert kept[:, :2].all(-1).double().mean() > 0.99


@pytest.mark.parametrize("samples", [1, 5])
@pytest.mark.parametrize("weight", [0.05, 0.5, 2.0])
def test_mean_and_variance_of_the_priority(weight, samples):
    """E = w/(w+1) within 4 standard errors, Var = w/(n (w+1)^2 (w+2)) within 5 percent."""
    trials = 60_000
    log_sum = reservoir_priorities(
        torch.full((trials,), weight, dtype=torch.float64),
        many_draws(trials, 1, samples, seed=5)[:, 0],
    )
    pi = log_sum.exp() / samples
    mean, variance = weight / (weight + 1), weight / (samples * (weight + 1) ** 2 * (weight + 2))
    assert abs(pi.mean() - mean) < 4 * math.sqrt(variance / trials)
    assert abs(pi.var() / variance - 1) < 0.05


@pytest.mark.parametrize("samples", [1, 5])
def test_log_space_ranks_as_high_precision_where_float32_powers_underflow(samples):
    """At N = 2048 most u^(1/w) are zero in float32; for n = 1 another set is kept (fault 25)."""
    blocks, keep = 2048, 410
    shares = torch.from_numpy(np.random.default_rng(0).dirichlet(np.full(blocks, 2.0)))
    weights = 1.5 * shares
    u = uniforms(7, 0, torch.tensor(0), torch.tensor(0), torch.arange(blocks), samples)

    naive = (u.float() ** (1 / weights.float().unsqueeze(-1))).mean(-1)
    assert (naive == 0).float().mean() > 0.5

    exact = [oracles.priority(w, us) for w, us in zip(weights.tolist(), u.tolist(), strict=True)]
    order = sorted(range(blocks), key=exact.__getitem__, reverse=True)
    own = reservoir_priorities(weights, u)
    assert own.isfinite().all()
    assert own.argsort(descending=True).tolist() == order

    none = torch.zeros(blocks, dtype=torch.bool)
    assert keep_largest(own, none, keep).nonzero().flatten().tolist() == sorted(order[:keep])
    if samples == 1:
        wrong = keep_largest(naive, none, keep).nonzero().flatten().tolist()
        assert len(set(wrong) & set(order[:keep])) < 0.6 * keep


def test_weight_zero_is_last_and_not_nan():
    weights = torch.tensor([0.0, 1e-300, 0.5], dtype=torch.float64)
    priorities = reservoir_priorities(weights, many_draws(1, 3, 5)[0])
    assert priorities[0] == -math.inf
    assert not priorities.isnan().any()
    assert priorities.argsort().tolist() == [0, 1, 2]


def test_horvitz_thompson_is_unbiased():
    """Kept values over inclusion probabilities (Prop. 4.3): the mean, to 4 standard errors."""
    weights = [0.35, 0.25, 0.2, 0.15, 0.05]
    law = order_law(weights, 2)
    inclusion = torch.tensor(
        [sum(p for order, p in law.items() if j in order) for j in range(5)], dtype=torch.float64
    )
    values = torch.tensor([3.0, -2.0, 7.0, 0.5, 11.0], dtype=torch.float64)
    priorities = reservoir_priorities(
        torch.tensor(weights, dtype=torch.float64).expand(40_000, 5),
        many_draws(40_000, 5, 1, seed=6),
    )
    kept = keep_largest(priorities, torch.zeros(40_000, 5, dtype=torch.bool), 2)
    estimates = (kept * (values / inclusion)).sum(-1)
    error = estimates.std() / math.sqrt(40_000)
    assert abs(estimates.mean() - values.sum()) < 4 * error


def test_min_against_product():
    """Lemma 4.1: once below the cut is for ever under top-K, a factor under the reservoir."""
    rounds = torch.tensor(
        [[0.5, 0.3, 0.2, 0.0], [0.3, 0.15, 0.35, 0.2], [0.7, 0.2, 0.05, 0.05]], dtype=torch.float64
    )
    watched, trials = 1, 30_000
    none = torch.zeros(4, dtype=torch.bool)
    by_weight = [bool(keep_largest(row, none, 2)[watched]) for row in rounds]
    assert by_weight == [True, False, True]  # fell below the cut once: gone, min of the three
    survived = torch.ones(trials, dtype=torch.bool)
    product = 1.0
    for step, row in enumerate(rounds + 1e-9):
        u = many_draws(trials, 4, 1, seed=100 + step)
        kept = keep_largest(
            reservoir_priorities(row.expand(trials, 4), u), none.expand(trials, 4), 2
        )
        survived &= kept[:, watched]
        law = order_law((row * 1000).tolist(), 2)
        product *= sum(p for order, p in law.items() if watched in order)
    assert product > 0.1
    assert abs(survived.double().mean() - product) < 4 * math.sqrt(product * (1 - product) / trials)


# --- the walk ---------------------------------------------------------------------------------


def dirichlet_rows(trials: int, steps: int, concentration, seed: int) -> torch.Tensor:
    generator = np.random.default_rng(seed)
    return torch.from_numpy(generator.dirichlet(concentration, size=(trials, steps)))


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 16])
def test_walk_identity(steps):
    """Lemma A.4: C(H) = sum a(q) + sum M_q C(q-1), with M_q = a(q) a(q)^T, exactly."""
    (rows,) = (
        dirichlet_rows(1, steps, [0.4] * 9, seed=1) if steps else torch.zeros(1, 0, 9).double()
    )
    states = [walk(rows[:t]) for t in range(steps + 1)]
    assert (states[0] == 0).all()
    right = torch.zeros(9, dtype=torch.float64)
    for t in range(steps):
        right += rows[t] + torch.outer(rows[t], rows[t]) @ states[t]
    assert torch.allclose(states[-1], right, atol=1e-12, rtol=0)
    assert walk(rows).tolist() == pytest.approx(
        oracles.walk(rows.tolist()) if steps else [0.0] * 9, abs=1e-12
    )


HUBS = np.array([1.5, 0.6, 0.3, 0.3, 0.15, 0.15])  # Dirichlet law of i.i.d. rows
TRIALS = 400_000


def hub_moments() -> tuple[torch.Tensor, torch.Tensor]:
    """a* and Sigma of a Dirichlet law, from the textbook."""
    total = HUBS.sum()
    mean = HUBS / total
    covariance = (np.diag(mean) - np.outer(mean, mean)) / (total + 1)
    return torch.from_numpy(mean), torch.from_numpy(covariance)


def test_hub_amplification_at_two_steps():
    """Thm 4.2: E[C(2)] = B2 a* + h with h = Sigma a*, B2 = 1 + E[gamma2]; 5 standard errors."""
    mean, covariance = hub_moments()
    hub = covariance @ mean
    states = walk(dirichlet_rows(TRIALS, 2, HUBS, seed=2))
    b2 = 1 + (1 + mean @ mean)  # E[gamma2] = 1 + |a*|^2, rows being independent
    error = states.std(0) / math.sqrt(TRIALS)
    assert ((states.mean(0) - (b2 * mean + hub)).abs() < 5 * error).all()
    # The test can tell: without the hub term it fails by far.
    assert ((states.mean(0) - b2 * mean).abs() / error).max() > 20


def test_hub_amplification_at_three_steps():
    """The slope of E[C(3)] - B3 a* on h is within 5 percent of D3 = B1 + B2.

    B_t sums E[gamma] to step t. What the slope leaves is Sigma h: exactly
    E[C(3)] = B3 a* + D3 h + Sigma h, checked to 5 standard errors.
    """
    mean, covariance = hub_moments()
    hub = covariance @ mean
    states = walk(dirichlet_rows(TRIALS, 3, HUBS, seed=3))
    b1, b2 = 1.0, 2 + mean @ mean
    b3 = b2 + 1 + mean @ (b2 * mean + hub)
    rest = states.mean(0) - b3 * mean
    slope = (rest @ hub) / (hub @ hub)
    assert abs(slope / (b1 + b2) - 1) < 0.05
    error = states.std(0) / math.sqrt(TRIALS)
    assert ((rest - (b1 + b2) * hub - covariance @ hub).abs() < 5 * error).all()


@pytest.mark.parametrize("which", ["even", "newest", "all"])
@pytest.mark.parametrize(("rows", "steps"), [(16, 0), (16, 1), (16, 2), (16, 3), (16, 16), (7, 4)])
def test_rows_of_the_walk(rows, steps, which):
    if which == "all" or steps:
        assert walk_row_indices(rows, steps, which) == oracles.walk_rows(rows, steps, which)
    else:
        assert walk_row_indices(rows, steps, which) == []
    if (rows, steps, which) == (16, 3, "even"):
        assert walk_row_indices(16, 3, "even") == [0, 8, 15]  # round(7.5) goes to the even 8


# --- the weight -------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["even", "newest", "all"])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_weights_against_plain_loops_and_their_sum(steps, which):
    rows = dirichlet_rows(2, 16, [0.3] * 11, seed=4)
    config = preset("nexus", walk_steps=steps, walk_rows=which, recency_tiebreak=1e-3)
    got = nexus_weights(rows, config)
    assert got.dtype == torch.float64
    for own, each in zip(got, rows, strict=True):
        assert own.tolist() == pytest.approx(oracles.weights(each.tolist(), config), abs=1e-12)
    ranks = 1e-3 * 11 / 2  # sum of eps * r
    assert got.sum(-1).tolist() == pytest.approx([1 + (0.5 if steps else 0) + ranks] * 2)


def test_a_single_block_has_rank_zero_and_no_nan():
    weights = nexus_weights(torch.ones(4, 1, dtype=torch.float64), preset("nexus", window=4))
    assert weights.tolist() == [1.5]


def test_equal_weights_go_to_the_newer_block():
    none = torch.zeros(6, dtype=torch.bool)
    kept = keep_largest(torch.ones(6, dtype=torch.float64), none, 2)
    assert kept.nonzero().flatten().tolist() == [4, 5]
    rows = torch.full((16, 6), 1 / 6, dtype=torch.float64)
    weights = nexus_weights(rows, preset("nexus"))
    assert (weights.diff() > 0).all()


@pytest.mark.parametrize("count", [-1, 7])
def test_keeping_more_than_there_is_names_both(count):
    with pytest.raises(ValueError, match=f"{count} of 6"):
        keep_largest(torch.ones(6), torch.zeros(6, dtype=torch.bool), count)
