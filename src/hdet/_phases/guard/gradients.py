"""The gradient guard: a step whose gradient is not finite changes nothing, on any replica.

With shared gradients one replica's NaN reaches all of them within the step. Each sees the same reduced gradient, so
each can decide alone: nothing is sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet._hooks import Closure, Hooks, StepArgs, with_closure
from hdet._tensors.converge import has_numbers, widened

_MOST_IN_A_ROW = 3
_LOOK_EVERY = 16  # checks, where the streak is on a device


class GradientGuard:
    """Watches the gradients of optimizers, right before each step.

    Fused optimizers are told on the device, through `found_inf`, as GradScaler does: nothing is read back. The others
    find no gradients, which takes one read from the device at each step.

    Args:
        optimizers: whose steps are guarded. Momentum goes on in none of them: a skipped step is no step.

    Attributes:
        skipped: steps that were skipped since `reset()`, a number or a tensor on the device.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.skipped: Tensor | int = 0
        self._streak: Tensor | int = 0
        self._checks = 0
        self._bad: Tensor | int | None = None  # whether the step under way, of one optimizer or several, is skipped
        self._within: dict[int, Tensor | None] = {}  # the optimizers that are stepping, and their own `found_inf`
        self._optimizers = tuple(optimizers)
        self._hooks = Hooks(self)
        for optimizer in optimizers:
            self._hooks.around_step(optimizer, self._before_step, self._after_step)

    def reset(self) -> None:
        """Count from 0 again."""
        self.skipped = self._streak = 0
        self._bad = None

    def count(self) -> None:
        """After a step: count it once, however many optimizers took part, and forget steps that have raised."""
        for optimizer in [o for o in self._optimizers if id(o) in self._within]:
            self._leave(optimizer)
        if self._bad is not None:
            self._checks += 1
            self.skipped = self.skipped + self._bad
            self._streak = (self._streak + self._bad) * self._bad
            self._bad = None

    @property
    def stuck(self) -> bool:
        """Whether the last few steps were all skipped: waiting longer will not help. Read from a device now and then.

        With shared gradients the same on every replica, at the same step.
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
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
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
        """One optimizer's verdict, 0 or 1; a step is skipped if any of them says so."""
        if isinstance(bad, Tensor) and isinstance(self._bad, Tensor):
            bad = bad.to(self._bad.device)
        self._bad = bad if self._bad is None else self._bad + bad - self._bad * bad


def not_finite(gradients: Sequence[Tensor]) -> Tensor | None:
    """1.0 if any of these is not finite, else 0.0, on their device; None if there are none. No host read."""
    devices: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for value in map(_real, gradients):
        if has_numbers(value):
            devices.setdefault((value.device, value.dtype), []).append(value)
    found: Tensor | None = None
    for (device, dtype), members in devices.items():
        bad = torch.zeros((), device=device)
        if dtype == torch.float64 or dtype.itemsize == 1 or any(not m.is_contiguous() for m in members):
            bad = 1.0 - _all_finite(members).all().float()
        else:  # GradScaler's kernel, one launch for many tensors; it multiplies by 1, which changes nothing
            torch._amp_foreach_non_finite_check_and_unscale_(members, bad, torch.ones((), device=device))
        found = bad if found is None else torch.maximum(found, bad.to(found.device))
    return found


def looked_at(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Those that can be not finite, in the order of `flags()`: by dtype and device."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for t in tensors:
        if has_numbers(t):
            kinds.setdefault((t.device, t.dtype), []).append(t)
    return [t for members in kinds.values() for t in members]


@torch.no_grad()
def flags(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Whether each of `looked_at(tensors)` is finite: a vector on `device`. No host read."""
    found = []
    for _, members in itertools.groupby(looked_at(tensors), lambda t: (t.device, t.dtype)):
        found.append(_all_finite([_real(t) for t in members]).to(device))
    return torch.cat(found) if found else torch.ones(0, dtype=torch.bool, device=device)


def finite(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """1.0 if all of these are finite, else 0.0: a scalar on `device`. No host read."""
    return flags(tensors, device).all().double()


def _all_finite(members: Sequence[Tensor]) -> Tensor:
    """Whether each is finite, by its smallest and largest element: a sum could overflow."""
    return torch.stack([end for m in map(widened, members) for end in m.aminmax()]).isfinite().view(-1, 2).all(1)


def _real(tensor: Tensor) -> Tensor:
    """Its elements as real numbers, without a copy where that is possible."""
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
