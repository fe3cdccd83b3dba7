import math
import random
import statistics

import pytest

import hdet
from hdet._explore import slots
from hdet.controllers import Observation, Report
from hdet.controllers.confidence import VAGUE, words
from hdet.controllers.line_search import clear_until, fit, fit_with_intercept
from hdet.controllers.report import check_state
from hdet.controllers.steering import Steering

VERTEX = {"neutral": 0.5, "greedy": 1.0}


def wide(size):
    return slots.multipliers(size, 2.0, "log")


def report(probe, start, multipliers, base=1.0, next_base=1.0, peak=None, step=10, total_steps=None):
    seen = {"learning_rate": Observation(base, next_base, 0.0, tuple(multipliers), peak)}
    return Report(step, tuple(probe), seen, total_steps, tuple(probe), start)


def once(controller, *arguments, **more):
    return controller.update(controller.init(["learning_rate"]), report(*arguments, **more))["learning_rate"]


@pytest.mark.parametrize("size", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("spread", [(0.01, "linear"), (1 / 9, "linear"), (2.0, "log")])
def test_the_fit_is_exact_on_a_parabola(size, spread):
    rungs = slots.multipliers(size, *spread)
    for a, b in ((-3.0, 2.0), (1.0, 0.5), (-0.2, -0.1), (0.0, 1.0), (1.0, 0.0)):
        assert fit(rungs, [a * m + b * m * m for m in rungs]) == pytest.approx((a, b), abs=1e-9)


def test_the_fit_is_least_squares():
    """Its residual is orthogonal to both columns."""
    rng = random.Random(0)
    rungs = wide(8)
    rises = [rng.gauss(0, 1) for _ in rungs]
    a, b = fit(rungs, rises)
    residual = [y - a * m - b * m * m for m, y in zip(rungs, rises, strict=True)]
    for power in (1, 2):
        assert sum(m**power * e for m, e in zip(rungs, residual, strict=True)) == pytest.approx(0, abs=1e-12)


def test_what_does_not_determine_a_parabola_is_refused():
    assert fit([1.0, 1.0], [2.0, 2.0]) is None
    assert fit([0.5, 1.5], [2.0, math.nan]) is None
    assert fit([0.5, 1.5], [math.inf, math.nan]) is None
    assert fit([0.5, 1.5], [1.7e308, -1.7e308]) is None


@pytest.mark.parametrize("target", ["neutral", "greedy"])
@pytest.mark.parametrize("vertex", [0.1, 0.5, 0.9, 1.0, 3.0])
@pytest.mark.parametrize("size", [2, 4])
def test_one_round_on_a_parabola_by_hand(target, vertex, size):
    rungs = wide(size)
    probe = [2.0 + 0.4 * (m - vertex) ** 2 for m in rungs]
    after = once(hdet.controllers.LineSearch(target=target), probe, 2.0 + 0.4 * vertex**2, rungs)
    assert -after["slope"] / (2 * after["curvature"]) == pytest.approx(vertex, rel=1e-9)
    assert abs(after["slope"]) + abs(after["curvature"]) == pytest.approx(1)
    distance = math.log(vertex / VERTEX[target])
    assert after["estimate"] == pytest.approx(distance, abs=1e-9)
    assert math.log(after["scale"]) == pytest.approx(min(max(distance / 2, -0.5), 0.5), abs=1e-9)
    assert after["error"] == math.inf


@pytest.mark.parametrize(
    ("a", "b", "step"), [(-1.0, -1.0, 0.5), (-1.0, 0.0, 0.5), (1.0, 1.0, -0.5), (1.0, -1.0, -0.5), (0.0, -1.0, -0.5)]
)
def test_without_a_vertex_it_goes_as_far_as_it_may(a, b, step):
    rungs = wide(2)
    after = once(hdet.controllers.LineSearch(), [a * m + b * m * m for m in rungs], 0.0, rungs)
    if a != 0.0:  # a slope of exactly 0 comes out of the fit as rounding, of either sign
        assert math.log(after["scale"]) == pytest.approx(step)


@pytest.mark.parametrize(
    ("vertex", "base", "next_base", "peak", "distance"),
    [
        (2.0, 0.5, 0.6, 1.0, math.log(2)),  # rises: half of the way up is the schedule's
        (2.0, 0.1, 0.2, 1.0, 0.0),  # all of it is
        (2.0, 0.5, 0.4, 1.0, math.log(4)),  # falls, from the highest base that it has seen
        (2.0, 0.5, 0.6, None, math.log(4)),  # no peak is known
        (0.25, 0.5, 0.6, 1.0, math.log(0.5)),  # down is down
    ],
)
def test_while_the_schedule_rises_it_is_given_its_share(vertex, base, next_base, peak, distance):
    rungs = wide(4)
    probe = [(m - vertex) ** 2 for m in rungs]
    after = once(hdet.controllers.LineSearch(max_step=9.0), probe, vertex**2, rungs, base, next_base, peak)
    assert after["estimate"] == pytest.approx(distance, abs=1e-9)
    assert math.log(after["scale"]) == pytest.approx(distance / 2, abs=1e-9)


SCHEDULES = {
    "cosine": lambda t: 0.5 + 0.5 * math.cos(math.pi * t),
    "one cycle": lambda t: 0.04 + 0.96 * t / 0.3 if t < 0.3 else 0.5 + 0.5 * math.cos(math.pi * (t - 0.3) / 0.7),
    "linear": lambda t: 1 - t,
    "exponential": lambda t: math.exp(-6 * t),
    "steps": lambda t: 1.0 if t < 0.4 else 0.1 if t < 0.7 else 0.01,
    "constant, then down": lambda t: min(1.0, 5 * (1 - t)),
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("target", ["neutral", "greedy"])
@pytest.mark.parametrize("best", [1 / 30, 1.0, 30.0, 1e6])
def test_it_does_not_lift_the_rate_against_a_falling_schedule(name, target, best):
    """However much rounds ask for: the last centers are as low, relative to the highest, as the schedule's."""
    rng = random.Random(2)
    controller, schedule = hdet.controllers.LineSearch(target=target), SCHEDULES[name]
    state, bases, centers = controller.init(["learning_rate"]), [], []
    for k in range(80):
        base, next_base = schedule(k / 80), schedule((k + 1) / 80)
        rate = base * state["learning_rate"]["scale"]
        bases.append(base)
        centers.append(rate)
        late = best * (1 if k < 40 else 100)  # what rounds ask for where curvature is gone
        probe = [-(x := rate * m / late) + x * x / 2 + rng.gauss(0, 0.01) for m in wide(4)]
        state = controller.update(state, report(probe, 0.0, wide(4), base, next_base, 1.0))
    assert centers[-1] / max(centers) <= 2 * bases[-1] / max(bases)
    if best > 1:
        assert max(centers) > max(bases), "it has found nothing"


@pytest.mark.parametrize("unseen", [1, 4])
def test_rounds_that_it_cannot_use_are_part_of_the_schedule_too(unseen):
    """As the first one, of which no start is known: an exponential schedule is highest there."""
    controller = hdet.controllers.LineSearch()
    state, centers = controller.init(["learning_rate"]), []
    for k in range(40):
        base, start = math.exp(-0.2 * k), None if k < unseen else 0.0
        centers.append(base * state["learning_rate"]["scale"])
        state = controller.update(state, report([-m for m in wide(4)], start, wide(4), base, base / 2, None))
    assert state["learning_rate"]["highest"] == 1.0
    assert centers[-1] / max(centers) <= 2 * math.exp(-0.2 * 39)


def test_it_rests_below_half_of_the_peak_and_goes_on_after_a_restart():
    controller = hdet.controllers.LineSearch()
    state = controller.init(["learning_rate"])
    scales = []
    for base in (1.0, 0.75, 0.5, 0.1, 1.0):
        state = controller.update(state, report([-m for m in wide(4)], 0.0, wide(4), base, base / 2, 1.0))
        scales.append(math.log(state["learning_rate"]["scale"]))
    assert scales == pytest.approx([0.5, 0.75, 0.75, 0.75, 1.25])


class Twin:
    """The line search from its formulas, in the plainest way: normal equations, A and B as running means."""

    def __init__(self, target, hills):
        self.hills, self.target, self.scale, self.a, self.b, self.rounds = hills, VERTEX[target], 1.0, 0.0, 0.0, 0
        self.highest = 0.0

    def round(self, probe, start, rho, base, next_base, peak):
        self.highest = max(self.highest, base)
        share = 2 * base / self.highest - 1
        if share <= 0:
            return  # it rests
        y = [loss - start for loss in probe]
        s2, s3, s4 = (sum(m**k for m in rho) for k in (2, 3, 4))
        t1 = sum(m * z for m, z in zip(rho, y, strict=True))
        t2 = sum(m * m * z for m, z in zip(rho, y, strict=True))
        a, b = (t1 * s4 - t2 * s3) / (s2 * s4 - s3**2), (t2 * s2 - t1 * s3) / (s2 * s4 - s3**2)
        a, b = a / (abs(a) + abs(b)), b / (abs(a) + abs(b))
        self.rounds += 1
        self.a, self.b = 0.8 * self.a + 0.2 * a, 0.8 * self.b + 0.2 * b
        big_a, big_b = self.a / (1 - 0.8**self.rounds), self.b / (1 - 0.8**self.rounds)
        vertex = 1e-3 if big_a >= 0 else 1e3 if big_b <= 0 else min(max(-big_a / (2 * big_b), 1e-3), 1e3)
        d = math.log(vertex / self.target)
        if next_base > base and d > 0:
            d = max(0.0, d + math.log(base / peak))
        factor = math.exp(share * min(max(d / 2, -0.5), 0.5))
        self.scale *= factor
        q = factor * next_base / base
        self.a, self.b = self.a * q, self.b * (q * q if self.b > 0 or self.hills else min(q * q, 1.0))


@pytest.mark.parametrize("target", ["neutral", "greedy"])
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("hills", [False, True])
def test_against_a_plain_twin_over_100_rounds(target, size, hills):
    rng = random.Random(size)
    controller, twin = hdet.controllers.LineSearch(target=target, hills=hills, max_scale=1e30), Twin(target, hills)
    state = controller.init(["learning_rate"])
    bases = [0.05 + 0.95 * math.sin(math.pi * k / 101) for k in range(102)]
    for k in range(100):
        rho = rng.sample(wide(size), size)
        rate = bases[k] * state["learning_rate"]["scale"]
        start = rng.gauss(2, 0.1)
        a, b = -0.3 * rng.gauss(1, 0.5) * rate, 0.2 * rng.gauss(1, 0.8) * rate**2
        probe = [start + a * m + b * m * m + rng.gauss(0, 0.01 * rate) for m in rho]
        state = controller.update(state, report(probe, start, rho, bases[k], bases[k + 1], 1.0))
        twin.round(probe, start, rho, bases[k], bases[k + 1], 1.0)
        assert state["learning_rate"]["scale"] == pytest.approx(twin.scale, rel=1e-12), k
    assert twin.scale != 1.0


@pytest.mark.parametrize("target", ["neutral", "greedy"])
@pytest.mark.parametrize("first", [1 / 30, 1.0, 10.0])
def test_it_finds_the_rate_that_puts_the_vertex_at_its_target(target, first):
    """L = -rate rho + (rate rho)^2 / 2: the vertex is 1 / rate."""
    controller = hdet.controllers.LineSearch(target=target)
    state = controller.init(["learning_rate"])
    for _ in range(60):
        rate = first * state["learning_rate"]["scale"]
        probe = [-rate * m + (rate * m) ** 2 / 2 for m in wide(4)]
        state = controller.update(state, report(probe, 0.0, wide(4), first, first))
    assert first * state["learning_rate"]["scale"] == pytest.approx(1 / VERTEX[target], rel=1e-3)


def test_a_hill_is_forgotten():
    """Two concave rounds, then a clear valley at the target: the rate comes back. The plain formula runs away."""
    ends = {}
    for hills in (False, True):
        controller = hdet.controllers.LineSearch(hills=hills)
        state = controller.init(["learning_rate"])
        for k in range(60):
            rate = state["learning_rate"]["scale"]
            a, b = (-0.1 * rate, -0.9 * rate**2) if k < 2 else (-rate, 0.5 * rate**2)
            probe = [a * m + b * m * m for m in wide(4)]
            state = controller.update(state, report(probe, 0.0, wide(4)))
        ends[hills] = state["learning_rate"]["scale"]
    assert ends[False] == pytest.approx(2.0, rel=1e-3)
    assert ends[True] == pytest.approx(1e6)


def simulated(vertex, noise, size, runs, rounds=30):
    """Estimate and error after `rounds` noisy rounds on a parabola, `runs` times."""
    rng = random.Random(3)
    controller, rungs = hdet.controllers.LineSearch(step_size=0.0), wide(size)
    found = []
    for _ in range(runs):
        state = controller.init(["learning_rate"])
        for _ in range(rounds):
            probe = [(m - vertex) ** 2 + rng.gauss(0, noise) for m in rungs]
            state = controller.update(state, report(probe, vertex**2, rungs))
        found.append((state["learning_rate"]["estimate"], state["learning_rate"]["error"]))
    return found


def is_wrong(estimate, error, true):
    """Whether the words claim what is not so: a number by more than three errors, a bound at all."""
    if not abs(estimate) > 2 * error:
        return False
    if error < VAGUE:
        return abs(estimate - true) > 3 * error
    return true < estimate - 2 * error if estimate > 0 else true > estimate + 2 * error


KNOWN = [(0.02, 0.005), (0.35, 0.05), (0.5, 0.05), (1.2, 0.05), (3.0, 0.1), (30.0, 0.2)]
UNKNOWN = [(0.02, 0.05), (0.02, 0.5), (10.0, 2.0), (30.0, 1.0), (30.0, 5.0), (30.0, 20.0)]


@pytest.mark.parametrize(("vertex", "noise"), KNOWN)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_standard_error_is_calibrated(vertex, noise, size):
    """Over many runs with noise the estimates scatter as much as their errors say."""
    true = math.log(vertex / 0.5)
    found = simulated(vertex, noise, size, 100)
    scatter = statistics.stdev(estimate for estimate, _ in found)
    assert 1 / 1.5 < statistics.median(error for _, error in found) / scatter < 1.5
    assert statistics.fmean(estimate for estimate, _ in found) == pytest.approx(true, abs=0.15)
    assert sum(abs(estimate - true) > 3 * error for estimate, error in found) <= 3
    assert sum(is_wrong(*one, true) for one in found) <= 3


@pytest.mark.parametrize(("vertex", "noise"), UNKNOWN)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_where_the_vertex_is_not_known_no_number_is_claimed_for_it(vertex, noise, size):
    found = simulated(vertex, noise, size, 100)
    assert sum(is_wrong(*one, math.log(vertex / 0.5)) for one in found) <= 5
    if abs(math.log(vertex / 0.5)) > 2 and noise < 10:  # the direction is clear all the same
        assert sum(abs(estimate) > 2 * error for estimate, error in found) > 80


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("vertex", "noise"), [(1.2, 0.05), (3.0, 0.2), (30.0, 1.0), (0.1, 0.05)])
def test_few_rounds_do_not_make_it_sure(vertex, noise, size):
    for rounds, most in ((3, 12), (5, 8)):
        found = simulated(vertex, noise, size, 100, rounds)
        assert sum(is_wrong(*one, math.log(vertex / 0.5)) for one in found) <= most, rounds


@pytest.mark.parametrize(("first", "noise"), [(1 / 30, 0.003), (0.3, 0.03), (2.0, 0.3), (20.0, 0.3), (20.0, 3.0)])
def test_while_the_scale_moves_the_error_is_no_smaller_than_it_should_be(first, noise):
    """L = -rate rho + (rate rho)^2 / 2: the best rate is 2. Rounds at other step sizes count for less, or are noise."""
    wrong, controller = 0, hdet.controllers.LineSearch()
    for run in range(50):
        rng = random.Random(run)
        state = controller.init(["learning_rate"])
        for _ in range(20):
            rate = first * state["learning_rate"]["scale"]
            probe = [-rate * m + (rate * m) ** 2 / 2 + rng.gauss(0, noise) for m in wide(4)]
            state = controller.update(state, report(probe, 0.0, wide(4), first, first))
            entry = state["learning_rate"]
            wrong += is_wrong(entry["estimate"], entry["error"], math.log(2 / rate))
    assert wrong <= 0.02 * 50 * 20


def test_sums_are_those_of_all_rounds_in_units_of_the_last_step_size():
    rng = random.Random(7)
    controller = hdet.controllers.LineSearch()
    state, rounds = controller.init(["learning_rate"]), []
    for _ in range(25):
        base = rng.uniform(1.1, 2.0)
        rate = base * state["learning_rate"]["scale"]
        a, b = -rate * rng.uniform(0.8, 1.2), 0.5 * rate**2 * rng.uniform(0.8, 1.2)
        rounds.append((rate, a / (abs(a) + b), b / (abs(a) + b)))
        probe = [a * m + b * m * m for m in wide(4)]
        state = controller.update(state, report(probe, 0.0, wide(4), base, base))
    weights = [0.8**k for k in range(24, -1, -1)]
    carried = [(a * rate / old, b * (rate / old) ** 2) for old, a, b in rounds]
    weighted = list(zip(weights, carried, strict=True))
    mean_a, mean_b = (sum(w * pair[i] for w, pair in weighted) / sum(weights) for i in (0, 1))
    entry = state["learning_rate"]
    close = pytest.approx
    assert (entry["slope"], entry["curvature"]) == (close(mean_a, rel=1e-9), close(mean_b, rel=1e-9))
    assert entry["slope_scatter"] == close(sum(w * (a - mean_a) ** 2 for w, (a, _) in weighted), rel=1e-9)
    assert entry["co_scatter"] == close(sum(w * (a - mean_a) * (b - mean_b) for w, (a, b) in weighted), rel=1e-9)
    assert entry["curvature_scatter"] == close(sum(w * (b - mean_b) ** 2 for w, (_, b) in weighted), rel=1e-9)
    assert entry["products"] == close(sum(w * w * a * b for w, (a, b) in weighted), rel=1e-9)


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (-1.0, 0.0, "at least x"),  # straight down: no vertex in sight
        (-0.1, -1.0, "at least x"),  # down, and steeper and steeper
        (-1.0, 1e-5, "at least x"),  # a vertex beyond reach
        (1.0, 0.0, "at most x"),
        (1.0, 1.0, "at most x"),
        (0.3, -1.0, "no evidence"),  # over a hill: up at first, down at the target
    ],
)
def test_what_is_only_a_bound_is_told_as_one(a, b, said):
    rng = random.Random(4)
    controller = hdet.controllers.LineSearch(step_size=0.0)
    state = controller.init(["learning_rate"])
    for _ in range(30):
        probe = [a * m + b * m * m + rng.gauss(0, 1e-4) for m in wide(4)]
        state = controller.update(state, report(probe, 0.0, wide(4)))
    entry = state["learning_rate"]
    assert words("rate", 1.0, entry["estimate"], entry["error"]).startswith(f"rate: {said}")
    assert entry["error"] >= VAGUE


