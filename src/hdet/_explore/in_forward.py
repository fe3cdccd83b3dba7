"""Hyperparameters that the forward pass reads: attributes of modules, scalars of the user's own code. Dropout is one of
them, in `dropout.py`.

Their values are written when the slots are dealt and stay until the next deal. They act before the gradients are
shared, so replicas can only be told apart by them with local gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hdet._explore.hyperparameter import Coordinate, Hyperparameter, check_scalar
from hdet._explore.slots import Ladder

Bounds = tuple[float, float]


class Cell:
    """One attribute that holds the scalar: a number, or a tensor with one element, which is changed in place.

    If user code writes the attribute, that becomes the base, used as it is until the next deal.

    Attributes:
        factors: the scale and the multiplier behind the current value.
    """

    def __init__(self, owner: Any, attribute: str) -> None:
        self.owner, self.attribute = owner, attribute
        self.factors = (1.0, 1.0)
        self._base = self._written = self._read()

    @property
    def tensor(self) -> Tensor | None:
        """The tensor that holds it, if one does."""
        held = getattr(self.owner, self.attribute)
        return held if isinstance(held, Tensor) else None

    @property
    def base(self) -> float:
        """The value set by the user's code. Reads a tensor back."""
        now = self._read()
        if now != self._written:
            self._base = self._written = now
        return self._base

    def write(self, value: float, base: float | None = None) -> None:
        """Write `value`, which does not become the base; `base`, if given, does."""
        self._base = self.base if base is None else base
        held = self.tensor
        if held is None:
            setattr(self.owner, self.attribute, value)
        else:
            with torch.no_grad():
                held.fill_(value)
        self._written = self._read()  # as rounded by the tensor

    def close(self) -> None:
        """Restore the base and leave the attribute to the user's code."""
        self.factors = 1.0, 1.0
        self.write(self.base)

    def _read(self) -> float:
        return float(getattr(self.owner, self.attribute))


@dataclass(frozen=True)
class InForward(Hyperparameter):
    """A scalar in attributes that the forward pass reads.

    Attributes:
        cells: the attributes; one scale moves them all.
    """

    cells: tuple[Cell, ...] = field(default=(), compare=False)
    before_reduce: bool = True

    def bases(self) -> Iterator[float]:
        """The base in each of its attributes, as it is now."""
        return (cell.base for cell in self.cells)

    def write(self, scale: float, multiplier: float) -> None:
        """Put this replica's value into every attribute."""
        for cell in self.cells:
            cell.factors = scale, multiplier
            cell.write(self.value_of(cell.base, scale, multiplier))

    def restore(self, bases: Sequence[float] | None = None) -> None:
        """Restore the bases and anything replaced to explore them; or resume from saved `bases`."""
        if bases is None:
            for cell in self.cells:
                cell.close()
            return
        for cell, base in zip(self.cells, bases, strict=True):
            cell.factors = 1.0, 1.0
            cell.write(base, base)

    def tensors(self) -> list[Tensor]:
        """The tensors that hold it; they are not averaged, because replicas differ in them on purpose."""
        return [held for cell in self.cells if (held := cell.tensor) is not None]


class Held:
    """A number, and the same number as a tensor on each requested device."""

    def __init__(self, number: float) -> None:
        self._number = number
        self._tensors: dict[torch.device, Tensor] = {}

    @property
    def number(self) -> float:
        return self._number

    @number.setter
    def number(self, number: float) -> None:
        self._number = number
        for tensor in self._tensors.values():
            tensor.fill_(number)

    def tensor(self, device: torch.device) -> Tensor:
        if device not in self._tensors:
            self._tensors[device] = torch.tensor(self._number, device=device)
        return self._tensors[device]


