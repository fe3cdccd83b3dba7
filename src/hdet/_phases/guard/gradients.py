"""The gradient guard: a step whose gradient is not finite changes nothing, on any replica.

With shared gradients one replica's NaN reaches all of them within the step. Each sees the same reduced gradient and
decides alone, so nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet._hooks import Closure, Hooks, StepArgs, with_closure
from hdet._tensors.finite import not_finite
from hdet._tensors.parameters import parameters_of

_MOST_IN_A_ROW = 3
_LOOK_EVERY = 16  # checks, where the streak is on a device


class GradientGuard:
    """Checks the gradients of optimizers right before each step.

    For fused optimizers it sets `found_inf` on the device, as GradScaler does, without reading back. From the others it
    hides the gradients, which takes one read from the device per step.

    Args:
        optimizers: the optimizers to guard. A skipped step leaves their momentum unchanged.

    Attributes:
        skipped: steps that were skipped since `reset()`, a number or a tensor on the device.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.skipped: Tensor | int = 0
        self._streak: Tensor | int = 0
        self._checks = 0
        self._bad: Tensor | int | None = None  # whether to skip the current step, of one optimizer or several
        self._within: dict[int, Tensor | None] = {}  # the optimizers now stepping, and their own `found_inf`
        self._optimizers = tuple(optimizers)
        self._hooks = Hooks(self)
        for optimizer in optimizers:
            self._hooks.around_step(optimizer, self._before_step, self._after_step)

    def reset(self) -> None:
        """Count from 0 again."""
        self.skipped = self._streak = 0
        self._bad = None

    def count(self) -> None:
        """After a step: count it once, however many optimizers took part, and forget steps that raised."""
        for optimizer in [o for o in self._optimizers if id(o) in self._within]:
            self._leave(optimizer)
        if self._bad is not None:
            self._checks += 1
            self.skipped = self.skipped + self._bad
            self._streak = (self._streak + self._bad) * self._bad
            self._bad = None

    @property
    def stuck(self) -> bool:
        """Whether the last few steps were all skipped, so that waiting is useless. Reads a device now and then.

        With shared gradients the answer is the same on every replica, at the same step.
        """
        if isinstance(self._streak, Tensor) and self._checks % _LOOK_EVERY:
            return False
        return bool(self._streak >= _MOST_IN_A_ROW)

    def close(self) -> None:
        """Take off the hooks."""
        self._hooks.remove()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArgs | None:
        def check_after(closure: Closure) -> Closure:
            def checked() -> Any:
                loss = closure()
                self._check(optimizer)  # there was no gradient before
                return loss

            return checked

        with_own = with_closure(args, kwargs, check_after)
        if with_own is None:
            self._check(optimizer)
        return with_own

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if id(optimizer) in self._within:
            self._leave(optimizer)

    def _leave(self, optimizer: Optimizer) -> None:
        before = self._within.pop(id(optimizer))
        if before is not None:
            optimizer.found_inf = before  # type: ignore[attr-defined]
        elif hasattr(optimizer, "found_inf"):
            del optimizer.found_inf

    @torch.no_grad()
    def _check(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._within:  # a step within a step, by a subclass
            return
        parameters = [p for p in parameters_of(optimizer) if p.grad is not None]
        bad = not_finite([p.grad for p in parameters if p.grad is not None])
        if bad is None:
            return
        if getattr(optimizer, "_step_supports_amp_scaling", False):  # torch's fused ones say so to GradScaler
            before = getattr(optimizer, "found_inf", None)  # GradScaler's
            self._within[id(optimizer)] = before
            optimizer.found_inf = bad if before is None else torch.maximum(bad, before)  # type: ignore[attr-defined]
            self._note(bad)
        elif bool(bad):
            self._note(1)
            for p in parameters:
                p.grad = None
        else:
            self._note(0)

    def _note(self, bad: Tensor | int) -> None:
        """Note one optimizer's verdict, 0 or 1; a step is skipped if any verdict is 1."""
        if isinstance(bad, Tensor) and isinstance(self._bad, Tensor):
            bad = bad.to(self._bad.device)
        self._bad = bad if self._bad is None else self._bad + bad - self._bad * bad
