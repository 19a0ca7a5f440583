"""Choosing tokens: greedy, and draws that depend on seed and position alone."""

from __future__ import annotations

import pytest
import torch
from cache_harness import random_ids, tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from cache import EvictingCache, Sampling, generate, preset
from cache.philox import uniform, uniforms
from cache.sampling import choose_at_once, choose_rows

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


def by_the_letter(sampling: Sampling, logits: torch.Tensor, position: int) -> int:
    """Top-p with the whole vocabulary sorted, by loops."""
    weights = (logits.double() / sampling.temperature).softmax(-1).tolist()
    order = sorted(range(len(weights)), key=lambda token: -weights[token])  # stable
    nucleus, mass = [], 0.0
    for token in order:
        if mass >= sampling.top_p:
            break
        nucleus.append(token)
        mass += weights[token]
    zero = torch.zeros(1, dtype=torch.int64)
    left = float(uniforms(sampling.seed, position, zero + 0xFFFF, zero, zero, 1)) * mass
    reached = 0.0
    for token in nucleus:
        reached += weights[token]
        if reached > left:
            break
    return token


logit = st.sampled_from([-30.0, -2.0, -1.0, 0.0, 0.0, 0.5, 1.5, 3.0, 20.0]) | st.floats(-9, 9)


@settings(max_examples=70, deadline=None)
@given(data=st.data(), size=st.integers(1, 40), rows=st.integers(1, 4))
def test_rows_are_chosen_by_the_letter_alone_and_at_once(data, size, rows):
    """Ties, sharp and flat rows, greedy ones among them; the batched way gives the same ids."""
    logits = torch.tensor([[data.draw(logit) for _ in range(size)] for _ in range(rows)])
    samplings = [
        Sampling(
            data.draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])),
            data.draw(st.sampled_from([1e-9, 0.3, 0.95, 0.999999, 1.0])),
            seed=data.draw(st.integers(0, 2**64 - 1)),
        )
        for _ in range(rows)
    ]
    positions = [data.draw(st.integers(0, 2**32 - 1)) for _ in range(rows)]
    triples = list(zip(samplings, logits, positions, strict=True))
    expected = [
        by_the_letter(sampling, row, position) if sampling.temperature else int(row.argmax())
        for sampling, row, position in triples
    ]
    assert [s.choose(row, position=position) for s, row, position in triples] == expected
    assert choose_rows(logits, samplings, positions) == expected
    assert choose_at_once(logits, samplings, positions).tolist() == expected


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    step=st.integers(0, 2**32 - 1),
    layer=st.integers(0, 2**16 - 1),
    head=st.integers(0, 2**16 - 1),
    block=st.integers(0, 2**32 - 1),
)
def test_one_draw_is_the_first_of_many(seed, step, layer, head, block):
    places = [torch.tensor([each]) for each in (layer, head, block)]
    expected = uniforms(seed, step, *places, 3)[0, 0].item()
    assert uniform(seed, step, layer, head, block) == expected


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


def test_numbers_that_are_none_choose_something_in_range():
    """An index of -1 would end a CUDA process with all its sessions."""
    broken = torch.full((2, 6), float("nan"))
    drawn = choose_at_once(broken, [Sampling(0.7), Sampling(1.0, top_p=0.5)], [3, 4])
    assert all(0 <= token < 6 for token in drawn.tolist())