def test_how_far_a_slope_is_clear_by_trying():
    rng = random.Random(9)
    for _ in range(200):
        x, y = rng.gauss(0, 1), rng.gauss(0, 1)
        u, v, shared = rng.uniform(0, 0.5), rng.uniform(0, 0.5), rng.uniform(-1, 1)
        variance = (u * u, shared * u * v, v * v)

        def is_clear(t, x=x, y=y, variance=variance):
            return (x + y * t) ** 2 > 9 * (variance[0] + 2 * t * variance[1] + t * t * variance[2])

        for up in (True, False):
            end = clear_until(0.5, up, (x, y), variance)
            ahead = [0.5 + (1 if up else -1) * k / 100 for k in range(1000)]
            tried = next((t for t in ahead if not is_clear(t)), math.inf if up else -math.inf)
            assert end == pytest.approx(tried, abs=0.0101) or (math.isinf(tried) and abs(end) > 9)


def test_what_only_observes_finds_the_same_from_round_to_round():
    """With act=False the scale stays: what was averaged must not be carried over to a step size that never came."""
    steering = Steering(hdet.controllers.LineSearch(), ["learning_rate"], observe_only=True)
    for _ in range(20):
        asked = steering.update(report([(m - 2.0) ** 2 for m in wide(4)], 4.0, wide(4)))
    assert steering.scales == {"learning_rate": 1.0}
    assert steering.state_dict()["learning_rate"]["estimate"] == pytest.approx(math.log(4), rel=1e-9)
    assert math.log(asked["learning_rate"]) == pytest.approx(0.5)


