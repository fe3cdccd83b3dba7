"""Checks an optimizer's saved state against its parameters: torch loads any state and fails steps later."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, optim

from hdet._tensors.parameters import parameters_of

# State that torch's own optimizers keep for every parameter they have stepped, in its shape.
_NEEDED: dict[type[Any], tuple[str, ...]] = {
    optim.Adam: ("exp_avg", "exp_avg_sq"),
    optim.AdamW: ("exp_avg", "exp_avg_sq"),
    optim.NAdam: ("exp_avg", "exp_avg_sq"),
    optim.RAdam: ("exp_avg", "exp_avg_sq"),
    optim.SparseAdam: ("exp_avg", "exp_avg_sq"),
    optim.Adamax: ("exp_avg", "exp_inf"),
    optim.Adadelta: ("square_avg", "acc_delta"),
    optim.Adagrad: ("sum",),
    optim.RMSprop: ("square_avg",),
    optim.Rprop: ("prev", "step_size"),
    optim.ASGD: ("ax",),
    optim.SGD: (),
    optim.Muon: (),
}
# State that only some options create: these from the first step, momentum in some optimizers later.
_OPTIONS = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg"}
_MOMENTUM = "momentum_buffer"
# Scalars in the state; all but SGD and Muon count their steps.
_NUMBERS: dict[type[Any], tuple[str, ...]] = {
    optim.SGD: (),
    optim.Muon: (),
    optim.NAdam: ("step", "mu_product"),
    optim.ASGD: ("step", "eta", "mu"),
}


def state_problems(optimizer: Any, state: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """List the reasons why a saved state cannot be this optimizer's. The groups are known to fit.

    Torch's own optimizers are recognised by class. Others may have state of any shape: state that has its parameter's
    shape in this optimizer must have it in the checkpoint too.

    Args:
        optimizer: the optimizer to load into.
        state: its saved `state_dict()`.
        names: names of its parameters, in order; empty for those without one.
    """
    parameters = parameters_of(optimizer)
    numbers = [(number, group) for group in state["param_groups"] for number in group["params"]]
    found = []
    for (number, group), p, name in zip(numbers, parameters, names, strict=True):
        kept = state["state"].get(number)
        if not kept:  # not stepped yet
            continue
        who = f"the parameter {name!r}" if name else f"parameter {number}"
        if not isinstance(kept, Mapping):
            found.append(f"the state of {who} is a {type(kept).__name__} in the checkpoint")
            continue
        missing = [key for key in _needed(optimizer, kept, group) if kept.get(key) is None]
        found += [f"{who} has no {key} in the checkpoint, which {type(optimizer).__name__} needs" for key in missing]
        found += [
            f"{key} of {who} is {_described(kept[key])} in the checkpoint, and must be {shape or 'one number'}"
            for key, shape in _shapes(optimizer, p)
            if kept.get(key) is not None and not _has_shape(kept[key], shape, p)
        ]
    return found


def _needed(optimizer: Any, kept: Mapping[str, Any], group: Mapping[str, Any]) -> Iterable[str]:
    kind = type(optimizer)
    if kind is optim.Adafactor:
        return ("step", "variance") if "variance" in kept else ("step", "row_var", "col_var")
    if kind not in _NEEDED:
        return ()
    chosen = [key for option, key in _OPTIONS.items() if group.get(option)]
    if kind is optim.RMSprop and group.get("momentum"):
        chosen.append(_MOMENTUM)
    return (*_NUMBERS.get(kind, ("step",)), *_NEEDED[kind], *chosen)


def _shapes(optimizer: Any, p: Tensor) -> list[tuple[str, tuple[int, ...] | None]]:
    """The shapes that are known, by key; None for a single number."""
    kind, whole = type(optimizer), tuple(p.shape)
    known: dict[str, tuple[int, ...] | None]
    if kind in _NEEDED:
        known = dict.fromkeys((*_NEEDED[kind], *_OPTIONS.values(), _MOMENTUM), whole)
        known |= dict.fromkeys(_NUMBERS.get(kind, ("step",)))
    elif kind is optim.Adafactor and p.dim() > 1:
        known = {"step": None, "row_var": (*whole[:-1], 1), "col_var": (*whole[:-2], 1, whole[-1])}
    elif kind is optim.Adafactor:
        known = {"step": None, "variance": whole}
    else:
        ours = optimizer.state.get(p, {})
        known = {key: whole for key, value in ours.items() if isinstance(value, Tensor) and tuple(value.shape) == whole}
    return list(known.items())


def _has_shape(value: Any, shape: tuple[int, ...] | None, p: Tensor) -> bool:
    if isinstance(value, Tensor) and (value.layout is not torch.strided or value.is_meta):
        return False
    if not shape:
        return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, (int, float))
    if not isinstance(value, Tensor) or tuple(value.shape) != shape:
        return False
    return value.is_floating_point() or (value.is_complex() and p.is_complex())


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    shape = f"{tuple(value.shape)}"
    if value.layout is not torch.strided or value.is_meta:
        return f"{shape} without plain values ({value.layout}, {value.device})"
    return shape if value.is_floating_point() else f"{shape} of {value.dtype}"
