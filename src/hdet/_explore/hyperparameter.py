"""One explored scalar: how far the replicas spread, in which coordinate, within which bounds.

base    what the user's schedule or code says now, the same on every replica
center  the base moved by `scale`; the controller owns the scale
value   the center moved by this replica's multiplier; what it trains with

The subclasses define where a scalar is stored: `in_groups.py` (parameter groups of optimizers, written for the duration
of a step) and `in_forward.py` (read by the forward pass, written when slots are dealt).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet._explore.slots import Ladder, check_spread, multipliers

Number = TypeVar("Number", bound="float | Tensor")
Coordinate = Literal["linear", "log", "logit"]
_ANYTHING = (0.0, math.inf)


@dataclass(frozen=True)
class Hyperparameter:
    """A scalar that replicas try different values of.

    A factor k, the scale or a multiplier, moves a value x by log k in the hyperparameter's coordinate:

        log      x k                                              rates, decays, temperatures
        logit    x/(1-x) k for the odds of x within its bounds    probabilities, momenta
        linear   x + unit log k                                   what may be zero or negative

    Attributes:
        name: unique within an ensemble; slots are drawn from it and records show it.
        spread: how far the multipliers reach; see `hdet._explore.slots.multipliers`.
        ladder: how the multipliers are spaced.
        coordinate: "log", "logit" or "linear".
        bounds: limits of every replica's value.
        floor: lower limit of the center, unless the base is lower ("log" only).
        unit: amount that a factor of e adds ("linear" only).
        off_at_zero: 0 means off and stays 0, whatever the bounds.
        before_reduce: it acts on the gradients before replicas share them.
        regulariser: it must be judged on held-out data, because training loss does not show its benefit.
    """

    name: str
    spread: float
    ladder: Ladder = "linear"
    coordinate: Coordinate = "log"
    bounds: tuple[float, float] = _ANYTHING
    floor: float = 0.0
    unit: float = 1.0
    off_at_zero: bool = False
    before_reduce: bool = False
    regulariser: bool = False

    @property
    def diverges(self) -> bool:
        """Whether the replicas get different values."""
        return self.spread > (0 if self.ladder == "linear" else 1)

    @property
    def is_bounded(self) -> bool:
        """Whether a schedule could lead it out of its bounds."""
        return self.bounds != _ANYTHING

    @property
    def multiplies(self) -> bool:
        """Whether a value is base * scale * multiplier and nothing else."""
        return self.coordinate == "log" and not self.is_bounded and self.floor <= 0.0

    @property
    def place(self) -> str:
        """The place of the scalar in words, the same on every replica."""
        return self.name

    def bases(self) -> Iterator[float | Tensor]:
        """The base in each place that holds it, as it is now."""
        raise NotImplementedError

    def places(self, optimizers: Sequence[Optimizer]) -> tuple[str, ...]:
        """A name for each place of the scalar, in the order of `bases()`; `optimizers` are the ensemble's."""
        size = len(list(self.bases()))
        return (self.name,) if size == 1 else tuple(f"{self.name}[{number}]" for number in range(size))

    def peak(self) -> float | None:
        """The schedule's highest value, if the scheduler exposes it."""
        return None

    def steered(self, base: float, scale: float = 1.0) -> float:
        """The base for a controller: for a rate its size, as far as bounds let the center follow it at this scale; for
        others, whether it can be moved at all.
        """
        if self.coordinate == "log":
            return self._bounded(base * scale) / scale if self.is_bounded and scale > 0 else base
        return 1.0 if self.coordinate == "linear" or self.bounds[0] < base < self.bounds[1] else 0.0

    def center(self, base: Number, scale: float) -> Number:
        """The base moved by the scale, not below the floor and within the bounds."""
        if scale == 1.0:
            return self._bounded(base)
        moved = self.move(base, scale)
        if scale < 1.0 and self.floor > 0.0:
            if isinstance(base, Tensor):
                moved = torch.maximum(moved, base.clamp(max=self.floor))  # type: ignore[assignment, arg-type]
            else:
                moved = max(moved, min(base, self.floor))  # type: ignore[assignment]
        return self._bounded(moved)

    def value_of(self, base: Number, scale: float, multiplier: float) -> Number:
        """The value of a replica with this multiplier."""
        center = self.center(base, scale)
        return center if multiplier == 1.0 else self._bounded(self.move(center, multiplier))

    def values_of(self, base: float, scale: float, multipliers: Sequence[float]) -> tuple[float, ...]:
        """`value_of()` for many replicas, with one look at the center and the coordinate."""
        center = self.center(base, scale)
        if self.coordinate == "log" and not self.is_bounded:
            return tuple([center * k for k in multipliers])
        return tuple([center if k == 1.0 else self._bounded(self.move(center, k)) for k in multipliers])

    def within_bounds(self, bases: Sequence[float], scale: float, dealt: tuple[float, ...]) -> tuple[float, ...]:
        """The multipliers that replicas trained with: the dealt ones, except where a bound clipped the value.

        If one scale moves several places, their geometric mean.
        """
        if not self.is_bounded or self.coordinate == "logit":
            return dealt
        rows = [self._within_bounds(base, scale, dealt) for base in bases if base != 0.0 or self.coordinate != "log"]
        if len(set(rows)) <= 1:
            return rows[0] if rows else dealt
        return tuple(math.exp(math.fsum(map(math.log, column)) / len(rows)) for column in zip(*rows, strict=True))

    def _within_bounds(self, base: float, scale: float, dealt: tuple[float, ...]) -> tuple[float, ...]:
        center = self.center(base, scale)
        values = self.values_of(base, scale, dealt)
        return tuple(
            k if k == 1.0 or value == self.move(center, k) else self._factor(center, value)
            for k, value in zip(dealt, values, strict=True)
        )

    def limits(self, base: float, size: int) -> tuple[float, float]:
        """The least and the largest scale that keep all values of `size` replicas within the bounds."""
        low, high = self.bounds
        rungs = multipliers(size, self.spread, self.ladder) if self.diverges else [1.0]
        if self.coordinate == "logit" or (self.coordinate == "log" and base <= 0.0):
            return _ANYTHING
        if self.coordinate == "log":
            down, up = low / base, high / base
        else:
            down = math.exp(max((low - base) / self.unit, -700.0))
            up = math.exp(min((high - base) / self.unit, 700.0))
        least, most = down / min(rungs), up / max(rungs)
        if least <= most:
            return least, most
        middle = min(max(math.sqrt(least * most), down), up)  # too wide for the bounds: values are cut, not the center
        return middle, middle

    def move(self, x: Number, k: float) -> Number:
        if self.coordinate == "log":
            return x * k  # type: ignore[return-value]
        if self.coordinate == "linear":
            return x + self.unit * math.log(k)  # type: ignore[return-value]
        low, high = self.bounds
        p = (self._bounded(x) - low) / (high - low)
        return self._unless_off(x, low + (high - low) * (k * p / (1 + (k - 1) * p)))

    def _factor(self, center: float, value: float) -> float:
        """The factor that moves the center to the value, for "log" and "linear"."""
        if self.coordinate == "linear":
            return math.exp((value - center) / self.unit)
        return value / center if center > 0 and value > 0 else 1.0

    def _bounded(self, x: Number) -> Number:
        low, high = self.bounds
        if not self.is_bounded:
            return x
        return self._unless_off(x, x.clamp(low, high) if isinstance(x, Tensor) else min(max(x, low), high))

    def _unless_off(self, x: Number, otherwise: Any) -> Number:
        """`otherwise`, but 0 where x is if that means off."""
        if not self.off_at_zero:
            return otherwise  # type: ignore[no-any-return]
        if isinstance(x, Tensor):
            return torch.where(x.ne(0), otherwise, x)  # type: ignore[return-value]
        return otherwise if x else x


