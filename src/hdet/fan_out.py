"""Fan-out: this replica's values in the parameter groups for the length of one `optimizer.step()`.

Between steps the groups hold the base, so schedulers, loggers and checkpoints never see a multiplier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        prepare: called before the values of a step are written; held weakly.

    Attributes:
        scales: the controller's factor on each hyperparameter, by name.
        multipliers: this replica's multiplier of each hyperparameter, by name.
        used: the bases that the last step was taken with, by name and optimizer, one per parameter group.
        stepped: a step was taken since this was last set to False.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        hyperparameters: Sequence[Hyperparameter],
        prepare: Callable[[], None],
    ) -> None:
        self.scales = {h.name: 1.0 for h in hyperparameters}
        self.multipliers = {h.name: 1.0 for h in hyperparameters}
        self.used: dict[str, dict[int, list[Base]]] = {h.name: {} for h in hyperparameters}
        self.stepped = False
        self._optimizers = tuple(optimizers)
        self._of = {id(o): [h for h in hyperparameters if o in h.optimizers] for o in optimizers}
        self._prepare = WeakHook(prepare)
        self._replaced: dict[int, list[tuple[dict[str, Any], str, Base]]] = {}
        self._depth = {id(o): 0 for o in optimizers}
        self._hooks = Hooks(self)
        for optimizer in optimizers:
            self._hooks.around_step(optimizer, self._before_step, self._after_step)
            self._hooks.before_optimizer_state_dict(optimizer, self._restore)

    def restore(self) -> None:
        """Put every base back, should a step that raised have left a value behind."""
        for optimizer in self._optimizers:
            self._restore(optimizer)

    def close(self) -> None:
        """Put every base back and remove the hooks."""
        self.restore()
        self._hooks.remove()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArgs | None:
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
        replaced = self._replaced[id(optimizer)] = []
        for h in self._of[id(optimizer)]:
            scale, multiplier = self.scales[h.name], self.multipliers[h.name]
            used: list[Base] = []
            for group in h.groups(optimizer):
                base = group[h.key]
                # A scheduler overwrites a tensor learning rate in place: keep what this step used.
                used.append(base.clone() if isinstance(base, Tensor) else base)
                if scale != 1.0 or multiplier != 1.0:
                    replaced.append((group, h.key, base))
                    group[h.key] = h.center(base, scale) * multiplier
            self.used[h.name][id(optimizer)] = used

    def _restore(self, optimizer: Optimizer) -> None:
        self._depth[id(optimizer)] = 0
        for group, key, base in self._replaced.pop(id(optimizer), ()):
            group[key] = base


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
