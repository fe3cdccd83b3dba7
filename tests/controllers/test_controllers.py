import copy
import json
import math
import pathlib
import random
import re

import pytest
import torch

import hdet
from hdet._explore import slots
from hdet.controllers import Observation, Report
from hdet.controllers.report import check_state
from hdet.controllers.steering import Steering


def report(scores, multipliers, base=1e-3, next_base=1e-3, floor=0.0, step=100):
    return Report(step, tuple(scores), {"lr": Observation(base, next_base, floor, tuple(multipliers))})


LADDER = [0.7, 0.9, 1.1, 1.3]
BY_HAND = [LADDER[s] for s in (2, 0, 3, 1)]
LOSSES = (2.000, 2.002, 2.005, 2.001)


def test_one_round_worked_out_by_hand():
    """L, slots (2, 0, 3, 1), gamma 0.01: Delta = -2.255847764803e-05, new center 9.88872076e-4."""
    controller = hdet.controllers.Softmax(temperature=0.002, step_size=0.5, momentum=0.9)
    after = controller.update(controller.init(["lr"]), report(LOSSES, BY_HAND, 1e-3, 0.99e-3))
    weights = [e + 0.25 for e in controller.excess_weights(LOSSES)]
    assert weights == pytest.approx([0.486264, 0.178887, 0.039915, 0.294934], abs=1e-6)
    delta = after["lr"]["velocity"] * 1e-3 / (1 - 0.9)
    assert delta == pytest.approx(-2.255847764803e-05, rel=1e-12)
    assert after["lr"]["scale"] * 0.99e-3 == pytest.approx(9.88872076e-4, rel=1e-9)


@pytest.mark.parametrize("size", [2, 3, 4, 8, 64])
def test_equal_scores_move_nothing_at_all(size):
    controller = hdet.controllers.Softmax()
    state = controller.init(["lr"])
    multipliers = slots.multipliers(size, 0.3)
    for value in (2.1, 0.0, -3.7, 1e-30):
        for step in range(50):
            f, g = math.cos(step / 40), math.cos((step + 1) / 40)
            state = controller.update(state, report([value] * size, multipliers, f, g))
        assert state == controller.init(["lr"])


def test_the_sign_is_right():
    controller = hdet.controllers.Softmax(temperature=0.1)
    for better, sign in (([3, 2, 1, 0], 1), ([0, 1, 2, 3], -1)):
        after = controller.update(controller.init(["lr"]), report(better, LADDER))
        assert math.copysign(1, after["lr"]["scale"] - 1) == sign