def attribute(
    module: Any,
    name: str,
    *,
    spread: float = 0.2,
    ladder: Ladder = "linear",
    coordinate: Coordinate = "log",
    bounds: Bounds = (0.0, math.inf),
    unit: float | None = None,
    label: str | None = None,
    regulariser: bool = False,
) -> InForward:
    """An attribute of a module (or of several, given as a list) that its forward pass reads: a temperature, a margin.

    Args:
        module: the module with the attribute, or a list of modules that share one scale.
        name: name of the attribute: a number, or a tensor with one element such as a buffer. A compiled model that
            reads a number is recompiled once, when the number first changes; with a tensor it is not.
        spread, ladder: as in `hdet.learning_rate`.
        coordinate: "log" for positive values, "logit" for values between two bounds, "linear" for the rest.
        bounds: limits of every replica's value.
        unit: unit of the linear coordinate; by default a tenth of the distance between the bounds.
        label: its name in records; by default that of the attribute.
        regulariser: True if training loss does not show its benefit.

    >>> layer = torch.nn.Softplus(beta=2.0)
    >>> attribute(layer, "beta", spread=0.1).name
    'beta'
    """
    owners = list(module) if isinstance(module, (list, tuple, nn.ModuleList)) else [module]
    if not owners:
        raise ValueError(f"module must hold at least one module with {name!r}, got none")
    for owner in owners:
        held = getattr(owner, name, None)
        if isinstance(held, bool) or not isinstance(held, (int, float, Tensor)) or torch.as_tensor(held).numel() != 1:
            raise TypeError(
                f"{type(owner).__name__}.{name} must be a number or a tensor with one element, got {held!r}; "
                "name the attribute that the forward pass reads"
            )
        if isinstance(held, nn.Parameter):
            raise TypeError(f"{type(owner).__name__}.{name} is trained: make it a buffer to explore it")
        if isinstance(held, Tensor) and not held.is_floating_point():
            raise TypeError(f"{type(owner).__name__}.{name} holds whole numbers ({held.dtype}): make it a float tensor")
    cells = tuple(Cell(owner, name) for owner in owners)
    made = InForward(
        label or name, float(spread), ladder, coordinate, bounds, unit=_unit(bounds, unit), regulariser=regulariser,
        cells=cells,
    )  # fmt: skip
    check_scalar(made)
    return made


@dataclass(frozen=True)
class Scalar(InForward):
    """A scalar that the user's own code reads: `smoothing.value`, or `smoothing.tensor(device)` in compiled code."""

    @property
    def value(self) -> float:
        """The value that this replica must use now."""
        return float(self._held.number)

    def tensor(self, device: str | torch.device = "cpu") -> Tensor:
        """The value as a tensor that is updated in place, so that compiled code sees changes."""
        return self._held.tensor(torch.device(device))

    def set_base(self, base: float) -> None:
        """Set another base, as from the user's own schedule; the value follows at once.

        Raises:
            ValueError: for a base outside the bounds.
        """
        low, high = self.bounds
        if not low <= base <= high:
            raise ValueError(f"the base of {self.name} must lie within its bounds {self.bounds}, got {base}")
        cell = self.cells[0]
        cell.write(self.value_of(base, *cell.factors), base)

    @property
    def _held(self) -> Held:
        held: Held = self.cells[0].owner
        return held


def scalar(
    name: str,
    value: float,
    *,
    spread: float = 0.2,
    ladder: Ladder = "linear",
    bounds: Bounds = (0.0, math.inf),
    coordinate: Coordinate | None = None,
    unit: float | None = None,
    before_reduce: bool = True,
    regulariser: bool = False,
) -> Scalar:
    """Any scalar that the user's code reads from the returned object: label smoothing, a loss weight, a margin.

    Compiled code reads its `tensor(device)`: torch compiles anew for every `label_smoothing=smoothing.value`. The same
    loss in one graph, for `s = smoothing.tensor(logits.device)`, is

        (1 - s) * cross_entropy(logits, y) - s * log_softmax(logits, -1).mean(-1).mean()

    Args:
        name: its name in records.
        value: its base.
        spread, ladder: as in `hdet.learning_rate`.
        bounds: limits of every replica's value.
        coordinate: by default "logit" between two finite bounds, otherwise "log".
        unit: unit of the linear coordinate; by default a tenth of the distance between the bounds.
        before_reduce: False if it acts only after the gradients are shared, so that sharing is allowed.
        regulariser: True if training loss does not show its benefit.

    >>> smoothing = scalar("label_smoothing", 0.1, bounds=(0, 0.5), spread=0.5)
    >>> smoothing.value
    0.1
    """
    chosen = coordinate or ("logit" if all(map(math.isfinite, bounds)) else "log")
    made = Scalar(
        name, float(spread), ladder, chosen, bounds, unit=_unit(bounds, unit), before_reduce=before_reduce,
        regulariser=regulariser, cells=(Cell(Held(float(value)), "number"),),
    )  # fmt: skip
    check_scalar(made)
    return made


def _unit(bounds: Bounds, unit: float | None) -> float:
    width = bounds[1] - bounds[0]
    return unit if unit is not None else width / 10 if math.isfinite(width) else 1.0
