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
        self._written: dict[int, list[tuple[dict[str, Any], str, Base]]] = {id(o): [] for o in optimizers}
        self._used: dict[int, list[tuple[str, Base]]] = {id(o): [] for o in optimizers}
        self._depth = {id(o): 0 for o in optimizers}
        self._hooks = Hooks(self)
        for optimizer in optimizers:
            self._hooks.around_step(optimizer, self._before_step, self._after_step)
            self._hooks.before_optimizer_state_dict(optimizer, self._restore)
        plain = {h.name: 1.0 for h in hyperparameters}
        self.set(plain, plain)

    def set(self, scales: Mapping[str, float], multipliers: Mapping[str, float]) -> None:
        """What this replica trains with from the next step on: its factors, by hyperparameter."""
        self._plan = {
            id(o): [
                (h, scales[h.name], multipliers[h.name])
                for h in self._hyperparameters
                if o in h.optimizers and (h.diverges or scales[h.name] != 1.0)
            ]
            for o in self._optimizers
        }

    def used(self, name: str) -> list[Base]:
        """The bases of a hyperparameter that the last step was taken with, one per parameter group."""
        return [base for used in self._used.values() for of, base in used if of == name]

    def restore(self) -> None:
        """Put every base back, should a step that raised have left a value behind."""
        for optimizer in self._optimizers:
            self._restore(optimizer)

    def close(self) -> None:
        """Put every base back and remove the hooks."""
        self.restore()
        self._hooks.remove()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArgs | None:
        if not self.ready:
            self._prepare()
        owner = id(optimizer)
        self._depth[owner] += 1
        if self._depth[owner] == 1:  # a step within a step finds the values written
            self._apply(optimizer)
        if len(args) == 1 and not kwargs:
            return None
        return _with_closure(args, kwargs, lambda: self._restore(optimizer))

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.stepped = True
        self._depth[id(optimizer)] -= 1
        if self._depth[id(optimizer)] <= 0:
            self._restore(optimizer)

    def _apply(self, optimizer: Optimizer) -> None:
        written = self._written[id(optimizer)] = []
        used = self._used[id(optimizer)] = []
        groups = optimizer.param_groups
        for h, scale, multiplier in self._plan[id(optimizer)]:
            key, name = h.key, h.name
            for group in groups if h.group is None else (groups[h.group],):
                base = group[key]
                written.append((group, key, base))
                # A scheduler overwrites a tensor learning rate in place: keep what this step used.
                used.append((name, base.clone() if isinstance(base, Tensor) else base))
                group[key] = (base if scale == 1.0 else h.center(base, scale)) * multiplier

    def _restore(self, optimizer: Optimizer) -> None:
        owner = id(optimizer)
        self._depth[owner] = 0
        for group, key, base in self._written[owner]:
            group[key] = base
        self._written[owner] = []


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
