"""Coordinates and bounds: values never leave them, whatever the scale and the multiplier."""

import math
import random

import pytest
import torch
from torch import nn

from hdet import attribute, scalar
from hdet._explore.hyperparameter import Hyperparameter, representative
from hdet._explore.slots import multipliers

CASES = [
    ("log", (0.0, math.inf), 0.3),
    ("log", (1e-3, 2.0), 0.3),
    ("logit", (0.0, 1.0), 0.3),
    ("logit", (-1.0, 3.0), 0.3),
    ("linear", (-1.0, 1.0), 0.0),
    ("linear", (-math.inf, math.inf), -5.0),
]


@pytest.mark.parametrize(("coordinate", "bounds", "base"), CASES)
@pytest.mark.parametrize("ladder", ["linear", "log"])
def test_values_stay_within_the_bounds(coordinate, bounds, base, ladder):
    h = Hyperparameter("h", 0.9 if ladder == "linear" else 8.0, ladder, coordinate, bounds, unit=0.5, floor=1e-4)
    generator = random.Random(0)
    wanders = [base, bounds[0] - 1.0, bounds[1] + 1.0] if coordinate != "log" else [base, 0.0, bounds[1] + 1.0]
    for k in range(500):
        scale = math.exp(generator.uniform(-20, 20)) if k else 1.0
        base = wanders[k % 3] if math.isfinite(wanders[k % 3]) else wanders[0]
        for m in (1.0, *multipliers(5, h.spread, ladder)):
            for x in (h.value_of(base, scale, m), float(h.value_of(torch.tensor(base, dtype=torch.float64), scale, m))):
                assert bounds[0] <= x <= bounds[1]


@pytest.mark.parametrize(("coordinate", "bounds", "base"), CASES)
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1.7, 1e6])
def test_the_values_of_many_replicas_are_those_of_each(coordinate, bounds, base, scale):
    h = Hyperparameter("h", 0.5, "linear", coordinate, bounds, unit=0.5, floor=1e-4)
    rungs = multipliers(7, h.spread, h.ladder)
    assert h.values_of(base, scale, rungs) == tuple(h.value_of(base, scale, m) for m in rungs)


@pytest.mark.parametrize(("coordinate", "bounds", "base"), CASES)
def test_factors_compose_and_one_changes_nothing(coordinate, bounds, base):
    h = Hyperparameter("h", 0.5, "linear", coordinate, bounds, unit=0.5)
    assert h.value_of(base, 1.0, 1.0) == base
    assert h.center(base, 1.0) == base
    assert h.value_of(base, 1.3, 0.9) == pytest.approx(h.value_of(base, 1.3 * 0.9, 1.0), rel=1e-12)
    up, down = h.value_of(base, 1.0, 1.1), h.value_of(base, 1.0, 0.9)
    assert down < base < up


def test_the_logit_coordinate_multiplies_the_odds():
    h = Hyperparameter("h", 0.5, "linear", "logit", (0.0, 1.0))
    value = h.value_of(0.1, 2.0, 1.5)
    assert value / (1 - value) == pytest.approx(0.1 / 0.9 * 3.0, rel=1e-12)


def test_a_factor_of_e_adds_one_unit_in_the_linear_coordinate():
    h = Hyperparameter("h", 0.5, "linear", "linear", (-10.0, 10.0), unit=0.25)
    assert h.value_of(1.0, math.e, 1.0) == pytest.approx(1.25, rel=1e-12)


@pytest.mark.parametrize(("coordinate", "bounds", "base"), CASES)
def test_scales_within_the_limits_need_no_clipping(coordinate, bounds, base):
    h = Hyperparameter("h", 0.4, "linear", coordinate, bounds, unit=0.5)
    low, high = h.limits(base, 4)
    for scale in (max(low, 1e-9) * (1 + 1e-9), min(high, 1e9) * (1 - 1e-9)):
        moved = [h.move(h.move(base, scale), m) for m in multipliers(4, 0.4)]
        assert all(bounds[0] <= x <= bounds[1] for x in moved)


def test_a_spread_too_wide_for_the_bounds_is_clipped_to_them():
    h = Hyperparameter("h", 0.9, "linear", "log", (0.5, 1.0))
    low, high = h.limits(0.7, 4)
    assert low == high
    assert all(0.5 <= h.value_of(0.7, low, m) <= 1.0 for m in multipliers(4, 0.9))
    linear = Hyperparameter("h", 0.9, "linear", "linear", (0.5, 1.0), unit=1.0)
    for base in (0.5, 0.7, 1.0):
        scale, _ = h.limits(base, 4)
        assert 0.5 <= base * scale <= 1.0
        scale, _ = linear.limits(base, 4)
        assert 0.5 - 1e-9 <= base + math.log(scale) <= 1.0 + 1e-9


def test_bases_of_zero_do_not_stand_for_the_others():
    assert representative([0.0, 0.1], [0.0, 0.2]) == (0.1, 0.2)
    assert representative([0.0], [0.0]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bounds": (1, 0)}, "low < high"),
        ({"bounds": (0, 0.05)}, "outside its bounds"),
        ({"coordinate": "logit"}, "two finite bounds"),
        ({"coordinate": "log", "bounds": (-1, 1)}, 'coordinate="linear"'),
        ({"coordinate": "linear", "unit": 0.0}, "unit"),
        ({"coordinate": "square"}, "coordinate"),
        ({"spread": 1.0}, "spread"),
        ({"spread": 0.5, "ladder": "log"}, "spread"),
    ],
)
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        scalar("h", 0.1, **options)
    module = nn.Module()
    module.h = 0.1
    with pytest.raises(ValueError, match=message):
        attribute(module, "h", **options)
