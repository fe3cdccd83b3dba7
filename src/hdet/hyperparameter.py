"""One explored scalar: where it lives, how far the replicas spread, and what its center and values are.

base    what the user's schedule says now, the same on every replica
center  base * scale; the controller owns the scale
value   center * multiplier; what this replica trains with
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from hdet.assignment import Ladder, check_spread
from hdet.hooks import unwrap

Number = TypeVar("Number", bound="float | Tensor")


@dataclass(frozen=True)
class Hyperparameter:
    """A scalar in the parameter groups of one or several optimizers.

    Attributes:
        name: unique within an ensemble; slots are drawn from it and records show it.
        key: the entry of the parameter groups that holds it.
        optimizers: whose groups hold it.
        group: the index of its one parameter group, or None for all of them, later ones included.
        spread: how far the multipliers reach; see `hdet.assignment.multipliers`.
        ladder: how the multipliers are spaced.
        floor: the center does not fall below it, unless the base does.
    """

    name: str
    key: str
    optimizers: tuple[Optimizer, ...]
    group: int | None
    spread: float
    ladder: Ladder = "linear"
    floor: float = 0.0

    @property
    def diverges(self) -> bool:
        """Whether the replicas get different values at all."""
        return self.spread > (0 if self.ladder == "linear" else 1)

    def groups(self, optimizer: Optimizer) -> list[dict[str, Any]]:
        """The parameter groups of `optimizer` that hold it, as they are now."""
        groups = optimizer.param_groups
        return groups if self.group is None else groups[self.group : self.group + 1]

    def bases(self) -> Iterator[float | Tensor]:
        """The base in each of its parameter groups, as it is now."""
        for optimizer in self.optimizers:
            for group in self.groups(optimizer):
                yield group[self.key]

    def center(self, base: Number, scale: float) -> Number:
        """`base * scale`, not below the floor: ``max(base * scale, min(base, floor))``."""
        if scale == 1.0:
            return base
        if scale > 1.0 or self.floor <= 0.0:
            return base * scale  # type: ignore[return-value]
        if isinstance(base, Tensor):
            return torch.maximum(base * scale, base.clamp(max=self.floor))  # type: ignore[return-value]
        return max(base * scale, min(base, self.floor))  # type: ignore[return-value]


def representative(used: Sequence[float | Tensor], coming: Sequence[float | Tensor]) -> tuple[float, float]:
    """The last and the next base of one group that stands for all: the first that is explored. Reads tensors back.

    A base of 0 cannot be explored: multiplied by anything it stays 0.
    """
    pairs = [(float(base), float(following)) for base, following in zip(used, coming, strict=False)]
    return next((pair for pair in pairs if pair[0] != 0.0), (0.0, 0.0))


@overload
def learning_rate(
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    spread: float = ...,
    ladder: Ladder = ...,
    per_group: Literal[False] = ...,
) -> Hyperparameter: ...
@overload
def learning_rate(
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    spread: float = ...,
    ladder: Ladder = ...,
    per_group: Literal[True],
) -> list[Hyperparameter]: ...
def learning_rate(
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    spread: float = 1 / 9,
    ladder: Ladder = "linear",
    per_group: bool = False,
) -> Hyperparameter | list[Hyperparameter]:
    """The learning rate of one optimizer, or of several together.

    Args:
        optimizer: one optimizer, or a sequence of them.
        spread: how far the replicas' rates lie apart. On the linear ladder in [0, 1): multipliers from
            1 - spread to 1 + spread. On the log ladder at least 1: from about 1/spread to spread.
        ladder: "linear" (the paper's) or "log".
        per_group: explore every parameter group on its own, with its own slots and scale, instead of all
            groups together. Returns a list then. Groups added later are not explored.

    >>> model = torch.nn.Linear(2, 1)
    >>> rate = learning_rate(torch.optim.SGD(model.parameters(), lr=0.1), spread=0.2)
    >>> rate.name, rate.spread
    ('learning_rate', 0.2)
    """
    check_spread(spread, ladder)
    several = isinstance(optimizer, Sequence)
    optimizers = tuple(unwrap(o) for o in (optimizer if isinstance(optimizer, Sequence) else (optimizer,)))
    if not per_group:
        return Hyperparameter("learning_rate", "lr", optimizers, None, float(spread), ladder)
    return [
        Hyperparameter(
            f"learning_rate/{f'{o}.' if several else ''}{group.get('name', g)}",
            "lr",
            (owner,),
            g,
            float(spread),
            ladder,
        )
        for o, owner in enumerate(optimizers)
        for g, group in enumerate(owner.param_groups)
    ]


def flatten(hyperparameters: Sequence[Hyperparameter | Sequence[Hyperparameter]]) -> list[Hyperparameter]:
    """Hyperparameters and lists of them, as one list."""
    flat: list[Hyperparameter] = []
    for h in [hyperparameters] if isinstance(hyperparameters, Hyperparameter) else hyperparameters:
        flat += h if isinstance(h, (list, tuple)) else [h]  # type: ignore[list-item]
    return flat
