import math
import random

import pytest

import hdet
from hdet.controllers import Observation, Report, check_state


def report(scores, multipliers, base=1e-3, next_base=1e-3, floor=0.0, step=100):
    return Report(step, tuple(scores), {"lr": Observation(base, next_base, floor, tuple(multipliers))})


LADDER = [0.7, 0.9, 1.1, 1.3]
BY_HAND = [LADDER[s] for s in (2, 0, 3, 1)]
LOSSES = (2.000, 2.002, 2.005, 2.001)


def test_one_round_worked_out_by_hand():
    """L, slots (2, 0, 3, 1), gamma 0.01: Delta = -2.255847764803e-05, new center 9.88872076e-4."""
    controller = hdet.Softmax(temperature=0.002, step_size=0.5, momentum=0.9)
    after = controller.update(controller.init(["lr"]), report(LOSSES, BY_HAND, 1e-3, 0.99e-3))
    weights = [e + 0.25 for e in controller._excess_weights(LOSSES)]
    assert weights == pytest.approx([0.486264, 0.178887, 0.039915, 0.294934], abs=1e-6)
    delta = after["lr"]["velocity"] * 1e-3 / (1 - 0.9)
    assert delta == pytest.approx(-2.255847764803e-05, rel=1e-12)
    assert after["lr"]["scale"] * 0.99e-3 == pytest.approx(9.88872076e-4, rel=1e-9)


@pytest.mark.parametrize("size", [2, 3, 4, 8, 64])
def test_equal_scores_move_nothing_at_all(size):
    controller = hdet.Softmax()
    state = controller.init(["lr"])
    multipliers = hdet.assignment.multipliers(size, 0.3)
    for value in (2.1, 0.0, -3.7, 1e-30):
        for step in range(50):
            f, g = math.cos(step / 40), math.cos((step + 1) / 40)
            state = controller.update(state, report([value] * size, multipliers, f, g))
        assert state == controller.init(["lr"])


def test_the_sign_is_right():
    controller = hdet.Softmax(temperature=0.1)
    for better, sign in (([3, 2, 1, 0], 1), ([0, 1, 2, 3], -1)):
        after = controller.update(controller.init(["lr"]), report(better, LADDER))
        assert math.copysign(1, after["lr"]["scale"] - 1) == sign


@pytest.mark.parametrize("size", [2, 3, 4, 8, 64])
def test_relabelling_replicas_and_shifting_scores_changes_nothing(size):
    rng = random.Random(size)
    controller = hdet.Softmax(temperature=0.1)
    scores = [rng.gauss(2, 0.1) for _ in range(size)]
    multipliers = hdet.assignment.multipliers(size, 0.3)
    reference = controller.update(controller.init(["lr"]), report(scores, multipliers))["lr"]["scale"]
    order = rng.sample(range(size), size)
    relabelled = report([scores[i] for i in order], [multipliers[i] for i in order])
    shifted = report([s + 5 for s in scores], multipliers)
    for other in (relabelled, shifted):
        assert controller.update(controller.init(["lr"]), other)["lr"]["scale"] == pytest.approx(reference, rel=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_replica_without_a_finite_score_is_ignored(bad):
    controller = hdet.Softmax(temperature=0.1)
    with_bad = controller.update(controller.init(["lr"]), report([*LOSSES, bad], [*BY_HAND, 1.9]))
    without = controller.update(controller.init(["lr"]), report(LOSSES, BY_HAND))
    assert with_bad == without
    nobody = controller.update(controller.init(["lr"]), report([bad] * 4, LADDER))
    assert nobody["lr"]["scale"] == 1.0


@pytest.mark.parametrize("winner", [0, 3])
@pytest.mark.parametrize("spread", [1 / 9, 0.3, 0.9])
@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.99])
def test_a_one_sided_signal_to_the_last_round_stays_within_its_limits(winner, spread, momentum):
    controller = hdet.Softmax(temperature=1e-3, momentum=momentum, max_scale=10)
    multipliers = hdet.assignment.multipliers(4, spread)
    scores = [0.0 if r == winner else 1.0 for r in range(4)]
    floor, rounds = 4e-9, 200
    curve = [floor + (1e-3 - floor) * (1 + math.cos(math.pi * k / rounds)) / 2 for k in range(rounds + 1)]
    state, centers = controller.init(["lr"]), [curve[0]]
    for k in range(rounds):
        state = controller.update(state, report(scores, multipliers, curve[k], curve[k + 1], floor))
        center = max(state["lr"]["scale"] * curve[k + 1], min(curve[k + 1], floor))
        assert math.isfinite(center)
        assert floor * (1 - 1e-12) <= center <= 10 * curve[k + 1] * (1 + 1e-12)
        relative = center / curve[k + 1]
        previous = centers[-1] / curve[k]
        if winner == 3:
            assert relative >= previous * (1 - 1e-12)  # never falls against the schedule
        else:
            assert center <= centers[-1] * (1 + 1e-12)  # never rises at all
        centers.append(center)
    assert centers[-1] > curve[-1] if winner == 3 else centers[-1] == pytest.approx(floor)


def test_without_a_floor_the_scale_stays_positive():
    controller = hdet.Softmax(temperature=1e-3, step_size=5.0, momentum=0.0)
    state = controller.init(["lr"])
    for _ in range(300):
        state = controller.update(state, report([0, 1, 1, 1], hdet.assignment.multipliers(4, 0.9)))
        assert state["lr"]["scale"] > 0


def test_a_base_of_zero_is_left_alone_and_warm_up_moves_nothing():
    controller = hdet.Softmax(warmup_steps=200)
    state = controller.init(["lr"])
    assert controller.update(state, report(LOSSES, BY_HAND, step=199)) == state
    assert controller.update(state, report(LOSSES, BY_HAND, step=200)) != state
    assert controller.update(state, report(LOSSES, BY_HAND, 0.0, 0.0, step=200)) == state


def test_update_leaves_its_arguments_alone():
    controller = hdet.Softmax()
    state = controller.init(["lr"])
    controller.update(state, report(LOSSES, BY_HAND))
    assert state == controller.init(["lr"])
    assert hdet.Fixed().update({"lr": {"scale": 1.0}}, report(LOSSES, BY_HAND)) == {"lr": {"scale": 1.0}}


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": 0.0},
        {"temperature": math.nan},
        {"step_size": -1.0},
        {"momentum": 1.0},
        {"momentum": -0.1},
        {"warmup_steps": -1},
        {"max_scale": 0.5},
    ],
)
def test_bad_options(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must"):
        hdet.Softmax(**bad)


@pytest.mark.parametrize("bad", [None, {}, {"other": {"scale": 1.0, "velocity": 0.0}}, {"lr": {"scale": 1.0}}])
def test_a_state_of_other_hyperparameters_or_controllers_is_refused(bad):
    with pytest.raises(ValueError, match="saved"):
        check_state(bad, hdet.Softmax().init(["lr"]))