def check_scalar(h: Hyperparameter) -> None:
    """Raise if spread, coordinate, bounds and the bases of `h` do not fit each other."""
    check_spread(h.spread, h.ladder)
    low, high = h.bounds
    if not low < high:
        raise ValueError(f"bounds of {h.name} must be (low, high) with low < high, got {h.bounds}; for example (0, 1)")
    if h.coordinate not in ("linear", "log", "logit"):
        raise ValueError(f'coordinate of {h.name} must be "linear", "log" or "logit", got {h.coordinate!r}')
    if h.coordinate == "logit" and not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(
            f"the logit coordinate of {h.name} needs two finite bounds, got {h.bounds}; for example (0, 1)"
        )
    if h.coordinate == "log" and low < 0:
        raise ValueError(
            f"the log coordinate of {h.name} needs bounds of 0 or more, got {h.bounds}; for values that may be "
            'negative write coordinate="linear"'
        )
    if h.coordinate == "linear" and not 0 < h.unit < math.inf:
        raise ValueError(f"unit of {h.name} must be positive and finite, got {h.unit}; for example unit=0.1")
    for base in h.bases():
        off = h.off_at_zero and not isinstance(base, Tensor) and base == 0.0
        if not (isinstance(base, Tensor) or off or low <= base <= high):
            raise ValueError(f"{h.name} is {base}, outside its bounds {h.bounds}; widen the bounds or change the value")


def representative(used: Sequence[float | Tensor], coming: Sequence[float | Tensor]) -> tuple[float, float]:
    """The last and the next base of one representative place: the first that is explored. Reads tensors back.

    A base of 0 is not explored in the log coordinate, because its multiples are 0.
    """
    pairs = [(float(base), float(following)) for base, following in zip(used, coming, strict=False)]
    return next((pair for pair in pairs if pair[0] != 0.0), (0.0, 0.0))


def is_of(name: str, what: str) -> bool:
    """Whether a hyperparameter of this name is `what`, in all parameter groups or in one.

    >>> is_of("learning_rate", "learning_rate"), is_of("learning_rate/dense", "learning_rate")
    (True, True)
    """
    return name == what or name.startswith(f"{what}/")


def flatten(hyperparameters: Sequence[Hyperparameter | Sequence[Hyperparameter]]) -> list[Hyperparameter]:
    """Hyperparameters and lists of them, as one list."""
    flat: list[Hyperparameter] = []
    for h in [hyperparameters] if isinstance(hyperparameters, Hyperparameter) else hyperparameters:
        flat += h if isinstance(h, (list, tuple)) else [h]  # type: ignore[list-item]
    return flat
