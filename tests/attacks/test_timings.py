"""The statistics of make timings; what they are used for is no test of the suite, as no timing is."""

import random

import pytest

from .timings import TOLD_BELOW_P, ks


def test_samples_of_one_distribution_are_not_told_apart() -> None:
    chance = random.Random(3)
    found = [ks(*([chance.expovariate(1) for _ in range(400)] for _ in range(2))) for _ in range(200)]
    assert sum(p < 0.05 for p in found) < 20  # ten are to be expected
    assert ks([1.0] * 50, [1.0] * 70) == 1.0


@pytest.mark.parametrize("shift", [0.2, -0.2])
def test_a_shift_of_a_fifth_of_the_spread_is_found(shift: float) -> None:
    chance = random.Random(4)
    ones, others = [chance.gauss(0, 1) for _ in range(2000)], [chance.gauss(shift, 1) for _ in range(2000)]
    assert ks(ones, others) < TOLD_BELOW_P


def test_it_is_the_value_of_the_tables() -> None:
    """Two samples of 100 that lie 0.2 apart: 2 exp(-2 x^2) at x = 1.441, with Stephens' correction."""
    ones, others = list(range(100)), [20 + i for i in range(100)]
    assert ks(ones, others) == pytest.approx(0.0314, abs=0.0005)
