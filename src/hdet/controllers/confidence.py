"""A controller's confidence: a mean over rounds that forgets slowly, its standard error, and both in words.

All functions take plain numbers. A round k rounds ago has the weight memory^k; with n rounds so far,

    W = sum_k memory^k,     Q = sum_k memory^2k,     effective rounds = W^2 / Q

The standard error assumes independent rounds. It leaves out errors common to all rounds, such as a probe unlike the
data or a loss that cannot show the benefit.
"""

from __future__ import annotations

import math

NOTHING = {"estimate": 0.0, "error": math.inf}
"""The state entries of a controller before its first round."""
VAGUE = 0.5
"""From this error on, report only the near end of the range: two errors span a factor of e or more either way."""

_MOST_DECIMALS = 6  # of an error


def total_weight(rounds: float, memory: float) -> float:
    """W, the sum of the weights of `rounds` rounds.

    >>> total_weight(3, 0.5)
    1.75
    """
    return (1 - math.pow(memory, rounds)) / (1 - memory)


def effective_rounds(rounds: float, memory: float) -> float:
    """How many equally weighted rounds would average as well: W^2 / Q.

    >>> effective_rounds(1, 0.8)
    1.0
    """
    return total_weight(rounds, memory) ** 2 / total_weight(rounds, memory**2)


def new_mean(mean: float, value: float, rounds: float, memory: float) -> float:
    """Add `value`, from the last of `rounds` rounds, to the weighted mean of the rounds before.

    Equals m <- memory m + (1 - memory) value, divided by 1 - memory^rounds.

    >>> new_mean(1.0, 4.0, 2, 0.5)
    3.0
    """
    return mean + (value - mean) / total_weight(rounds, memory)


def new_scatter(scatter: float, value: float, mean: float, after: float, memory: float) -> float:
    """The weighted sum of squared distances from the mean, after `value` moved the mean from `mean` to `after`.

    >>> new_scatter(0.0, 4.0, 1.0, 3.0, 0.5)
    3.0
    """
    return max(0.0, memory * scatter + (value - mean) * (value - after))


def new_co_scatter(scatter: float, value: float, mean: float, other: float, other_after: float, memory: float) -> float:
    """The weighted sum of the products of two quantities' distances from their means.

    `mean` is the mean of the first quantity before `value`; `other_after` is the mean of the second after `other`.

    >>> new_co_scatter(0.0, 4.0, 1.0, -4.0, -3.0, 0.5)
    -3.0
    """
    return memory * scatter + (value - mean) * (other - other_after)


def variance_of_mean(scatter: float, rounds: float, memory: float) -> float:
    """The variance of a weighted mean, or the covariance of two, from the scatter over rounds; inf if unknown.

    It is unknown before the second round, and always with memory 0, which keeps only one round.
    """
    weight, effective = total_weight(rounds, memory), effective_rounds(rounds, memory) if rounds else 0.0
    if rounds < 2 or effective <= 1:
        return math.inf
    variance = scatter / (weight * (1 - 1 / effective))  # unbiased
    return variance / effective


def standard_error(scatter: float, rounds: float, memory: float) -> float:
    """The standard error of the weighted mean, from the scatter over rounds; inf if unknown."""
    return math.sqrt(variance_of_mean(scatter, rounds, memory))


def widened(error: float, free: float) -> float:
    """Widen a standard error with `free` degrees of freedom so that twice the result covers 95 %.

    Within 4 % of Student's t, from one degree on.

    >>> [round(widened(1.0, free), 2) for free in (1, 2, 4, 8, 100)]
    [6.69, 2.17, 1.41, 1.17, 1.01]
    """
    return error * math.exp((1.2 + 0.7 / free) / free)


def words(name: str, scale: float, estimate: float, error: float) -> str:
    """The finding about one hyperparameter.

    The number is the factor on the schedule that the evidence suggests, `scale * exp(estimate)`, with its standard
    error. Within two standard errors of the current scale there is no evidence that it should move. An error of `VAGUE`
    or more says little about the far side: then only the near end, two standard errors off, is reported.

    Args:
        name: the hyperparameter.
        scale: the scale that the last round trained with.
        estimate: the logarithm of the factor by which the scale is off.
        error: the standard error of the estimate; inf if nothing is known.

    >>> words("learning_rate", 1.0, 0.588, 0.111)
    'learning_rate: x1.80 +- 0.20'
    >>> words("weight_decay", 1.0, 0.0, math.inf)
    'weight_decay: no evidence'
    >>> words("learning_rate", 1.0, 5.3, 1.5)
    'learning_rate: at least x9.97'
    >>> words("learning_rate", 30.0, 0.1, 0.2)
    'learning_rate: x30.00, no evidence that it is off'
    """
    if not abs(estimate) > 2 * error or math.isinf(error):
        return f"{name}: no evidence" if scale == 1.0 else f"{name}: {_factor(scale)}, no evidence that it is off"
    if error >= VAGUE:
        side = "at least" if estimate > 0 else "at most"
        return f"{name}: {side} {_factor(scale * math.exp(estimate - math.copysign(2 * error, estimate)))}"
    factor = scale * math.exp(estimate)
    decimals = max(_decimals(factor), min(_decimals(10 * factor * error), _MOST_DECIMALS))
    return f"{name}: x{factor:.{decimals}f} +- {factor * error:.{decimals}f}"


def words_unexplored(name: str, scale: float) -> str:
    """The current scale of a hyperparameter that is not explored.

    >>> words_unexplored("learning_rate", 5.03)
    'learning_rate: x5.03, not explored'
    """
    return f"{name}: not explored" if scale == 1.0 else f"{name}: {_factor(scale)}, not explored"


def words_not_learning(name: str, scale: float) -> str:
    """The current scale while the losses are no lower than at the start, which is no evidence for it.

    >>> words_not_learning("learning_rate", 2.75)
    'learning_rate: x2.75, but the losses have not clearly fallen since the start'
    """
    return f"{name}: {_factor(scale)}, but the losses have not clearly fallen since the start"


def _factor(factor: float) -> str:
    return f"x{factor:.{_decimals(factor)}f}"


def _decimals(factor: float) -> int:
    """Two, or more for small factors, to show two digits."""
    return max(2, 1 - math.floor(math.log10(factor))) if factor > 0 else 2