@pytest.mark.parametrize("size", [2, 3, 4, 8, 64])
def test_relabelling_replicas_and_shifting_scores_changes_nothing(size):
    rng = random.Random(size)
    controller = hdet.controllers.Softmax(temperature=0.1)
    scores = [rng.gauss(2, 0.1) for _ in range(size)]
    multipliers = slots.multipliers(size, 0.3)
    reference = controller.update(controller.init(["lr"]), report(scores, multipliers))["lr"]["scale"]
    order = rng.sample(range(size), size)
    relabelled = report([scores[i] for i in order], [multipliers[i] for i in order])
    shifted = report([s + 5 for s in scores], multipliers)
    for other in (relabelled, shifted):
        assert controller.update(controller.init(["lr"]), other)["lr"]["scale"] == pytest.approx(reference, rel=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_replica_without_a_finite_score_is_ignored(bad):
    controller = hdet.controllers.Softmax(temperature=0.1)
    with_bad = controller.update(controller.init(["lr"]), report([*LOSSES, bad], [*BY_HAND, 1.9]))
    without = controller.update(controller.init(["lr"]), report(LOSSES, BY_HAND))
    assert with_bad == without
    nobody = controller.update(controller.init(["lr"]), report([bad] * 4, LADDER))
    assert nobody["lr"]["scale"] == 1.0


@pytest.mark.parametrize("winner", [0, 3])
@pytest.mark.parametrize("spread", [1 / 9, 0.3, 0.9])
@pytest.mark.parametrize("momentum", [0.0, 0.9, 0.99])
def test_a_one_sided_signal_to_the_last_round_stays_within_its_limits(winner, spread, momentum):
    controller = hdet.controllers.Softmax(temperature=1e-3, momentum=momentum, max_scale=10)
    multipliers = slots.multipliers(4, spread)
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
    controller = hdet.controllers.Softmax(temperature=1e-3, step_size=5.0, momentum=0.0)
    state = controller.init(["lr"])
    for _ in range(300):
        state = controller.update(state, report([0, 1, 1, 1], slots.multipliers(4, 0.9)))
        assert state["lr"]["scale"] > 0


def test_a_base_of_zero_is_left_alone_and_warm_up_moves_nothing():
    controller = hdet.controllers.Softmax(warmup_steps=200)
    state = controller.init(["lr"])
    assert controller.update(state, report(LOSSES, BY_HAND, step=199)) == state
    assert controller.update(state, report(LOSSES, BY_HAND, step=200)) != state
    assert controller.update(state, report(LOSSES, BY_HAND, 0.0, 0.0, step=200)) == state


def test_update_leaves_its_arguments_alone():
    controller = hdet.controllers.Softmax()
    state = controller.init(["lr"])
    controller.update(state, report(LOSSES, BY_HAND))
    assert state == controller.init(["lr"])
    assert hdet.controllers.Fixed().update({"lr": {"scale": 1.0}}, report(LOSSES, BY_HAND)) == {"lr": {"scale": 1.0}}


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
        hdet.controllers.Softmax(**bad)


@pytest.mark.parametrize("bad", [None, {}, {"other": {"scale": 1.0, "velocity": 0.0}}, {"lr": {"scale": 1.0}}])
def test_a_state_of_other_hyperparameters_or_controllers_is_refused(bad):
    with pytest.raises(ValueError, match="saved"):
        check_state(bad, hdet.controllers.Softmax().init(["lr"]))


# One table of invariants for every controller, a user's own included: the one in docs/controllers.md.

DOCS = (pathlib.Path(__file__).parents[2] / "docs" / "controllers.md").read_text()
OWN: dict = {}
exec(re.search(r"```python\n(.*?)```", DOCS, flags=re.S).group(1), OWN)

NAMES = ["learning_rate", "weight_decay"]
CONTROLLERS = {
    "softmax": hdet.controllers.Softmax(temperature=0.1),
    "fixed": hdet.controllers.Fixed(),
    "neutral": hdet.controllers.LineSearch(),
    "greedy": hdet.controllers.LineSearch(target="greedy"),
    "slope": hdet.controllers.Slope(),
    "evidence": hdet.controllers.Slope(evidence=2.0, anneal=False),
    "auto": hdet.Auto(short=1000),
    "auto, long": hdet.Auto(short=0),
    "own": OWN["TowardsTheBest"](),
}
MOVING = {key: value for key, value in CONTROLLERS.items() if key != "fixed"}
SIZES = [2, 3, 4, 8, 64]


def table(controllers):
    return pytest.mark.parametrize("controller", list(controllers.values()), ids=list(controllers))


def dealt(rng, size):
    """Multipliers of both hyperparameters: wide ladders, in any order."""
    rungs = slots.multipliers(size, 2.0, "log")
    return {name: rng.sample(rungs, size) for name in NAMES}


def full_report(scores, start, multipliers, step=100, base=1e-3, next_base=1e-3, peak=1e-3):
    seen = {name: Observation(base, next_base, 0.0, tuple(m), peak) for name, m in multipliers.items()}
    return Report(step, tuple(scores), seen, total_steps=1000, probe=tuple(scores), start=start)


def rounds_of(seed, size, count):
    """`count` random rounds: multipliers, scores around a valley in both, and the loss at the start."""
    rng = random.Random(seed)
    for _ in range(count):
        multipliers = dealt(rng, size)
        pairs = zip(*multipliers.values(), strict=True)
        scores = [2 - 0.3 * a + 0.2 * a * a + 0.1 * math.log(b) + rng.gauss(0, 0.03) for a, b in pairs]
        yield scores, 2.0 + rng.gauss(0, 0.03), multipliers


def names_of(controller):
    """The line search is for learning rates."""
    return ["learning_rate"] if isinstance(controller, hdet.controllers.LineSearch) else NAMES


def run(controller, rounds, state=None):
    state = controller.init(names_of(controller)) if state is None else state
    for step, (scores, start, multipliers) in enumerate(rounds):
        state = controller.update(state, full_report(scores, start, multipliers, step=step))
    return state


def close(one, other, rel):
    return set(one) == set(other) and all(one[name] == pytest.approx(other[name], rel=rel, abs=rel) for name in one)


@table(CONTROLLERS)
@pytest.mark.parametrize("size", SIZES)
def test_equal_scores_leave_every_scale_bit_for_bit(controller, size):
    rng = random.Random(size)
    rounds = [([value] * size, value, dealt(rng, size)) for value in (2.1, 0.0, -3.7, 1e-30, 1e30) for _ in range(10)]
    state = run(controller, rounds)
    assert all(entry["scale"] == 1.0 for entry in state.values())
    assert all(entry.get("estimate", 0.0) == 0.0 for entry in state.values())


@table(CONTROLLERS)
@pytest.mark.parametrize("size", SIZES)
def test_the_order_of_the_replicas_does_not_matter(controller, size):
    rounds = list(rounds_of(size, size, 20))
    rng = random.Random(0)
    relabelled = []
    for scores, start, multipliers in rounds:
        order = rng.sample(range(size), size)
        renamed = {name: [m[i] for i in order] for name, m in multipliers.items()}
        relabelled.append(([scores[i] for i in order], start, renamed))
    assert close(run(controller, relabelled), run(controller, rounds), 1e-12)


@table(CONTROLLERS)
@pytest.mark.parametrize("size", SIZES)
def test_a_constant_added_to_all_scores_does_not_matter(controller, size):
    rounds = list(rounds_of(size, size, 20))
    shifted = [([s + 5 for s in scores], start + 5, m) for scores, start, m in rounds]
    assert close(run(controller, shifted), run(controller, rounds), 1e-9)


@table(MOVING)
@pytest.mark.parametrize("size", SIZES)
def test_every_scale_goes_where_the_scores_are_lower(controller, size):
    rungs = slots.multipliers(size, 2.0, "log")
    for sign in (1, -1):
        # 20 rounds with a little noise: enough for a controller that waits for evidence
        rng = random.Random(size)
        rounds = [
            ([-sign * m + rng.gauss(0, 0.01) for m in rungs], 0.0, dict.fromkeys(NAMES, rungs)) for _ in range(20)
        ]
        state = run(controller, rounds)
        for name in names_of(controller) if controller != hdet.Auto(short=0) else ["weight_decay"]:
            assert sign * (state[name]["scale"] - 1) > 0, name
            assert sign * state[name].get("estimate", sign) > 0, name


@table(CONTROLLERS)
@pytest.mark.parametrize("size", SIZES)
def test_update_is_pure(controller, size):
    *before, last = rounds_of(size, size, 6)
    state = run(controller, before)
    kept, seen = copy.deepcopy(state), full_report(*last)
    kept_report = copy.deepcopy(seen)
    once, twice = controller.update(state, seen), controller.update(state, seen)
    assert once == twice
    assert (state, seen) == (kept, kept_report)
    if not isinstance(controller, hdet.controllers.Fixed):
        assert once != state


@table(CONTROLLERS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("size", [3, 4, 8, 64])
def test_scores_that_are_not_finite_are_left_out(controller, bad, size):
    rounds = list(rounds_of(size, size - 1, 10))
    with_bad = [
        ([*scores, bad], start, {name: [*m, 1.9] for name, m in multipliers.items()})
        for scores, start, multipliers in rounds
    ]
    assert close(run(controller, with_bad), run(controller, rounds), 1e-12)
    nobody = [([bad] * size, 1.0, dealt(random.Random(0), size))]
    after = run(controller, nobody)  # a line search notes how high the schedule is, and nothing else
    assert {name: without_highest(entry) for name, entry in after.items()} == {
        name: without_highest(entry) for name, entry in controller.init(names_of(controller)).items()
    }


def without_highest(entry):
    return {key: value for key, value in entry.items() if key != "highest"}


@table(CONTROLLERS)
@pytest.mark.parametrize("size", SIZES)
def test_scales_stay_positive_and_finite(controller, size):
    rng = random.Random(size)
    state = controller.init(NAMES)  # for line searches too: several groups in turns
    for step in range(500):
        scores = [rng.choice([1e-12, 1.0, 1e12, 1e200]) * rng.gauss(0, 1) for _ in range(size)]
        if step > 400:  # the wildest: what overflows when it is squared or subtracted
            scores[rng.randrange(size)] = rng.choice([1.7e308, -1.7e308, math.nan, math.inf])
        f, g = rng.uniform(1e-6, 1), rng.uniform(1e-6, 1)
        state = controller.update(state, full_report(scores, rng.gauss(0, 1), dealt(rng, size), step, f, g, 1.0))
        for entry in state.values():
            assert 0 < entry["scale"] < math.inf
            assert not any(math.isnan(value) for value in entry.values())


@table(CONTROLLERS)
def test_a_state_survives_saving(controller):
    state = run(controller, rounds_of(0, 4, 3))
    saved = json.loads(json.dumps(state))
    assert check_state(saved, controller.init(names_of(controller))) == state
    assert json.loads(json.dumps(controller.init(NAMES))) == controller.init(NAMES)


@table({key: value for key, value in MOVING.items() if key != "own"})
def test_a_hyperparameter_that_was_not_explored_keeps_its_estimate(controller):
    state = run(controller, rounds_of(0, 4, 5))
    scores, start, multipliers = next(rounds_of(1, 4, 1))
    rested = names_of(controller)[-1]
    after = controller.update(state, full_report(scores, start, {**multipliers, rested: [1.0] * 4}))
    keys = ["estimate", "error"] if isinstance(controller, hdet.controllers.Softmax) else list(state[rested])
    assert [after[rested][key] for key in keys] == [state[rested][key] for key in keys]


def test_limits_and_floors_are_kept():
    rungs = slots.multipliers(4, 2.0, "log")
    for controller in (hdet.controllers.LineSearch(), hdet.controllers.Slope(step_size=1.0)):
        for sign, limits, floor, end in (
            (1, (0.5, 1.5), 0.0, 1.5),
            (-1, (0.5, 1.5), 0.0, 0.5),
            (-1, (0, 9), 8e-4, 0.8),
        ):
            state = controller.init(["lr"])
            scores = tuple(-sign * m for m in rungs)
            seen = {"lr": Observation(1e-3, 1e-3, floor, tuple(rungs), limits=limits)}
            for _ in range(10):
                state = controller.update(state, Report(1, scores, seen, probe=scores, start=0.0))
            assert state["lr"]["scale"] == pytest.approx(end)


class Returns:
    """A controller whose `update` returns something of the kind that people write by mistake."""

    needs_score = False

    def __init__(self, returned):
        self.returned = returned

    def init(self, names):
        return {name: {"scale": 1.0} for name in names}

    def update(self, state, report):
        return self.returned


@pytest.mark.parametrize(
    ("returned", "error", "match"),
    [
        (None, ValueError, r"Returns\.update must return a dict with an entry for each of \['lr'\], got \['None'\]"),
        ({}, ValueError, r"for each of \['lr'\], got \[\]"),
        ({"lr": {"scale": 1.0}, "wd": {"scale": 1.0}}, ValueError, r"got \['lr', 'wd'\]"),
        ({"lr": 1.5}, ValueError, r"for lr a dict with the entries of init, \['scale'\], got \['1\.5'\]"),
        ({"lr": {"size": 1.0}}, ValueError, r"got \['size'\]"),
        ({"lr": {"scale": 1.0, "more": 2.0}}, ValueError, r"got \['more', 'scale'\]"),
        ({"lr": {"scale": "1.0"}}, TypeError, r"must return numbers, but scale of lr is '1\.0'"),
    ],
)
def test_a_controller_that_returns_no_state_is_told_so(returned, error, match):
    steering = Steering(Returns(returned), ["lr"])
    with pytest.raises(error, match=match):
        steering.update(report(LOSSES, BY_HAND))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_a_controller_that_begins_at_no_scale_is_told_so(scale):
    controller = Returns(None)
    controller.init = lambda names: {name: {"scale": scale} for name in names}
    with pytest.raises(ValueError, match=r"Returns\.init must return positive and finite scales"):
        Steering(controller, ["lr"])


@pytest.mark.parametrize(
    ("wanted", "error", "match"),
    [
        ({"interval": 5}, TypeError, r"Returns\.plan must return an hdet\.controllers\.Plan, got \{'interval': 5\}"),
        (hdet.controllers.Plan(interval=0), ValueError, r"interval of Returns\.plan must be at least 1"),
        (hdet.controllers.Plan(interval=2.5), TypeError, r"interval of Returns\.plan must be an int"),
        (hdet.controllers.Plan(outer_step=2.0), ValueError, r"outer_step of Returns\.plan must lie in \[0, 1\]"),
        (hdet.controllers.Plan(tail_average="half"), TypeError, r"tail_average of Returns\.plan must be a number"),
        (
            hdet.controllers.Plan(until=None),
            TypeError,
            r"until of Returns\.plan must be a dict of steps by name, got None",
        ),
        (
            hdet.controllers.Plan(until={"learning_rate": "x"}),
            TypeError,
            r"until of Returns\.plan for learning_rate must be an int",
        ),
        (hdet.controllers.Plan(why=None), TypeError, r"why of Returns\.plan must be a dict of words by name, got None"),
    ],
)
def test_a_plan_that_cannot_be_is_told_so(wanted, error, match):
    controller = Returns(None)
    controller.plan = lambda names, total_steps: wanted
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(error, match=match):
        hdet.Ensemble(optimizer, total_steps=100, controller=controller)


def test_a_controller_that_has_lost_its_way_begins_anew_and_the_record_says_so():
    steering = Steering(Returns({"lr": {"scale": math.nan}}), ["lr"])
    assert steering.update(report(LOSSES, BY_HAND)) == {"lr": 1.0}
    assert steering.said == ("lr: Returns asked for a scale of nan; it begins anew at 1",)
    steering = Steering(Returns({"lr": {"scale": torch.tensor(1.5)}}), ["lr"])
    steering.update(report(LOSSES, BY_HAND))
    assert type(steering.scales["lr"]) is float
    assert steering.said == ()


@pytest.mark.parametrize("limits", [(1.2, 3.0), (0.1, 0.8), (0.9, 0.9)])
def test_a_scale_outside_its_limits_stays_without_a_reason_to_come_back(limits):
    for controller in (
        hdet.controllers.Fixed(),
        hdet.controllers.Softmax(),
        hdet.controllers.Slope(),
        hdet.controllers.LineSearch(),
        hdet.Auto(),
    ):
        steering = Steering(controller, ["lr"])
        tie = Report(100, (2.0,) * 4, {"lr": Observation(1.0, 1.0, 0.0, tuple(LADDER), limits=limits)}, 400,
                     (2.0,) * 4, 2.0)  # fmt: skip
        assert steering.update(tie) == {"lr": 1.0}
    towards = Observation(1.0, 1.0, 0.0, tuple(LADDER), limits=limits)
    assert towards.within_limits(0.5, before=1.0) == max(0.5, min(limits[0], 1.0))
    assert towards.within_limits(2.0, before=1.0) == min(2.0, max(limits[1], 1.0))
