"""The mean of the replicas' states in mid-round, from which another number of replicas can resume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hdet._tensors.converge import has_numbers

_COUNTER = "step"  # of an optimizer: never averaged


def mean(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Average the floating-point tensors of modules and optimizers; take the rest from the first replica.

    Optimizers that skipped all their steps have no state yet and are left out of the mean. States are read one after
    another, so memory holds two of them in double precision.
    """
    total: dict[str, Any] = {}
    sums: dict[tuple[Any, ...], Tensor] = {}
    counts: Counter[tuple[Any, ...]] = Counter()
    for state in states:
        total = total or {name: dict(entry) for name, entry in state.items()}
        _add_missing(total, state)
        for place, tensor in _places(state):
            wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
            sums[place] = sums[place] + wide if place in sums else wide.clone()
            counts[place] += 1
    for place, tensor in list(_places(total)):
        holder = total
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = (sums[place] / counts[place]).to(tensor.dtype)
    return total


def _add_missing(total: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Add the optimizer state of parameters for which earlier replicas had none."""
    for name, entry in state.items():
        if entry["kind"] == "optimizer":
            for number, of_one in entry["state"]["state"].items():
                total[name]["state"]["state"].setdefault(number, dict(of_one))


def _places(state: Mapping[str, Any]) -> Iterable[tuple[tuple[Any, ...], Tensor]]:
    """Every tensor to average, with the keys that lead to it."""
    for name, entry in state.items():
        found: dict[tuple[Any, ...], Any]
        if entry["kind"] == "module":
            found = {(name, "state", key): value for key, value in entry["state"].items()}
        elif entry["kind"] == "optimizer":
            found = {
                (name, "state", "state", number, key): value
                for number, of_one in entry["state"]["state"].items()
                for key, value in of_one.items()
                if key != _COUNTER
            }
        elif entry["kind"] == "tensor":
            found = {(name, "state"): entry["state"]}
        else:
            continue
        for place, value in found.items():
            if isinstance(value, Tensor) and has_numbers(value):
                yield place, value
