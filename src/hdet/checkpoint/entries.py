"""The named entries of a checkpoint: modules, optimizers, anything with a `state_dict()`, tensors, plain values.

`take()` returns what to write of an entry, `check()` compares before anything changes, `put_objects()` and
`put_tensors()` restore it.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adagrad

from hdet._hooks import innermost, unwrap
from hdet._tensors.parameters import parameters_of
from hdet.checkpoint.optimizer_entries import state_problems
from hdet.ensemble import Ensemble

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)
_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
_MOST_SHOWN = 3


def flatten(argument: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Unwrap the entries, and split a list of stateful objects into "name.0", "name.1".

    Raises:
        TypeError: if the argument is not a mapping from names.
    """
    if not isinstance(entries, Mapping) or not all(isinstance(name, str) for name in entries):
        raise TypeError(
            f"{argument} must be a mapping from names to what is saved, got {type(entries).__name__}; write for "
            'example {"model": model, "optimizer": optimizer, "ensemble": ensemble}'
        )
    found: dict[str, Any] = {}
    for name, entry in entries.items():
        several = isinstance(entry, (list, tuple)) and bool(entry) and all(map(_is_stateful, entry))
        for key, one in {f"{name}.{k}": e for k, e in enumerate(entry)}.items() if several else [(name, entry)]:
            found[key] = _unwrapped(one)
    return found


def ensemble_of(entry: Any) -> Ensemble | None:
    """The ensemble that an entry is or contains, as `OneCycleAutoLR` does."""
    inner = entry if isinstance(entry, Ensemble) else getattr(entry, "ensemble", None)
    return inner if isinstance(inner, Ensemble) else None


def find_ensemble(entries: Mapping[str, Any]) -> Ensemble | None:
    """The ensemble among the entries."""
    return next(filter(None, map(ensemble_of, entries.values())), None)


def tensors_of(entries: Mapping[str, Any]) -> list[Tensor]:
    """Tensors on the model's device."""
    modules = [t for entry in entries.values() if isinstance(entry, nn.Module) for t in entry.parameters()]
    return [*modules, *parameters_of(*filter(_is_optimizer, entries.values()))]


def kind_of(entry: Any) -> str:
    """What sort of entry it is."""
    if isinstance(entry, nn.Module):
        return "module"
    if _is_optimizer(entry):
        return "optimizer"
    if _is_stateful(entry):
        return "object"
    return "tensor" if isinstance(entry, Tensor) else "value"


def take(name: str, entry: Any, names: Mapping[int, str]) -> dict[str, Any]:
    """The state to write for an entry.

    Args:
        name: name of the entry.
        entry: the entry.
        names: names of parameters, by id.

    Raises:
        ValueError: if it contains anything that could not be loaded again.
    """
    kind = kind_of(entry)
    taken: dict[str, Any] = {"kind": kind, "class": type(entry).__name__}
    taken["state"] = entry.state_dict() if kind in ("module", "optimizer", "object") else entry
    if kind == "optimizer":
        taken["layout"] = _layout(entry, names)
    _check_plain(taken["state"], name)
    return taken


def names_of(entries: Mapping[str, Any]) -> dict[int, str]:
    """The names of all parameters of the modules, by id."""
    modules = [entry for entry in entries.values() if isinstance(entry, nn.Module)]
    return {id(p): name for module in modules for name, p in module.named_parameters()}


