import itertools
import math
import random
import statistics

import pytest

import hdet
from hdet._explore import slots
from hdet.controllers import Observation, Report
from hdet.controllers.slope import slopes


def report(scores, multipliers, step=10, total_steps=None):
    seen = {name: Observation(1e-2, 1e-2, 0.0, tuple(m)) for name, m in multipliers.items()}
    return Report(step, tuple(scores), seen, total_steps)


def orthogonal(count):
    """A full two-level design: columns of +-1 that are orthogonal to each other and to the intercept."""
    return [list(column) for column in zip(*itertools.product((-1.0, 1.0), repeat=count), strict=True)]


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("design", ["orthogonal", "random", "as few replicas as possible"])
def test_slopes_are_recovered_exactly_without_noise(count, design):
    rng = random.Random(count)
    size = count + 1 if design == "as few replicas as possible" else 8
    columns = [[rng.gauss(0, 0.3) for _ in range(size)] for _ in range(count)]
    if design == "orthogonal":
        columns = orthogonal(count)
    known = [rng.gauss(0, 2) for _ in range(count)]
    scores = [7.0 + sum(g * u for g, u in zip(known, row, strict=True)) for row in zip(*columns, strict=True)]
    assert slopes(columns, scores) == pytest.approx(known, abs=1e-9)


def test_confounded_hyperparameters_are_fitted_one_by_one():
    u = [-1.0, -0.5, 0.5, 1.0]
    assert slopes([u, u], [2 * x for x in u]) == pytest.approx([2, 2])
    assert slopes([u, [-x for x in u]], [2 * x for x in u]) == pytest.approx([2, -2])
    # two replicas cannot tell two hyperparameters apart, three cannot tell three
    assert slopes([[0.0, 1.0], [2.0, 0.0]], [5.0, 6.0]) == pytest.approx([1, -0.5])
    three = [[0.0, 1.0, 2.0], [1.0, 0.0, 2.0], [2.0, 1.0, 1.0]]
    alone = [slopes([column], [1.0, 4.0, 2.0])[0] for column in three]
    assert slopes(three, [1.0, 4.0, 2.0]) == pytest.approx(alone)
    assert slopes([], [1.0, 2.0]) == []


def test_least_squares_with_noise_has_an_orthogonal_residual():
    rng = random.Random(5)
    columns = [[rng.gauss(0, 1) for _ in range(12)] for _ in range(3)]
    scores = [rng.gauss(0, 1) for _ in range(12)]
    found = slopes(columns, scores)
    residual = [s - sum(g * c[r] for g, c in zip(found, columns, strict=True)) for r, s in enumerate(scores)]
    mean = sum(residual) / 12
    for column in columns:
        assert sum(u * (e - mean) for u, e in zip(column, residual, strict=True)) == pytest.approx(0, abs=1e-12)


def test_two_rounds_by_hand():
    """Slopes 2 and then -1, in log multipliers of +-log 2."""
    controller = hdet.controllers.Slope(step_size=0.1, momentum=0.5, smoothing=0.5)
    rungs, log2 = [0.5, 2.0], math.log(2)
    state = controller.init(["h"])
    state = controller.update(state, report([-2 * log2, 2 * log2], {"h": rungs}))
    assert math.log(state["h"]["scale"]) == pytest.approx(-0.1)
    assert (state["h"]["estimate"], state["h"]["error"]) == (pytest.approx(-1), math.inf)
    state = controller.update(state, report([log2, -log2], {"h": rungs}))
    assert state["h"]["slope"] == pytest.approx((2 * 0.5 - 1) / 1.5)  # exactly 0
    assert state["h"]["square"] == pytest.approx((4 * 0.5 + 1) / 1.5)
    assert math.log(state["h"]["scale"]) == pytest.approx(-0.1)
    # scatter 2, weight 1.5, effective rounds 1.8: variance 3, standard error sqrt(3 / 1.8), rms sqrt(4 / 3)
    assert state["h"]["error"] == pytest.approx(math.sqrt(3 / 1.8) / math.sqrt(2 / 1.5))


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_it_improves_a_bowl_in_several_hyperparameters_at_once(count, noise):
    rng = random.Random(count)
    names = [f"h{i}" for i in range(count)]
    best = {name: rng.choice([-1, 1]) * rng.uniform(0.8, 2) for name in names}
    controller = hdet.controllers.Slope()
    state = controller.init(names)
    rungs = slots.multipliers(8, 2.0, "log")

    def loss(logs):
        return sum((logs[name] - best[name]) ** 2 for name in names)

    for step in range(300):
        dealt = {name: rng.sample(rungs, 8) for name in names}
        at = [{n: math.log(state[n]["scale"] * dealt[n][r]) for n in names} for r in range(8)]
        scores = [loss(logs) + rng.gauss(0, noise) for logs in at]
        state = controller.update(state, report(scores, dealt, step, 300))
    first, last = loss(dict.fromkeys(names, 0.0)), loss({n: math.log(state[n]["scale"]) for n in names})
    assert last < 0.05 * first


