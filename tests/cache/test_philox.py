"""The counter-based generator against published answers, and its uniforms as random numbers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import oracles
import pytest
import torch
from scipy import stats

from cache.philox import philox4x32, uniforms

# Known answers of the Random123 distribution for philox4x32-10: counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def words(counter, key) -> tuple[int, ...]:
    return tuple(int(w) for w in philox4x32(tuple(torch.tensor([c]) for c in counter), key))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter, key, expected):
    assert words(counter, key) == expected
    assert oracles.philox4x32(counter, key) == expected


def test_random_counters_and_keys_against_unbounded_integers():
    numbers = np.random.default_rng(0).integers(0, 2**32, size=(300, 6)).tolist()
    for *counter, k0, k1 in numbers:
        assert words(counter, (k0, k1)) == oracles.philox4x32(counter, (k0, k1))


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("seed", [0, 7, 2**32, 2**64 - 1])
def test_layout_that_recorded_runs_depend_on(seed, count):
    got = uniforms(
        seed,
        11,
        torch.arange(3)[:, None, None],
        torch.arange(2)[None, :, None],
        torch.tensor([0, 5, 2**31, 2**32 - 1]).expand(3, 2, 4),
        count,
    )
    config = SimpleNamespace(seed=seed, samples=count)
    for layer in range(3):
        for head in range(2):
            for i, block in enumerate([0, 5, 2**31, 2**32 - 1]):
                expected = oracles.uniforms(config, layer, head, block, 11)
                assert got[layer, head, i].tolist() == expected


def test_every_part_of_the_address_matters_and_batching_does_not():
    base = {"seed": 3, "step": 4, "layer": 5, "head": 6, "block": 7}

    def one(**changes):
        at = {**base, **changes}
        places = [torch.tensor([at[k]]) for k in ("layer", "head", "block")]
        return uniforms(at["seed"], at["step"], *places, 4)[0].tolist()

    streams = [one(), *(one(**{name: 99}) for name in base)]
    streams += [one(layer=6, head=5), one(step=7, block=4), one(seed=3 + 2**32)]
    flat = [u for stream in streams for u in stream]
    assert len(set(flat)) == len(flat)
    many = uniforms(3, 4, torch.tensor([5]), torch.tensor([6]), torch.arange(20), 4)
    assert many[7].tolist() == one()
    more = uniforms(3, 4, torch.tensor([5]), torch.tensor([6]), torch.tensor([7]), 9)
    assert more[0, :4].tolist() == one()


def test_uniform_and_independent_across_blocks_steps_and_draws():
    """Kolmogorov-Smirnov and rank correlations of 40,000 draws, fixed seed, p > 0.001."""
    draws = torch.stack(
        [
            uniforms(1, step, torch.tensor(0), torch.tensor(0), torch.arange(200), 5)
            for step in range(40)
        ]
    )  # [step, block, i]
    assert draws.min() > 0
    assert draws.max() < 1
    assert stats.kstest(draws.flatten().numpy(), "uniform").pvalue > 0.001
    for one, other in [
        (draws[:, :-1], draws[:, 1:]),
        (draws[:-1], draws[1:]),
        (draws[..., :-1], draws[..., 1:]),
    ]:
        result = stats.spearmanr(one.flatten().numpy(), other.flatten().numpy())
        assert result.pvalue > 0.001


def test_never_zero_nor_one():
    """log(0) would be -inf and u = 1 would tie at 0: 53 bits, moved half a step in."""
    # The smallest and largest words there are, through the same arithmetic as the layout's.
    assert (0 + 0.5) / 2**53 > 0
    draws = uniforms(0, 0, torch.tensor(0), torch.tensor(0), torch.arange(200_000), 2)
    assert ((draws > 0) & (draws < 1)).all()
    assert ((draws * 2**53) % 1 == 0.5).float().mean() > 0.4  # the half step is there
