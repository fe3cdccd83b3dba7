"""Fan-out: this replica's values in the parameter groups for the length of one `optimizer.step()`.

Between steps the groups hold the base, so schedulers, loggers and checkpoints never see a multiplier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hdet.hooks import Hooks, WeakHook
from hdet.hyperparameter import Hyperparameter

Base = float | Tensor
StepArgs = tuple[tuple[Any, ...], dict[str, Any]]


class _Watched:
    """One optimizer: what is written into its groups, and what a step in progress has replaced there."""

    __slots__ = ("depth", "plan", "used", "written")

    def __init__(self) -> None:
        self.plan: list[tuple[Hyperparameter, float, float]] = []
        self.written: list[tuple[dict[str, Any], str, Base]] = []
        self.used: list[tuple[str, Base]] = []
        self.depth = 0

    def apply(self, groups: list[dict[str, Any]]) -> None:
        """Write the values; remember the bases."""
        written, used = self.written, self.used
        used.clear()
        for h, scale, multiplier in self.plan:
            key, name = h.key, h.name
            for group in groups if h.group is None else (groups[h.group],):
                base = group[key]
                written.append((group, key, base))
                # A scheduler overwrites a tensor learning rate in place: keep what this step used.
                used.append((name, base.clone() if isinstance(base, Tensor) else base))
                group[key] = (base if scale == 1.0 else h.center(base, scale)) * multiplier

    def restore(self) -> None:
        """Put the bases back; nothing happens if they are back already."""
        self.depth = 0
        for group, key, base in self.written:
            group[key] = base
        self.written.clear()


class FanOut:
    """Writes values before a step and restores the bases after it.

    Values are put in as new objects and the old objects are put back, so restoring is exact, and groups
    that share one tensor learning rate do not disturb each other.

    Args:
        optimizers: whose steps are watched.
        hyperparameters: what is written.
        prepare: called before the first step, and before every step while `ready` is False; held weakly.

    Attributes:
        stepped: a step was taken since this was last set to False.
        ready: steps may be taken without asking `prepare`.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        hyperparameters: Sequence[Hyperparameter],
        prepare: Callable[[], None],
    ) -> None:
        self.stepped = False
        self.ready = False
        self._optimizers = tuple(optimizers)
        self._hyperparameters = tuple(hyperparameters)
        self._prepare = WeakHook(prepare)
        self._watched = {id(o): _Watched() for o in optimizers}
        self._hooks = Hooks(self)
        for optimizer in optimizers:
            self._hooks.around_step(optimizer, self._before_step, self._after_step)
            self._hooks.before_optimizer_state_dict(optimizer, self._restore)
        plain = {h.name: 1.0 for h in hyperparameters}
        self.set(plain, plain)

    def set(self, scales: Mapping[str, float], multipliers: Mapping[str, float]) -> None:
        """What this replica trains with from the next step on: its factors, by hyperparameter."""
        for optimizer in self._optimizers:
            self._watched[id(optimizer)].plan = [
                (h, scales[h.name], multipliers[h.name])
                for h in self._hyperparameters
                if optimizer in h.optimizers and (h.diverges or scales[h.name] != 1.0)
            ]

    def used(self, name: str) -> list[Base]:
        """The bases of a hyperparameter that the last step was taken with, one per parameter group."""
        return [base for watched in self._watched.values() for of, base in watched.used if of == name]

    def restore(self) -> None:
        """Put every base back, should a step that raised have left a value behind."""
        for watched in self._watched.values():
            watched.restore()

    def close(self) -> None:
        """Put every base back and remove the hooks."""
        self.restore()
        self._hooks.remove()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArgs | None:
        if not self.ready:
            self._prepare()
        watched = self._watched[id(optimizer)]
        watched.depth += 1
        if watched.depth == 1:  # a step within a step finds the values written
            watched.apply(optimizer.param_groups)
        if len(args) == 1 and not kwargs:
            return None
        return _with_closure(args, kwargs, watched.restore)

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.stepped = True
        watched = self._watched[id(optimizer)]
        watched.depth -= 1
        if watched.depth <= 0:
            watched.restore()

    def _restore(self, optimizer: Optimizer) -> None:
        self._watched[id(optimizer)].restore()


def _with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], on_error: Callable[[], None]) -> StepArgs | None:
    """The arguments of a step, with a closure that calls `on_error` before it raises."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        return None

    def guarded() -> Any:
        try:
            return closure()
        except BaseException:
            on_error()
            raise

    if len(args) > 1:
        return (args[0], guarded, *args[2:]), kwargs
    return args, {**kwargs, "closure": guarded}