@pytest.mark.parametrize("missing", [{"probe": None}, {"start": None}, {"start": math.nan}])
def test_without_a_probe_or_a_start_nothing_is_learned(missing):
    controller = hdet.controllers.LineSearch()
    state = controller.init(["learning_rate"])
    given = {"probe": (1.0, 2.0), "start": 1.0, **missing}
    seen = {"learning_rate": Observation(1.0, 1.0, 0.0, (0.5, 1.5))}
    after = controller.update(state, Report(10, (1.0, 2.0), seen, **given))
    assert after == {"learning_rate": {**state["learning_rate"], "highest": 1.0}}  # but for how high the schedule was


def test_it_ends_with_its_active_part():
    controller = hdet.controllers.LineSearch(active=0.5)
    state = controller.init(["learning_rate"])
    probe, rungs = [1.0, 2.0], [0.5, 1.5]
    assert controller.update(state, report(probe, 1.5, rungs, step=50, total_steps=100)) != state
    assert controller.update(state, report(probe, 1.5, rungs, step=51, total_steps=100)) == state
    assert controller.update(state, report(probe, 1.5, rungs, step=51)) != state


def test_its_plan():
    assert hdet.controllers.LineSearch().plan(["learning_rate"], None).until == {}
    alone = hdet.controllers.LineSearch(active=0.3).plan(["learning_rate"], 1000)
    assert (alone.interval, alone.design, alone.until) == (5, "permutations", {"learning_rate": 300})
    both = hdet.controllers.LineSearch().plan(["learning_rate/0", "learning_rate/1"], 1000)
    assert both.design == "turns"
    assert set(both.why) == {"learning_rate/0", "learning_rate/1"}


