"""What `find_lr` has found, to read, to print and to draw."""

from __future__ import annotations

import importlib
import json
import math
import os
import pathlib
import textwrap
from dataclasses import dataclass, field
from typing import Any

from hdet._find_lr.apply import apply_rates, check_sizes

_LINE = 105  # characters above the picture


@dataclass(frozen=True)
class FoundRate:
    """A learning rate and how it was found. The same on every replica.

    Attributes:
        rate: the learning rate of the first parameter group with one: factor * the geometric middle of `whole`.
        scale: what the groups' present rates are to be multiplied by to train at it.
        rates: that of every group, optimizer by optimizer.
        interval: (lo, hi), between which the loss was low, as rates of the first group.
        whole: the same, with a lower lo where the interval is so narrow that the ramp cannot have seen all of it.
        factor: what that middle is multiplied by.
        first_loss: the probe's loss at the initial weights.
        coarse: the first ramp's (rate, loss on the probe).
        fine: the second ramp's.
        steps: optimizer steps taken.
        samples: samples of the probe that were scored, on all replicas together.
        cost: everything that was done, in training steps, by the seconds that steps and scores took: means over the
            replicas' clocks.
        seconds: how long it took, a mean too.
        doubts: what speaks against the answer, in words; empty if nothing does. `find_lr` has warned of it.
        total_steps: optimizer steps of the training that it is for, as given.
        sizes: how many numbers every group trains, optimizer by optimizer; empty if that is not known.
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
    doubts: tuple[str, ...] = ()
    total_steps: int | None = None
    sizes: tuple[tuple[int, ...], ...] = ()

    @property
    def sure(self) -> bool:
        """Whether nothing speaks against the answer, as far as the search can tell."""
        return not self.doubts

    def __float__(self) -> float:
        return self.rate

    def __format__(self, spec: str) -> str:
        return format(self.rate, spec) if spec else str(self)

    def __str__(self) -> str:
        low, high = self.interval
        narrow = "" if self.whole == self.interval else f" (narrow, so counted from {self.whole[0]:.3g} on)"
        part = f", {100 * self.cost / self.total_steps:.1f} % of the run" if self.total_steps else ""
        unsure = "" if self.sure else f"; not sure: {'; '.join(self.doubts)}"
        return (
            f"found {self.rate:.3g}, {self.scale:.3g} times your rate; losses were low between {low:.3g} and {high:.3g}"
            f"{narrow}; cost as much as {self.cost:.0f} steps ({self.seconds:.1f} s){part}{unsure}"
        )

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write everything that was found to `find_lr.json` in a folder, for `hdet report` and to keep.

        Call it on one replica: it is the same on all.
        """
        path = pathlib.Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        told = {**_plain(vars(self)), "sure": self.sure, "start": self.rate / self.scale}
        (path / "find_lr.json").write_text(json.dumps(told, allow_nan=False) + "\n")

    def apply(self, optimizer: Any, scheduler: Any = None, *, steps: int | None = None) -> FoundRate:
        """Train at the found rate: the whole schedule keeps its shape, and its peak becomes `rates`, group by group.

        Call it on every replica, before training; the scheduler may be older or younger than the search. Every rate in
        the parameter groups and in the scheduler is multiplied by one factor per group (`lr`, `initial_lr`, `max_lr`,
        `base_lrs`, `eta_min`, ...), so loggers, `get_last_lr()` and checkpoints show the schedule that is trained with.
        Where the groups' factors differ, a floor that they share, such as `eta_min`, stays as it is.

        The peak is the highest rate from the present step on. It is found on a copy of the scheduler, which is given a
        constant loss if it wants one, and checked on another copy before anything is written.

        Args:
            optimizer: what `find_lr` was given, or what Accelerate has made of it.
            scheduler: its scheduler, for several optimizers a list with None for those without one. Required if there
                is one, because it would undo the rate.
            steps: how often `scheduler.step()` is called in the run. By default the search's `total_steps`, then the
                scheduler's, then 1000; at most 100,000 are looked at.

        Returns:
            Itself: `found = hdet.find_lr(...).apply(optimizer, scheduler)`.

        Raises:
            TypeError: for what is no optimizer or no scheduler.
            ValueError: if the rate was found for other optimizers or groups, if a schedule is there but no scheduler is
                given, if its peak is 0 or not known, or if the scheduler holds a rate that cannot be multiplied. The
                message says what to write. Nothing is changed then.

        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1e-3)
        >>> scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100, eta_min=1e-5)
        >>> found = FoundRate(0.1, 100.0, ((0.1,),), (0.1, 0.4), (0.1, 0.4), 0.5, 2.0, [], [], 10, 10, 10.0, 1.0)
        >>> found = found.apply(optimizer, scheduler, steps=100)
        >>> print(*(f"{rate:.3g}" for rate in (*scheduler.get_last_lr(), scheduler.eta_min)))
        0.1 0.001
        """
        if self.sizes:
            check_sizes(self.sizes, optimizer)
        apply_rates(self.rates, self.total_steps, optimizer, scheduler, steps)
        return self

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw both curves, the rate that was found and how it follows from them into a file.

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
        figure = figure_of(figsize=(7, 4.8), layout="constrained")
        axis = figure.subplots()
        for label, curve in (("coarse", self.coarse), ("fine", self.fine)):
            losses = [min(loss, 1.5 * self.first_loss) for _, loss in curve]
            axis.plot([rate for rate, _ in curve], losses, ".-", label=f"{label} ramp")
        axis.axvspan(*self.interval, alpha=0.15, color="tab:green", label="low losses")
        if self.whole != self.interval:
            axis.axvspan(self.whole[0], self.interval[0], alpha=0.06, color="tab:green", label="counted too")
        middle = math.sqrt(self.whole[0] * self.whole[1])
        axis.axvline(middle, color="tab:green", linestyle=":", label=f"middle of the green: {middle:.3g}")
        axis.axvline(self.rate, color="k", linestyle="--", label=f"found: {self.rate:.3g}, {self.factor:.2g} times it")
        axis.axhline(self.first_loss, color="0.6", linestyle=":", label="initial weights")
        axis.set_xscale("log")
        axis.set_xlabel("learning rate")
        axis.set_ylabel("loss on the probe")
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small")
        axis.set_title(textwrap.fill(self._outside(), _LINE), fontsize="small", loc="left")
        if not self.sure:
            said = textwrap.fill(f"Not sure: {'; '.join(self.doubts)}.", _LINE)
            figure.suptitle(said, fontsize="small", color="tab:red", x=0.01, horizontalalignment="left")
        figure.savefig(path, dpi=120)

    def _outside(self) -> str:
        """Why the rate is not one of those whose losses were low; empty if it is."""
        low, high = self.interval
        if low <= self.rate <= high:
            return ""
        if self.rate > high:
            return f"The rate is above the low losses, as the factor is {self.factor:.3g}."
        if self.whole == self.interval:
            return "The rate is below the low losses: a run stays longer at a rate than the ramp, and wants lower ones."
        return (
            f"The rate is below the low losses: they span less than {high / self.whole[0]:.3g}-fold, so the ramp is "
            "too fast to see how far down they reach. The pale green counts too; a run wants lower rates than a ramp."
        )


def _plain(value: Any) -> Any:
    """As JSON has it, with null for what is not finite."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
