"""Hooks that do not keep their owner alive, attached and removed in one place.

An optimizer outlives the ensemble that watches it. Its hook tables therefore hold weak references only: no
reference cycle, nothing left behind when the ensemble is dropped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

StepArgs = tuple[tuple[Any, ...], dict[str, Any]]
Closure = Callable[[], Any]


class WeakHook:
    """Calls a method of its owner while the owner exists. Copies and pickles of it do nothing."""

    __slots__ = ("_function", "_owner")

    def __init__(self, method: Callable[..., Any] | None) -> None:
        # Not a WeakMethod, which takes twice as long to call.
        bound = cast("MethodType | None", method)
        self._owner = None if bound is None else weakref.ref(bound.__self__)
        self._function = None if bound is None else bound.__func__

    @property
    def owner(self) -> object | None:
        """The object whose method it calls; None if that is gone."""
        return None if self._owner is None else self._owner()

    def __call__(self, *args: Any) -> Any:
        owner = None if self._owner is None else self._owner()
        return None if owner is None or self._function is None else self._function(owner, *args)

    def __reduce__(self) -> tuple[type[WeakHook], tuple[None]]:
        return WeakHook, (None,)


class Hooks:
    """The hooks of one owner; `remove()` removes all of them, as does the end of the owner."""

    def __init__(self, owner: object) -> None:
        self._handles: list[RemovableHandle] = []
        self._finalizer = weakref.finalize(owner, _remove_all, self._handles)

    def around_step(self, optimizer: Optimizer, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        """Call `before` and `after` around each `optimizer.step()`."""
        self._handles.append(optimizer.register_step_pre_hook(WeakHook(before)))
        self._handles.append(optimizer.register_step_post_hook(WeakHook(after)))

    def after_optimizer_state_dict(self, optimizer: Optimizer, call: Callable[..., Any]) -> None:
        """Call `call` with the result of each `optimizer.state_dict()` before it is returned."""
        self._handles.append(optimizer.register_state_dict_post_hook(WeakHook(call)))

    def before_module_state_dict(self, module: nn.Module, call: Callable[..., Any]) -> None:
        """Call `call` before each `module.state_dict()`."""
        self._handles.append(module.register_state_dict_pre_hook(WeakHook(call)))  # type: ignore[no-untyped-call]

    def after_module_load(self, module: nn.Module, call: Callable[..., Any]) -> None:
        """Call `call` after each `module.load_state_dict()`."""
        self._handles.append(module.register_load_state_dict_post_hook(WeakHook(call)))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Take off every hook."""
        self._finalizer()


def unwrap(optimizer: Any) -> Optimizer:
    """The torch optimizer whose `step` hooks fire: `optimizer`, or the one inside a wrapper that has none.

    Raises:
        TypeError: if there is no such optimizer.
    """
    inner = optimizer
    while not isinstance(getattr(inner, "__dict__", {}).get("_optimizer_step_pre_hooks"), dict):
        if not hasattr(inner, "optimizer"):
            raise TypeError(
                f"optimizer must be a torch.optim.Optimizer with step hooks, got {type(optimizer).__name__}; "
                "pass the torch optimizer that it wraps"
            )
        inner = inner.optimizer
    return cast(Optimizer, inner)


def innermost(model: nn.Module) -> nn.Module:
    """The module inside DDP, its twin in one process and torch.compile; its hooks fire whichever wrapper is called."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, nn.parallel.DistributedDataParallel) or getattr(model, "shares_gradients", False):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _remove_all(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], wrap: Callable[[Closure], Closure]) -> StepArgs | None:
    """The arguments of `optimizer.step()` with its closure wrapped; None if it has none."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        return None
    if len(args) > 1:
        return (args[0], wrap(closure), *args[2:]), kwargs
    return args, {**kwargs, "closure": wrap(closure)}
