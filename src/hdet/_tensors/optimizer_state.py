"""Optimizer state: which of it can differ between replicas, and how to create it before the first step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from hdet._tensors.parameters import parameters_of
from hdet._tensors.shards import part

# Optimizers whose state is a function of the gradients alone. With shared gradients it stays equal on all
# replicas while only learning rates differ, so it need not be averaged.
_GRADIENT_ONLY_STATE = {
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Adagrad,
    optim.Adafactor,
    optim.Adamax,
    optim.Adadelta,
    optim.SparseAdam,
    optim.Muon,
}
_DECOUPLED_DECAY = {optim.AdamW, optim.Adafactor, optim.Muon}


def that_differs(optimizers: Iterable[Optimizer], explored: Iterable[str], local: bool = False) -> list[Tensor]:
    """The optimizer state that can differ between replicas when the group entries `explored` do.

    With `local` gradients all of it can. Step counters are never averaged, nor is state on another device than its
    parameter.
    """
    keys = set(explored)
    return [
        part(value)
        for optimizer in optimizers
        if local or can_differ(optimizer, keys)
        for p in parameters_of(optimizer)
        for key, value in sorted(optimizer.state.get(p, {}).items(), key=lambda item: str(item[0]))
        if key != "step" and isinstance(value, Tensor) and value.device == p.device
        if (value.is_floating_point() or value.is_complex()) and part(value).numel()
    ]


def all_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """All optimizer state on its parameter's device, including step counters."""
    return [
        part(value)
        for optimizer in optimizers
        for p in parameters_of(optimizer)
        for _, value in sorted(optimizer.state.get(p, {}).items(), key=lambda item: str(item[0]))
        if isinstance(value, Tensor) and value.device == p.device and part(value).numel()
    ]


@torch.no_grad()
def create(optimizer: Optimizer) -> None:
    """Create the state of the first step by a step with zero gradients and rates, which changes no parameter."""
    groups = optimizer.param_groups
    trained = [p for p in parameters_of(optimizer) if p.requires_grad]
    own, rates = [p.grad for p in trained], [group.get("lr") for group in groups]
    try:
        for group in groups:
            group["lr"] = torch.zeros_like(lr) if isinstance(lr := group.get("lr"), Tensor) else 0.0
        for p in trained:
            p.grad = torch.zeros_like(p).to_sparse() if isinstance(optimizer, optim.SparseAdam) else torch.zeros_like(p)
        step = type(optimizer).step
        getattr(step, "__wrapped__", step)(optimizer)  # without the hooks: it is no step of the run
    finally:
        for group, lr in zip(groups, rates, strict=True):
            group["lr"] = lr
        for p, grad in zip(trained, own, strict=True):
            p.grad = grad


def can_differ(optimizer: Optimizer, explored: set[str]) -> bool:
    """Whether replicas with shared gradients can come to hold different optimizer state."""
    safe = {"lr", "weight_decay"} if type(optimizer) in _DECOUPLED_DECAY else {"lr"}
    if type(optimizer) not in _GRADIENT_ONLY_STATE or not explored <= safe:
        return True
    if type(optimizer) in _DECOUPLED_DECAY:
        return False
    return any(
        group.get("weight_decay", 0) != 0 and not group.get("decoupled_weight_decay", False)
        for group in optimizer.param_groups
    )
