"""The parameters of optimizers, and removal of duplicate tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

T = TypeVar("T", bound=Tensor)


def parameters_of(*optimizers: Optimizer) -> list[torch.nn.Parameter]:
    """All parameters of these optimizers, trained or not, group by group."""
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def once(tensors: Iterable[T]) -> list[T]:
    """Each of these objects once, in their order."""
    return list({id(t): t for t in tensors}.values())
