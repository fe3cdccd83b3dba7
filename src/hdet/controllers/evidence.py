"""How sure a controller is: a mean over rounds that forgets slowly, its standard error, and both in words.

Every function is of plain numbers. A round that lies k rounds back has the weight memory^k; with n rounds so far,

    W = sum_k memory^k,     Q = sum_k memory^2k,     effective rounds = W^2 / Q

The standard error takes the rounds to be independent of each other. What is the same in all of them (a probe that is
not like the data, a loss that cannot see the benefit) is not in it.
"""

from __future__ import annotations

import math

NOTHING = {"estimate": 0.0, "error": math.inf}
"""The state entries of a controller that has not seen anything yet."""


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
    """The weighted mean with `value`, that of the last of `rounds` rounds; `mean` is the one without it.

    The same as m <- memory m + (1 - memory) value, divided by 1 - memory^rounds.

    >>> new_mean(1.0, 4.0, 2, 0.5)
    3.0
    """
    return mean + (value - mean) / total_weight(rounds, memory)


def new_scatter(scatter: float, value: float, mean: float, after: float, memory: float) -> float:
    """The weighted sum of the squared distances from the mean, which `value` has moved from `mean` to `after`.

    >>> new_scatter(0.0, 4.0, 1.0, 3.0, 0.5)
    3.0
    """
    return max(0.0, memory * scatter + (value - mean) * (value - after))


def standard_error(scatter: float, rounds: float, memory: float) -> float:
    """The standard error of the weighted mean, from the scatter over rounds; inf before the second round.

    With memory 0 there is only ever one round to look at, and so no error: inf.
    """
    weight, effective = total_weight(rounds, memory), effective_rounds(rounds, memory) if rounds else 0.0
    if rounds < 2 or effective <= 1:
        return math.inf
    variance = scatter / (weight * (1 - 1 / effective))  # unbiased
    return math.sqrt(variance / effective)


def words(name: str, scale: float, estimate: float, error: float) -> str:
    """What was found about one hyperparameter.

    The number is the factor on the schedule that the evidence points to, `scale * exp(estimate)`, with its standard
    error. Within two standard errors of where the scale is, there is no evidence that it should move.

    Args:
        name: the hyperparameter.
        scale: the scale that the last round was trained with.
        estimate: the logarithm of the factor by which it was found to be off.
        error: the standard error of that; inf for nothing known.

    >>> words("learning_rate", 1.0, 0.588, 0.111)
    'learning_rate: x1.80 +- 0.20'
    >>> words("weight_decay", 1.0, 0.0, math.inf)
    'weight_decay: no evidence'
    >>> words("learning_rate", 30.0, 0.1, 0.2)
    'learning_rate: x30.00, no evidence that it is off'
    """
    if not abs(estimate) > 2 * error or math.isinf(error):
        return f"{name}: no evidence" if scale == 1.0 else f"{name}: {_factor(scale)}, no evidence that it is off"
    factor = scale * math.exp(estimate)
    return f"{name}: {_factor(factor)} +- {factor * error:.{_decimals(factor)}f}"


def _factor(factor: float) -> str:
    return f"x{factor:.{_decimals(factor)}f}"


def _decimals(factor: float) -> int:
    """Two, or as many as show two digits of a small factor."""
    return max(2, 1 - math.floor(math.log10(factor))) if factor > 0 else 2
