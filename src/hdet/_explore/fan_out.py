"""Fan-out: this replica's values in the parameter groups for the length of one `optimizer.step()`.

Between steps the groups hold the base, so schedulers, loggers and checkpoints never see a multiplier.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hdet._explore.in_groups import InGroups
from hdet._hooks import Closure, Hooks, StepArgs, WeakHook, with_closure

Base = float | Tensor
_PATIENCE = 36


class _Watched:
    """One optimizer: the values to write into its groups, and those that the current step has replaced."""

    __slots__ = ("depth", "plan", "steps", "used", "written")

    def __init__(self) -> None:
        self.plan: list[tuple[InGroups, float, float, bool]] = []
        self.written: list[tuple[dict[str, Any], str, Any, Any]] = []
        self.used: list[tuple[str, Base]] = []
        self.depth = 0
        self.steps = 0

    def apply(self, groups: list[dict[str, Any]]) -> None:
        """Write the values; remember the bases."""
        written, used = self.written, self.used
        used.clear()
        for h, scale, multiplier, multiplies in self.plan:
            key, name, plain = h.key, h.name, h.index is None
            for group in groups if h.group is None else (groups[h.group],):
                entry = group[key]
                base = entry if plain else h.read(group)
                if multiplies:  # the usual case, and cheap on purpose
                    value = (base if scale == 1.0 else base * scale) * multiplier
                else:
                    value = h.value_of(base, scale, multiplier)
                group[key] = new = value if plain else h.replaced(entry, value)
                written.append((group, key, entry, new))
                # A scheduler overwrites a tensor learning rate in place: keep what this step used.
                used.append((name, base.clone() if isinstance(base, Tensor) else base))

    def restore(self) -> None:
        """Put the bases back, except where another value was written meanwhile."""
        self.depth = 0
        for group, key, entry, new in reversed(self.written):  # two may share an entry: Adam's betas
            if group[key] is new:
                group[key] = entry
        self.written.clear()


class FanOut:
    """Writes values before a step and restores the bases after it.

    Values are put in as new objects and the old objects are put back, so restoring is exact, and groups
    that share one tensor learning rate do not disturb each other.

    Args:
        optimizers: the optimizers to watch.
        hyperparameters: the hyperparameters to write.

    Attributes:
        ready: steps may be taken without asking; see `ask()`.
        patience: optimizer steps that may pass without a call of `count()`.
    """

    def __init__(self, optimizers: Sequence[Optimizer], hyperparameters: Sequence[InGroups]) -> None:
        self.ready = False
        self._prepare: Callable[[], None] = WeakHook(None)
        self.patience: float = _PATIENCE
        self._asks_at: float = self.patience
        self._away = False
        _check_alone(optimizers, hyperparameters)
        self._optimizers = tuple(optimizers)
        self._hyperparameters = tuple(hyperparameters)
        self._watched = {id(o): _Watched() for o in optimizers}
        self._counts = tuple(self._watched.values())
        self._hooks = Hooks(self)
        for optimizer in optimizers:
            self._hooks.around_step(optimizer, self._before_step, self._after_step)
            self._hooks.after_optimizer_state_dict(optimizer, self._put_bases)
        plain = {h.name: 1.0 for h in hyperparameters}
        self.set(plain, plain)

    def ask(self, prepare: Callable[[], None]) -> None:
        """Call `prepare` before every step until `go_on()`; later, before a step that follows `patience` uncounted
        ones, and again after twice as many.
        """
        self._prepare = prepare

    def go_on(self) -> None:
        """Steps may be taken without asking."""
        self.ready = True

    def ask_again(self) -> None:
        """Ask before the next step."""
        self.ready = False

    def set(self, scales: Mapping[str, float], multipliers: Mapping[str, float]) -> None:
        """Set this replica's factors, by hyperparameter, from the next step on."""
        for optimizer in self._optimizers:
            self._watched[id(optimizer)].plan = [
                (h, scales[h.name], multipliers[h.name], h.multiplies)
                for h in self._hyperparameters
                if optimizer in h.optimizers and (h.diverges or scales[h.name] != 1.0 or h.is_bounded)
            ]

    def used(self, name: str) -> list[Base]:
        """The bases of a hyperparameter in the last step, one per parameter group."""
        return [base for watched in self._watched.values() for of, base in watched.used if of == name]

    @property
    def steps(self) -> int:
        """Optimizer steps taken since `count()`: with several optimizers, those of the one that took most."""
        counts = self._counts
        return counts[0].steps if len(counts) == 1 else max([watched.steps for watched in counts])

    @property
    def steps_of_all(self) -> int:
        """The steps of the optimizer that took fewest: a critic may take a hundred per step of the generator."""
        return min(watched.steps for watched in self._watched.values())

    @property
    def applied(self) -> bool:
        """Whether groups hold values now: a step is under way or has raised."""
        return any(watched.written for watched in self._watched.values())

    def count(self) -> int:
        """The steps taken since the last call."""
        steps = self.steps
        for watched in self._counts:
            watched.steps = 0
        self._asks_at = self.patience
        return steps

    def explores(self, optimizer: Optimizer, place: str) -> bool:
        """Whether replicas differ in this place of the optimizer's groups."""
        return any(h.place == place and h.diverges and optimizer in h.optimizers for h in self._hyperparameters)

    @property
    def is_away(self) -> bool:
        """Whether steps currently do not belong to the run."""
        return self._away

    @contextmanager
    def away(self) -> Iterator[None]:
        """Steps within this context do not belong to the run: torch takes one of length 0 to create state."""
        before, self._away = self._away, True
        try:
            yield
        finally:
            self._away = before

    def restore(self) -> None:
        """Put every base back, should a step that raised have left a value behind."""
        for watched in self._watched.values():
            watched.restore()

    def close(self) -> None:
        """Put every base back and remove the hooks."""
        self.restore()
        self._hooks.remove()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArgs | None:
        if self._away:
            return None
        watched = self._watched[id(optimizer)]
        if not self.ready or watched.steps >= self._asks_at:
            self._asks_at = max(self.patience, 2 * watched.steps)
            self._prepare()
        if watched.depth and not _steps_nest(optimizer):
            watched.restore()  # the last step raised
        watched.depth += 1
        if watched.depth == 1:  # a step within a step finds the values written
            watched.apply(optimizer.param_groups)
        if len(args) == 1 and not kwargs:
            return None
        return with_closure(args, kwargs, lambda closure: _undone(closure, watched.restore))

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._away:
            return
        watched = self._watched[id(optimizer)]
        watched.depth -= 1
        if watched.depth <= 0:
            watched.steps += 1
            watched.restore()

    def _put_bases(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Bases instead of values in a state that is saved in the middle of a step, or after one that raised."""
        for group, key, entry, new in reversed(self._watched[id(optimizer)].written):
            for live, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
                if live is group and saved[key] is new:
                    saved[key] = entry


def _steps_nest(optimizer: Optimizer) -> bool:
    """Whether `step()` of this optimizer is being called from within another of its own, by a subclass.

    Searches the stack, and only in doubt: torch has no hook for steps that raise.
    """
    frame = sys._getframe(1)
    calls = 0
    while frame is not None:
        if frame.f_code.co_filename.endswith("optimizer.py") and frame.f_locals.get("self") is optimizer:
            calls += frame.f_code.co_name == "wrapper"
        frame = frame.f_back  # type: ignore[assignment]
    return calls > 1


def _check_alone(optimizers: Sequence[Optimizer], hyperparameters: Sequence[InGroups]) -> None:
    """Raise if another ensemble explores the same thing: their multipliers would compound."""
    for optimizer in optimizers:
        others = [hook.owner for hook in optimizer._optimizer_step_pre_hooks.values() if isinstance(hook, WeakHook)]
        for h in hyperparameters:
            taken = any(isinstance(other, FanOut) and other.explores(optimizer, h.place) for other in others)
            if taken and h.diverges and optimizer in h.optimizers:
                raise ValueError(
                    f"another ensemble explores {h.place!r} of this {type(optimizer).__name__} already, and their "
                    "multipliers would compound; call close() on the other one first"
                )


def _undone(closure: Closure, on_error: Callable[[], None]) -> Closure:
    """A closure that calls `on_error` before it raises."""

    def guarded() -> Any:
        try:
            return closure()
        except BaseException:
            on_error()
            raise

    return guarded
