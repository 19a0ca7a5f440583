"""Choosing tokens: greedy, and draws that depend on seed and position alone."""

from __future__ import annotations

import pytest
import torch
from cache_harness import random_ids, tiny
from scipy import stats

from cache import EvictingCache, Sampling, generate, preset

DRAWS = 1200
LOGITS = torch.tensor([2.0, -1.0, 0.5, 1.5, -3.0, 0.0])


def counts(sampling: Sampling, draws: int = DRAWS) -> list[int]:
    out = [0] * len(LOGITS)
    for position in range(draws):
        out[sampling.choose(LOGITS, position=position)] += 1
    return out


def test_temperature_zero_is_argmax_whatever_the_seed():
    for seed in range(5):
        assert Sampling(seed=seed).choose(LOGITS, position=seed) == 0
    assert Sampling().choose(torch.tensor([1.0, 3.0, 3.0]), position=0) == 1


@pytest.mark.parametrize("temperature", [0.7, 2.5])
def test_frequencies_follow_the_softmax(temperature):
    """Chi-square over 1,200 positions, p > 0.001."""
    expected = (LOGITS.double() / temperature).softmax(-1).numpy() * DRAWS
    assert stats.chisquare(counts(Sampling(temperature, seed=4)), expected).pvalue > 0.001


@pytest.mark.parametrize(("top_p", "size"), [(1e-9, 1), (0.49, 1), (0.7, 2), (0.98, 5)])
def test_top_p_keeps_the_smallest_set_with_that_mass(top_p, size):
    """Chi-square within the set, p > 0.001; nothing outside it is ever drawn."""
    probabilities = LOGITS.double().softmax(-1)
    order = probabilities.argsort(descending=True)
    mass = probabilities[order].cumsum(0)
    assert int((mass < top_p).sum()) + 1 == size  # by definition
    nucleus = order[:size].tolist()
    seen = counts(Sampling(1.0, top_p=top_p, seed=9))
    assert sum(seen[i] for i in nucleus) == DRAWS
    if size > 1:
        share = probabilities[nucleus] / probabilities[nucleus].sum()
        assert stats.chisquare([seen[i] for i in nucleus], share.numpy() * DRAWS).pvalue > 0.001


def test_a_draw_depends_on_seed_and_position_alone():
    flat = torch.zeros(1000)

    def draws(seed, positions):
        return [Sampling(1.0, seed=seed).choose(flat, position=p) for p in positions]

    assert draws(1, range(50)) == draws(1, range(50))
    assert draws(1, [40, 3]) == [draws(1, range(50))[i] for i in (40, 3)]
    assert draws(1, range(50)) != draws(2, range(50))
    assert len(set(draws(1, range(50)))) > 40


def test_sampling_does_not_share_draws_with_evictions():
    """The same seed serves both; layer 0 of step 0 must not be the draw of position 0."""
    import oracles

    sampling = Sampling(1.0, seed=5)

    class Config:
        seed, samples = 5, 1

    fine = torch.zeros(100_000)
    tokens = [sampling.choose(fine, position=p) for p in range(20)]
    evictions = [int(oracles.uniforms(Config, 0, 0, 0, p)[0] * 100_000) for p in range(20)]
    assert not set(tokens) & set(evictions)


def test_a_resumed_run_goes_on_as_the_undisturbed_one():
    model = tiny("llama-g4-kv1")
    ids = random_ids(40, seed=0)
    sampling = Sampling(1.0, top_p=0.9, seed=3)

    def cache():
        return EvictingCache(model, preset("dense"))

    whole = generate(model, ids, cache(), max_new_tokens=20, sampling=sampling)
    rest = generate(model, ids + whole[:11], cache(), max_new_tokens=9, sampling=sampling)
    assert rest == whole[11:]
    other = generate(
        model, ids, cache(), max_new_tokens=20, sampling=Sampling(1.0, top_p=0.9, seed=4)
    )
    assert other != whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.1}, "top_p=1.1"),
    ],
)
def test_values_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)