def test_it_waits_for_evidence():
    """Pure noise moves a controller that asks for three standard errors less than one that asks for none."""

    def travelled(controller, slope):
        rng, state, way = random.Random(0), controller.init(["h"]), 0.0
        rungs = slots.multipliers(4, 2.0, "log")
        for _ in range(200):
            before = state["h"]["scale"]
            scores = [slope * math.log(m) + rng.gauss(0, 1) for m in rungs]
            state = controller.update(state, report(scores, {"h": rungs}))
            way += abs(math.log(state["h"]["scale"] / before))
        return way

    assert travelled(hdet.controllers.Slope(evidence=3.0), 0.0) < 0.2 * travelled(hdet.controllers.Slope(), 0.0)
    assert travelled(hdet.controllers.Slope(evidence=3.0), 5.0) > 0.9 * travelled(hdet.controllers.Slope(), 5.0)


def test_the_step_size_is_annealed_where_the_length_is_known():
    rungs = [0.5, 2.0]
    for anneal, step, total, factor in (
        (True, 75, 100, 0.25),
        (True, 75, None, 1),
        (False, 75, 100, 1),
        (True, 120, 100, 0),
    ):
        controller = hdet.controllers.Slope(step_size=0.1, anneal=anneal)
        after = controller.update(controller.init(["h"]), report([1.0, 0.0], {"h": rungs}, step, total))
        assert math.log(after["h"]["scale"]) == pytest.approx(0.1 * factor)


@pytest.mark.parametrize("slope", [0.0, 0.5, 2.0])
def test_the_standard_error_is_calibrated(slope):
    rng = random.Random(1)
    rungs = slots.multipliers(4, 2.0, "log")
    controller = hdet.controllers.Slope(step_size=0.0)
    means, errors, covered = [], [], 0
    for _ in range(300):
        state = controller.init(["h"])
        for _ in range(50):
            scores = [slope * math.log(m) + rng.gauss(0, 1) for m in rungs]
            state = controller.update(state, report(scores, {"h": rungs}))
        entry = state["h"]
        rms = -entry["slope"] / entry["estimate"]
        means.append(entry["slope"])
        errors.append(entry["error"] * rms)
        covered += abs(entry["slope"] - slope) < 2 * errors[-1]
    assert 1 / 1.5 < statistics.median(errors) / statistics.stdev(means) < 1.5
    assert covered / 300 > 0.88


def test_a_probe_is_preferred_and_its_plan():
    controller = hdet.controllers.Slope()
    seen = {"h": Observation(1.0, 1.0, 0.0, (0.5, 2.0))}
    after = controller.update(controller.init(["h"]), Report(1, (0.0, 1.0), seen, probe=(1.0, 0.0)))
    assert after["h"]["scale"] > 1
    assert hdet.controllers.Slope().plan(["a"], None).design == "permutations"
    plan = hdet.controllers.Slope().plan(["a", "b"], 100)
    assert (plan.design, plan.interval, dict(plan.until), plan.finds) == ("orthogonal", None, {}, False)


def test_no_step_size_overflows():
    for sign, end in ((1, 1e-6), (-1, 1e6)):
        controller = hdet.controllers.Slope(step_size=1e9)
        after = controller.update(controller.init(["h"]), report([0.0, sign], {"h": [0.5, 2.0]}))
        assert after["h"]["scale"] == pytest.approx(end)


def test_a_base_of_zero_is_left_alone():
    controller = hdet.controllers.Slope()
    state = controller.init(["h"])
    seen = {"h": Observation(0.0, 0.0, 0.0, (0.5, 2.0))}
    assert controller.update(state, Report(1, (0.0, 1.0), seen)) == state


@pytest.mark.parametrize(
    "bad", [{"step_size": -1.0}, {"momentum": 1.0}, {"smoothing": 1.0}, {"evidence": -1.0}, {"max_scale": 0.0}]
)
def test_bad_options(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must"):
        hdet.controllers.Slope(**bad)
    with pytest.raises(TypeError, match="anneal must"):
        hdet.controllers.Slope(anneal="yes")
