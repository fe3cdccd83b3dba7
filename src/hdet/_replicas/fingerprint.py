"""A replica's arguments as plain JSON values, which `agreement.py` compares with the others'."""

from __future__ import annotations

import functools
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet._explore.hyperparameter import Hyperparameter
from hdet._hooks import innermost

Claims = dict[str, dict[str, Any]]
"""By section and item: strings, numbers and lists of them."""

SECTIONS = {
    "versions": "install the same versions everywhere",
    "arguments": "give every replica the same arguments",
    "hyperparameters": "give every replica the same hyperparameters",
    "parameters": "build the same model and optimizer on every replica",
    "optimizers": "build the same optimizer, with the same options and schedule, on every replica",
}
"""The compared sections, in this order, and what to do about a difference."""


def fingerprint(
    options: Mapping[str, object],
    optimizers: Sequence[Optimizer] = (),
    model: nn.Module | None = None,
    hyperparameters: Sequence[Hyperparameter] = (),
    followers: Iterable[Tensor] = (),
    compare_tensors: bool = True,
) -> Claims:
    """Everything that must be the same on all replicas.

    Args:
        options: the arguments of the call, by name.
        optimizers: their classes, group options and, in order, their parameters.
        model: for the names of parameters, and for buffers.
        hyperparameters: the explored hyperparameters.
        followers: tensors that are averaged with the weights.
        compare_tensors: False where ranks may hold different parts of one model.
    """
    parameters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    tensors = {**_tensors(parameters, model), **_followers(model, followers)} if compare_tensors else {}
    return {
        "versions": {
            "hdet": _version(),
            "torch": torch.__version__,
            "Python": ".".join(platform.python_version_tuple()[:2]),
        },
        "arguments": {name: plain(value) for name, value in options.items()},
        "hyperparameters": {h.name: _explored(h) for h in hyperparameters},
        "parameters": tensors,
        "optimizers": _groups(optimizers),
    }


def plain(value: object) -> Any:
    """A value in JSON's terms, the same on every replica that was given the same."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(f"{value:.12g}")
    if isinstance(value, Tensor):
        return plain(value.item()) if value.numel() == 1 and not value.is_meta else _layout(value)
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    text = repr(value)
    named = re.search(r" at 0x[0-9a-f]+", text) is None  # an address says nothing to another process
    return text if named else type(value).__qualname__


def _explored(h: Hyperparameter) -> str:
    told = (h.spread, h.ladder, h.coordinate, *h.bounds, h.floor, h.unit, h.place)
    return f"{type(h).__name__}({', '.join(str(plain(entry)) for entry in told)})"


def _tensors(parameters: Sequence[Tensor], model: nn.Module | None) -> dict[str, Any]:
    names = {} if model is None else {id(p): name for name, p in innermost(model).named_parameters()}
    shown = {
        f"parameter {number}": f"{names.get(id(p), 'unnamed')} {_layout(p)}{'' if p.requires_grad else ' frozen'}"
        for number, p in enumerate(parameters)
    }
    return {"the number of parameters": len(parameters), **shown}


def _followers(model: nn.Module | None, followers: Iterable[Tensor]) -> dict[str, Any]:
    buffers = [] if model is None else list(innermost(model).named_buffers())
    shown = {f"buffer {name}": _layout(buffer) for name, buffer in buffers}
    return {**shown, **{f"tensor {number} of followers": _layout(t) for number, t in enumerate(followers)}}


def _groups(optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, optimizer in enumerate(optimizers):
        name = "the optimizer" if len(optimizers) == 1 else f"optimizer {number}"
        found[f"{name}'s class"] = type(optimizer).__name__
        found[f"{name}'s parameter groups"] = [len(group["params"]) for group in optimizer.param_groups]
        for index, group in enumerate(optimizer.param_groups):
            entries = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            found |= {f"{key} of {name}'s group {index}": plain(value) for key, value in sorted(entries.items())}
    return found


@functools.cache
def _version() -> str:
    try:
        return metadata.version("hdet")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"


def _layout(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device.type}"
