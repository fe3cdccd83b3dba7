import math
import random
import statistics

import pytest

from hdet.controllers.confidence import (
    effective_rounds,
    new_co_scatter,
    new_mean,
    new_scatter,
    standard_error,
    total_weight,
    variance_of_mean,
    widened,
    words,
)


def plain(values, memory):
    """Mean, scatter and standard error from the whole history, by their definitions."""
    weights = [memory ** (len(values) - 1 - i) for i in range(len(values))]
    total = sum(weights)
    mean = sum(w * x for w, x in zip(weights, values, strict=True)) / total
    scatter = sum(w * (x - mean) ** 2 for w, x in zip(weights, values, strict=True))
    squares = sum(w * w for w in weights)
    variance = scatter / (total - squares / total)
    return mean, scatter, math.sqrt(variance * squares / total**2)


def in_steps(values, memory):
    mean = scatter = 0.0
    for n, value in enumerate(values, 1):
        after = new_mean(mean, value, n, memory)
        mean, scatter = after, new_scatter(scatter, value, mean, after, memory)
    return mean, scatter, standard_error(scatter, len(values), memory)


@pytest.mark.parametrize("memory", [0.3, 0.8, 0.99])
def test_round_by_round_is_the_same_as_from_the_whole_history(memory):
    rng = random.Random(0)
    values = [rng.gauss(1, 2) for _ in range(60)]
    for count in (2, 3, 10, 60):
        assert in_steps(values[:count], memory) == pytest.approx(plain(values[:count], memory), rel=1e-11)


@pytest.mark.parametrize("memory", [0.3, 0.8, 0.99])
def test_the_covariance_of_two_means(memory):
    """Of a quantity with itself it is the variance; of two it is a quarter of the variance of sum minus difference."""
    rng = random.Random(5)
    xs = [rng.gauss(1, 2) for _ in range(60)]
    ys = [0.5 * x + rng.gauss(0, 1) for x in xs]
    x_mean = y_mean = both = same = 0.0
    for n, (x, y) in enumerate(zip(xs, ys, strict=True), 1):
        x_after, y_after = new_mean(x_mean, x, n, memory), new_mean(y_mean, y, n, memory)
        both = new_co_scatter(both, x, x_mean, y, y_after, memory)
        same = new_co_scatter(same, x, x_mean, x, x_after, memory)
        x_mean, y_mean = x_after, y_after
    pairs = list(zip(xs, ys, strict=True))
    plus, minus = (in_steps([x + sign * y for x, y in pairs], memory)[2] ** 2 for sign in (1, -1))
    assert variance_of_mean(both, 60, memory) == pytest.approx((plus - minus) / 4, rel=1e-9)
    assert variance_of_mean(same, 60, memory) == pytest.approx(in_steps(xs, memory)[2] ** 2, rel=1e-9)


@pytest.mark.parametrize(("free", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (8, 2.306), (30, 2.042)])
def test_two_widened_errors_hold_95_percent(free, quantile):
    assert 1.96 * widened(1.0, free) == pytest.approx(quantile, rel=0.04)


def test_the_mean_is_the_bias_corrected_running_mean():
    rng, running, mean = random.Random(1), 0.0, 0.0
    for n in range(1, 100):
        value = rng.gauss(0, 1)
        running = 0.8 * running + 0.2 * value
        mean = new_mean(mean, value, n, 0.8)
        assert mean == pytest.approx(running / (1 - 0.8**n), rel=1e-12, abs=1e-14)


def test_weights():
    assert total_weight(10_000, 0.9) == pytest.approx(10)
    assert effective_rounds(10_000, 0.9) == pytest.approx(19)  # (1 + memory) / (1 - memory)
    assert total_weight(5, 0.0) == effective_rounds(5, 0.0) == 1


def test_no_error_is_known_before_the_second_round_or_without_memory():
    assert standard_error(0.0, 0, 0.9) == standard_error(0.0, 1, 0.9) == standard_error(1.0, 50, 0.0) == math.inf
    assert standard_error(1.0, 2, 0.9) < math.inf


@pytest.mark.parametrize("memory", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("count", [5, 50])
def test_the_standard_error_is_the_spread_of_the_mean(memory, count):
    rng = random.Random(2)
    runs = [in_steps([rng.gauss(0, 1) for _ in range(count)], memory) for _ in range(2000)]
    spread = statistics.pstdev(mean for mean, _, _ in runs)
    assert math.sqrt(statistics.fmean(error**2 for _, _, error in runs)) == pytest.approx(spread, rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("learning_rate", 1.0, math.log(1.8), 0.2 / 1.8), "learning_rate: x1.80 +- 0.20"),
        (("learning_rate", 2.0, math.log(0.5), 0.1), "learning_rate: x1.00 +- 0.10"),
        (("weight_decay", 1.0, 0.0, math.inf), "weight_decay: no evidence"),
        (("weight_decay", 1.0, 0.0, 0.0), "weight_decay: no evidence"),
        (("weight_decay", 1.0, 0.3, 0.2), "weight_decay: no evidence"),
        (("weight_decay", 1.0, 7.0, math.inf), "weight_decay: no evidence"),
        (("learning_rate", 0.5, 0.1, 0.2), "learning_rate: x0.50, no evidence that it is off"),
        (("learning_rate", 0.001, math.log(2), 0.1), "learning_rate: x0.0020 +- 0.0002"),
        (("learning_rate", 1.0, math.log(1.8), 0.0002), "learning_rate: x1.8000 +- 0.0004"),
        (("learning_rate", 1.0, math.log(1.8), 0.0), "learning_rate: x1.80 +- 0.00"),
        (("learning_rate", 1.0, math.log(1.8), 1e-15), "learning_rate: x1.800000 +- 0.000000"),
        (("learning_rate", 1.0, math.log(300), 0.499), "learning_rate: x300.00 +- 149.70"),
        (("learning_rate", 2.0, math.log(300), 0.5), f"learning_rate: at least x{600 / math.e:.2f}"),
        (("learning_rate", 1.0, math.log(2000), 3.0), "learning_rate: at least x4.96"),
        (("learning_rate", 1.0, -math.log(2000), 3.0), "learning_rate: at most x0.20"),
        (("learning_rate", 1.0, math.log(2000), 4.0), "learning_rate: no evidence"),
    ],
)
def test_words(arguments, said):
    assert words(*arguments) == said
