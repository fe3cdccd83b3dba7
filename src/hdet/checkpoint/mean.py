"""The mean of what the replicas saved in mid-round, for another number of replicas to go on from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

_COUNTER = "step"  # of an optimizer: never averaged


def mean(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of what replicas differ in: floating-point tensors, those of modules and those of optimizers.

    The rest is the first replica's. Read one after another: memory for two of them in double precision.
    """
    total: dict[str, Any] = {}
    sums: dict[tuple[Any, ...], Tensor] = {}
    count = 0
    for state in states:
        count += 1
        total = total or {name: dict(entry) for name, entry in state.items()}
        for place, tensor in _places(state):
            wide = tensor.to(torch.promote_types(tensor.dtype, torch.float64))
            if count == 1:
                sums[place] = wide.clone()
            else:
                sums[place] += wide
    for place, tensor in list(_places(total)):
        holder = total
        for key in place[:-1]:
            holder = holder[key]
        holder[place[-1]] = (sums[place] / count).to(tensor.dtype)
    return total


def _places(state: Mapping[str, Any]) -> Iterable[tuple[tuple[Any, ...], Tensor]]:
    """Every tensor that is averaged, and the keys that lead to it."""
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
            if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
                yield place, value