def check(entries: Mapping[str, Any], saved: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare names, shapes, dtypes and classes without changing anything.

    Raises:
        ValueError: naming the first few mismatches.
    """
    problems = [f"there is no entry {name!r} in it, but {sorted(saved)}" for name in entries if name not in saved]
    names = names_of(entries)
    for name, entry in entries.items():
        if name in saved:
            problems += [f"entry {name!r}: {problem}" for problem in _problems(entry, saved[name], names)]
    if problems:
        rest = f"; and {len(problems) - _MOST_SHOWN} more" if len(problems) > _MOST_SHOWN else ""
        raise ValueError("; ".join(problems[:_MOST_SHOWN]) + rest)


def put_objects(entries: Mapping[str, Any], saved: Mapping[str, Any], undo: list[tuple[Any, Any]]) -> None:
    """Load the objects with their own `load_state_dict()`, which may raise.

    Args:
        entries: the objects to load into.
        saved: their saved states.
        undo: receives each object and its previous state, for `put_back()`.
    """
    for name, entry in entries.items():
        if kind_of(entry) == "object":
            undo.append((entry, copy.deepcopy(entry.state_dict())))
            entry.load_state_dict(saved[name]["state"])


def put_back(undo: Sequence[tuple[Any, Any]]) -> None:
    """Restore the objects' previous states."""
    for entry, state in reversed(undo):
        entry.load_state_dict(state)


def put_tensors(entries: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Copy into modules, optimizers and tensors that passed `check()`.

    Then load ensembles again, which write each replica's own explored values into the modules.
    """
    for name, entry in entries.items():
        kind, state = kind_of(entry), saved[name]["state"]
        if kind == "module":
            entry.load_state_dict(state)
        elif kind == "optimizer":
            _load_optimizer(entry, state)
        elif kind == "tensor":
            with torch.no_grad():
                entry.copy_(state)
    for name, entry in entries.items():
        if ensemble_of(entry) is not None:
            entry.load_state_dict(saved[name]["state"])


def _load_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    """Like `load_state_dict()`, but state keeps its precision if that differs from its parameter's."""
    optimizer.load_state_dict(state)
    if isinstance(optimizer, Adagrad):
        _add_initial_state(optimizer)
    parameters = parameters_of(optimizer)
    for number, written in state["state"].items():
        loaded = optimizer.state[parameters[number]]
        for key, value in written.items():
            if isinstance(value, Tensor) and value.dtype != loaded[key].dtype:
                loaded[key] = value.to(loaded[key].device, copy=True)


def _add_initial_state(optimizer: Adagrad) -> None:
    """Create the state of parameters that had no gradient: in older torch only the constructor of Adagrad does."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not optimizer.state.get(p):
                value, fused = group["initial_accumulator_value"], group["fused"]
                optimizer.state.update(Adagrad([p], initial_accumulator_value=value, fused=fused).state)


def _problems(entry: Any, saved: Mapping[str, Any], names: Mapping[int, str]) -> list[str]:
    kind, state = kind_of(entry), saved["state"]
    if kind != saved["kind"]:
        return [f"a {saved['kind']} was saved, this is a {kind}"]
    if kind == "module":
        return _module_problems(entry, state)
    if kind in ("optimizer", "object") and type(entry).__name__ != saved["class"]:
        return [f"a {saved['class']} was saved, this is a {type(entry).__name__}"]
    if kind == "optimizer":
        return _optimizer_problems(entry, saved, names)
    return _tensor_problems("it", entry, state) if kind == "tensor" else []


def _module_problems(module: nn.Module, state: Mapping[str, Any]) -> list[str]:
    ours = module.state_dict()
    found = [f"{name} is missing in the checkpoint" for name in ours if name not in state]
    found += [f"{name} is in the checkpoint only" for name in state if name not in ours]
    for name in ours.keys() & state.keys():
        found += _tensor_problems(name, ours[name], state[name])
    return found


def _optimizer_problems(optimizer: Any, saved: Mapping[str, Any], names: Mapping[int, str]) -> list[str]:
    ours, theirs = _layout(optimizer, names), saved["layout"]
    if [len(group) for group in ours] != [len(group) for group in theirs]:
        return [f"groups of {[len(g) for g in theirs]} parameters were saved, this has {[len(g) for g in ours]}"]
    found = []
    for a, b in zip(chain(*ours), chain(*theirs), strict=True):
        if a[1:] != b[1:] or (a[0] and b[0] and a[0] != b[0]):
            found.append(f"the parameter {b} was saved where this has {a}")
    numbers = {number for group in saved["state"]["param_groups"] for number in group["params"]}
    if not set(saved["state"]["state"]) <= numbers or len(numbers) != sum(map(len, ours)):
        found.append("its state does not belong to its parameters")
    return found or state_problems(optimizer, saved["state"], [row[0] for row in chain(*ours)])


def _tensor_problems(name: str, ours: Any, saved: Any) -> list[str]:
    if isinstance(ours, Tensor) != isinstance(saved, Tensor):
        return [f"{name} is a {type(saved).__name__} in the checkpoint, a {type(ours).__name__} here"]
    if not isinstance(ours, Tensor) or (ours.shape, ours.dtype) == (saved.shape, saved.dtype):
        return []
    here = f"{tuple(ours.shape)} {ours.dtype}"
    return [f"{name} is {tuple(saved.shape)} {saved.dtype} in the checkpoint, {here} here"]


def _layout(optimizer: Any, names: Mapping[int, str]) -> list[list[list[Any]]]:
    return [
        [[names.get(id(p), ""), list(p.shape), str(p.dtype)] for p in group["params"]]
        for group in optimizer.param_groups
    ]


def _check_plain(value: Any, where: str) -> None:
    """Raise unless it loads again with `weights_only=True`."""
    if type(value) in (dict, OrderedDict, Counter):
        for key, item in value.items():
            _check_plain(key, f"a key of {where}")
            _check_plain(item, f"{where}[{key!r}]")
    elif type(value) in (list, tuple):
        for number, item in enumerate(value):
            _check_plain(item, f"{where}[{number}]")
    elif type(value) not in (*_PLAIN, *_TENSORS):
        raise ValueError(
            f"{where} must be a tensor, a plain number or string, or lists and dicts of these, got "
            f"{type(value).__module__}.{type(value).__qualname__}, which would not load again; give its plain value, "
            "or an object with state_dict() and load_state_dict(). Sharded tensors go to torch.distributed.checkpoint"
        )


def _is_stateful(entry: Any) -> bool:
    return callable(getattr(entry, "state_dict", None)) and callable(getattr(entry, "load_state_dict", None))


def _is_optimizer(entry: Any) -> bool:
    return _is_stateful(entry) and hasattr(entry, "param_groups")


def _unwrapped(entry: Any) -> Any:
    if isinstance(entry, nn.Module):
        return innermost(entry)
    return unwrap(entry) if _is_optimizer(entry) else entry