@pytest.mark.parametrize(
    "bad",
    [
        {"target": "best"},
        {"active": 1.5},
        {"smoothing": 1.0},
        {"step_size": -0.1},
        {"max_step": 0.0},
        {"reach": 1.0},
        {"max_scale": 0.5},
        {"interval": 0},
    ],
)
def test_bad_options(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))} must"):
        hdet.controllers.LineSearch(**bad)


@pytest.mark.parametrize("size", [3, 4, 8, 64])
@pytest.mark.parametrize(("rate", "others"), [(4.0, 0.0), (4.0, 3.0), (4.0, 10.0), (0.5, 10.0)])
def test_the_vertex_of_one_group_is_its_own_while_others_move(size, rate, others):
    """Two groups on a quadratic: the other one gains in every round, which must not count for this one."""
    rungs = slots.multipliers(size, 2.0, "log")
    start = 0.5 + 0.5 * others**2
    probe = [0.5 * (1 - rate * m) ** 2 + 0.5 * (0.5 * others) ** 2 for m in rungs]
    a, b = fit_with_intercept(rungs, [loss - start for loss in probe])
    assert -a / (2 * b) == pytest.approx(1 / rate, rel=1e-9)
    names = ["learning_rate/0", "learning_rate/1"]
    seen = {
        names[0]: Observation(1e-3, 1e-3, 0.0, tuple(rungs)),
        names[1]: Observation(1e-3, 1e-3, 0.0, (1.0,) * size),
    }
    controller = hdet.controllers.LineSearch()
    after = controller.update(controller.init(names), Report(5, tuple(probe), seen, 1000, tuple(probe), start))
    assert (after[names[0]]["scale"] > 1) == (rate < 2)  # neutral: the vertex belongs at 1/2
    assert after[names[1]]["scale"] == 1.0


def test_two_replicas_cannot_tell_a_group_from_the_others():
    assert fit_with_intercept((0.5, 1.5), (1.0, 2.0)) is None
    assert fit_with_intercept((0.5, 1.0, 1.5), (1.0, 2.0, math.nan)) is None


def test_a_state_of_before_the_highest_base_was_kept_goes_on():
    like = hdet.controllers.LineSearch().init(["learning_rate"])
    saved = {"learning_rate": {key: 2.0 for key in like["learning_rate"] if key != "highest"}}
    state = check_state(saved, like)["learning_rate"]
    assert list(state.items()) == [(key, 0.0 if key == "highest" else 2.0) for key in like["learning_rate"]]
    with pytest.raises(ValueError, match=r"holds \['scale'\], this controller needs"):
        check_state({"learning_rate": {"scale": 1.0}}, like)
