"""What `find_lr` has found, to read, to print and to draw."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FoundRate:
    """A learning rate and how it was found.

    Attributes:
        rate: the learning rate of the first parameter group with one: factor * the geometric middle of `whole`.
        scale: what the groups' present rates are to be multiplied by to train at it.
        rates: that of every group, optimizer by optimizer.
        interval: (lo, hi), between which the loss was low, as rates of the first group.
        whole: the same, with a lower lo where the interval is so narrow that the ramp cannot have seen all of it.
        factor: on the middle of that.
        first_loss: the probe's loss at the initial weights.
        coarse: the first ramp's (rate, loss on the probe).
        fine: the second ramp's.
        steps: optimizer steps taken.
        samples: samples of the probe that were scored, on all replicas together.
        cost: everything that was done, in training steps, by the seconds that steps and scores took.
        seconds: how long it took.
    """

    rate: float
    scale: float
    rates: tuple[tuple[float, ...], ...]
    interval: tuple[float, float]
    whole: tuple[float, float]
    factor: float
    first_loss: float
    coarse: list[tuple[float, float]] = field(repr=False)
    fine: list[tuple[float, float]] = field(repr=False)
    steps: int
    samples: int
    cost: float
    seconds: float

    def __float__(self) -> float:
        return self.rate

    def __format__(self, spec: str) -> str:
        return format(self.rate, spec) if spec else str(self)

    def __str__(self) -> str:
        low, high = self.interval
        narrow = "" if self.whole == self.interval else f" (narrow, so counted from {self.whole[0]:.3g} on)"
        return (
            f"learning rate {self.rate:.3g}, {self.scale:.3g} times the present one; losses were low from {low:.3g} to "
            f"{high:.3g}{narrow}; {self.steps} steps, {self.seconds:.1f} s, as much as {self.cost:.0f} steps of "
            "training"
        )

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw both curves and the rate that was found into a file.

        Raises:
            ModuleNotFoundError: without matplotlib.
        """
        try:
            importlib.import_module("matplotlib")
            figure_of: Any = importlib.import_module("matplotlib.figure").Figure
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "plot needs matplotlib, which is not installed: pip install matplotlib"
            ) from error
        figure = figure_of(figsize=(7, 4.5))
        axis = figure.subplots()
        for label, curve in (("coarse", self.coarse), ("fine", self.fine)):
            losses = [min(loss, 1.5 * self.first_loss) for _, loss in curve]
            axis.plot([rate for rate, _ in curve], losses, ".-", label=f"{label} ramp")
        axis.axvspan(*self.interval, alpha=0.15, color="tab:green", label="low losses")
        if self.whole != self.interval:
            axis.axvspan(self.whole[0], self.interval[0], alpha=0.06, color="tab:green", label="counted too")
        axis.axvline(self.rate, color="k", linestyle="--", label=f"found: {self.rate:.3g}")
        axis.axhline(self.first_loss, color="0.6", linestyle=":", label="initial weights")
        axis.set_xscale("log")
        axis.set_xlabel("learning rate")
        axis.set_ylabel("loss on the probe")
        axis.grid(alpha=0.3)
        axis.legend()
        figure.tight_layout()
        figure.savefig(path, dpi=120)
