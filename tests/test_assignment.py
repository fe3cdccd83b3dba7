import collections
import itertools
import math
import random

import numpy as np
import pytest
import torch

from hdet.assignment import check_spread, deal, multipliers, slots


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 64])
@pytest.mark.parametrize("spread", [0.0, 1 / 9, 0.3, 0.99])
def test_linear_ladder_is_symmetric_around_one(size, spread):
    rungs = multipliers(size, spread)
    assert sum(rungs) / size == pytest.approx(1, abs=1e-15)
    assert all(low + high == pytest.approx(2) for low, high in zip(rungs, reversed(rungs), strict=True))
    assert rungs[0] >= 1 - spread - 1e-15
    assert rungs[-1] <= 1 + spread + 1e-15
    if size > 1 and spread > 0:
        assert (rungs[0], rungs[-1]) == pytest.approx((1 - spread, 1 + spread))
        assert rungs == sorted(rungs)


def test_log_ladder_by_hand():
    assert multipliers(2, 2.0, "log") == pytest.approx([0.4, 1.6])
    four = multipliers(4, 2.0, "log")
    assert (four[0], four[-1]) == pytest.approx((0.5 / 1.13839, 2 / 1.13839), abs=1e-4)
    assert sum(four) / 4 == pytest.approx(1)
    ratios = [b / a for a, b in itertools.pairwise(four)]
    assert ratios == pytest.approx([ratios[0]] * 3)
    assert multipliers(1, 2.0, "log") == [1.0]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8, 64, 1000])
def test_slots_are_a_bijection_in_every_round(size):
    for k in range(20):
        assert sorted(slots(size, 0, k, "learning_rate")) == list(range(size))


def test_slots_are_a_pure_function_of_seed_round_and_name():
    assert slots(8, 1, 2, "a") == slots(8, 1, 2, "a")
    different = {tuple(slots(8, *key)) for key in [(1, 2, "a"), (2, 2, "a"), (1, 3, "a"), (1, 2, "b")]}
    assert len(different) == 4
    # pinned: a change here would break the resume of every saved run
    assert slots(4, 0, 0, "learning_rate") == [2, 3, 0, 1]


def test_slots_are_uniform():
    counts = collections.Counter(tuple(slots(3, 0, k, "x")) for k in range(6000))
    assert len(counts) == 6
    chi_squared = sum((n - 1000) ** 2 / 1000 for n in counts.values())
    assert chi_squared < 20.5  # 0.1 % point with 5 degrees of freedom


def test_global_random_generators_are_left_alone():
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    deal(8, 0, 0, "x", 0.3, "linear")
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())


@pytest.mark.parametrize(
    ("spread", "ladder"),
    [(-0.1, "linear"), (1.0, "linear"), (math.nan, "linear"), (0.5, "log"), (math.inf, "log"), (0.1, "cubic")],
)
def test_bad_spreads(spread, ladder):
    with pytest.raises(ValueError, match="must"):
        check_spread(spread, ladder)


@pytest.mark.parametrize("spread", ["0.1", None, True])
def test_spreads_that_are_no_numbers(spread):
    with pytest.raises(TypeError, match="spread must be a number"):
        check_spread(spread, "linear")
