"""The counter-based generator: known answers, uniformity, independence, and results that do not depend on chunks."""

from fractions import Fraction
from itertools import product
from math import cos, pi

import pytest
import torch
from scipy import stats

from kfs.losses import draws
from kfs.losses.draws import Draws, threefry
from kfs.losses.poisson import poisson_quantile
from kfs.runtime import sync

CPU = torch.device("cpu")
# Significance of the statistical tests. The numbers are fixed, so each test always passes or always fails.
LEVEL = 1e-3


@pytest.mark.parametrize(
    ("key", "counter", "answer"),
    [  # published with the Random123 library (Salmon et al., 2011) for Threefry-2x32-20
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_known_answers(key: tuple[int, int], counter: tuple[int, int], answer: tuple[int, int]) -> None:
    w0, w1 = threefry(key, torch.tensor(counter[0]), torch.tensor(counter[1]))
    assert (int(w0), int(w1)) == answer


def test_numbers_are_uniform_and_normal() -> None:
    u = Draws(0, 0, 0).uniform(4000, (5,), CPU)
    z = Draws(0, 0, 0).normal(4000, (5,), CPU)
    assert u.dtype == z.dtype == torch.float64
    assert 0 < u.min() <= u.max() < 1
    for entry in range(5):
        assert stats.kstest(u[:, entry], "uniform").pvalue > LEVEL
        assert stats.kstest(z[:, entry], "norm").pvalue > LEVEL


def test_numbers_are_transforms_of_known_words() -> None:
    """Uniform numbers are midpoints of 2^52 intervals; normal ones have a radius by Rayleigh's quantile function."""
    seed, first, sample = (5 << 32) + 6, 100, 3
    key = threefry((6, 5), 0, sample)
    u, z = (draw(4, (3,), CPU) for draw in (Draws(seed, first, sample).uniform, Draws(seed, first, sample).normal))
    for datum, entry in product(range(4), range(3)):
        w0, w1 = threefry(key, first + datum, entry)
        assert u[datum, entry].item() == float(Fraction((w0 * 2**32 + w1) // 2**12 * 2 + 1, 2**53))
        radius = stats.rayleigh.isf((w0 + 0.5) / 2**32)
        assert z[datum, entry].item() == pytest.approx(radius * cos(2 * pi * w1 / 2**32), rel=1e-13, abs=1e-13)


@pytest.mark.parametrize("neighbour", [Draws(1, 0, 0), Draws(0, 1, 0), Draws(0, 0, 1), Draws(1 << 40, 0, 0)])
def test_neighbouring_seeds_data_and_samples_are_independent(neighbour: Draws) -> None:
    one, other = (draws.uniform(2000, (3,), CPU).flatten() for draws in (Draws(0, 0, 0), neighbour))
    assert stats.pearsonr(one, other).pvalue > LEVEL
    table = torch.bincount((8 * one).long() * 8 + (8 * other).long(), minlength=64)
    assert stats.chisquare(table).pvalue > LEVEL


def test_entries_of_one_datum_are_independent() -> None:
    u = Draws(3, 0, 0).uniform(3000, (3,), CPU)
    for i in range(3):
        for j in range(i):
            assert stats.pearsonr(u[:, i], u[:, j]).pvalue > LEVEL
    successive = u.flatten()
    assert stats.pearsonr(successive[:-1], successive[1:]).pvalue > LEVEL


def test_numbers_depend_on_the_index_alone() -> None:
    whole = Draws(7, 100, 2).uniform(10, (2, 3), CPU)
    assert torch.equal(Draws(7, 104, 2).uniform(3, (2, 3), CPU), whole[4:7])
    assert torch.equal(Draws(7, 100, 2).uniform(10, (6,), CPU).reshape(10, 2, 3), whole)
    assert Draws(7, 100, 2).uniform(0, (2,), CPU).shape == (0, 2)
    assert Draws(7, 0, 0).uniform(2, (), CPU).shape == (2,)


def test_many_numbers_are_the_same_as_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator computes many numbers itself, by tensor operations; NumPy computes few."""
    monkeypatch.setattr(sync, "is_asynchronous", lambda _: True)
    many = Draws(3, 5, 1).uniform(70_000, (1,), CPU)
    monkeypatch.setattr(draws, "threefry", None)  # not used again
    few = [Draws(3, 5 + start, 1).uniform(10_000, (1,), CPU) for start in range(0, 70_000, 10_000)]
    assert torch.equal(many, torch.cat(few))


def test_poisson_quantiles_are_scipys() -> None:
    rate = torch.tensor([0.0, 1e-8, 0.3, 1.0, 7.5, 120.0, 1e4, 1e7], dtype=torch.float64)
    for u in (2.0**-53, 1e-6, 0.1, 0.5, 0.9, 1 - 1e-6, 1 - 2.0**-52):
        q = poisson_quantile(torch.full_like(rate, u), rate)
        expected = torch.from_numpy(stats.poisson.ppf(u, rate.numpy()))
        expected[0] = 0
        assert torch.equal(q[:-2], expected[:-2]), u
        # For large rates the two libraries' incomplete gamma functions round differently in the far tails.
        assert ((q - expected).abs() / (1 + rate.sqrt())).max() < 0.05


def test_poisson_quantiles_of_enormous_rates_are_normal() -> None:
    rate = torch.tensor([1e15, 1e20], dtype=torch.float64)
    u = torch.tensor([0.5, 0.9], dtype=torch.float64)
    expected = rate + rate.sqrt() * torch.from_numpy(stats.norm.ppf(u.numpy()))
    assert torch.allclose(poisson_quantile(u, rate), expected, rtol=1e-12)
