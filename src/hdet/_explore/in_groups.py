"""Hyperparameters in the parameter groups of optimizers: learning rate, weight decay, momentum.

They act after the gradients are shared, so replicas with shared gradients can be told apart by them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

from torch import Tensor
from torch.optim import Optimizer

from hdet._explore.hyperparameter import Hyperparameter, check_scalar
from hdet._explore.slots import Ladder
from hdet._hooks import unwrap

Group = dict[str, Any]


@dataclass(frozen=True)
class InGroups(Hyperparameter):
    """A scalar in the parameter groups of one or several optimizers.

    Attributes:
        key: the entry of the parameter groups that holds it.
        optimizers: the optimizers with these groups.
        group: the index of its one parameter group, or None for all of them, including later ones.
        index: its place within the entry, if that is a tuple (Adam's betas).
    """

    key: str = "lr"
    optimizers: tuple[Optimizer, ...] = ()
    group: int | None = None
    index: int | None = None

    @property
    def place(self) -> str:
        """The place of the scalar in words, the same on every replica."""
        return self.key if self.index is None else f"{self.key}[{self.index}]"

    def groups(self, optimizer: Optimizer) -> list[Group]:
        """The parameter groups of `optimizer` that hold it, as they are now."""
        groups = optimizer.param_groups
        return groups if self.group is None else groups[self.group : self.group + 1]

    def bases(self) -> Iterator[float | Tensor]:
        """The base in each of its parameter groups, as it is now."""
        for optimizer in self.optimizers:
            for group in self.groups(optimizer):
                yield self.read(group)

    def places(self, optimizers: Sequence[Optimizer]) -> tuple[str, ...]:
        """Optimizer, group and entry: "0/1/lr", "0/0/betas/0"."""
        entry = self.key if self.index is None else f"{self.key}/{self.index}"
        return tuple(
            f"{next(o for o, other in enumerate(optimizers) if other is optimizer)}/{number}/{entry}"
            for optimizer in self.optimizers
            for number, _ in enumerate(self.groups(optimizer), start=self.group or 0)
        )

    def read(self, group: Group) -> float | Tensor:
        """Its value in one parameter group."""
        entry: Any = group[self.key]
        value: float | Tensor = entry if self.index is None else entry[self.index]
        return value

    def replaced(self, entry: Any, value: float | Tensor) -> Any:
        """The group's entry with `value` in its place."""
        return value if self.index is None else (*entry[: self.index], value, *entry[self.index + 1 :])

    def peak(self) -> float | None:
        """The schedule's highest value, which OneCycleLR stores in the group."""
        if self.key != "lr":
            return None
        peaks = [group.get("max_lr") for optimizer in self.optimizers for group in self.groups(optimizer)]
        return next((float(peak) for peak in peaks if peak is not None), None)


def is_rate(h: Hyperparameter) -> bool:
    """Whether it is a learning rate."""
    return isinstance(h, InGroups) and h.key == "lr"


@overload
def learning_rate(
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    spread: float = ...,
    ladder: Ladder = ...,
    per_group: Literal[False] = ...,
    bounds: tuple[float, float] = ...,
) -> InGroups: ...
@overload
def learning_rate(
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    spread: float = ...,
    ladder: Ladder = ...,
    per_group: Literal[True],
    bounds: tuple[float, float] = ...,
) -> list[InGroups]: ...
def learning_rate(
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    spread: float = 1 / 9,
    ladder: Ladder = "linear",
    per_group: bool = False,
    bounds: tuple[float, float] = (0.0, float("inf")),
) -> InGroups | list[InGroups]:
    """The learning rate of one optimizer, or of several together.

    Args:
        optimizer: one optimizer, or a sequence of them.
        spread: how far the replicas' rates lie apart. On the linear ladder in [0, 1): multipliers from
            1 - spread to 1 + spread. On the log ladder at least 1: from about 1/spread to spread.
        ladder: "linear" (the paper's) or "log".
        per_group: explore every parameter group on its own, with its own slots and scale, instead of all
            groups together. Returns a list then. Groups added later are not explored.
        bounds: limits of every replica's rate.

    >>> import torch
    >>> model = torch.nn.Linear(2, 1)
    >>> rate = learning_rate(torch.optim.SGD(model.parameters(), lr=0.1), spread=0.2)
    >>> rate.name, rate.spread
    ('learning_rate', 0.2)
    """
    about = InGroups("learning_rate", float(spread), ladder, bounds=bounds, key="lr")
    return _placed(about, optimizer, per_group)


def weight_decay(
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    spread: float = 0.3,
    ladder: Ladder = "linear",
    per_group: bool = False,
    bounds: tuple[float, float] = (0.0, float("inf")),
) -> InGroups | list[InGroups]:
    """The weight decay, of all groups as one joint scale, or `per_group`. Groups without decay, now or by their
    schedule, stay without, whatever the bounds.

    A regulariser: judge it with a held-out `Probe`. On training loss it runs to zero. Arguments as in
    `learning_rate`.
    """
    about = InGroups(
        "weight_decay", float(spread), ladder, bounds=bounds, key="weight_decay", off_at_zero=True, regulariser=True
    )
    return _placed(about, optimizer, per_group)


def momentum(
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    beta: Literal[1, 2] = 1,
    spread: float = 0.3,
    ladder: Ladder = "linear",
    per_group: bool = False,
    bounds: tuple[float, float] = (0.0, 1.0),
) -> InGroups | list[InGroups]:
    """The momentum of SGD and the like, or Adam's beta1 (`beta=2`: beta2). Multipliers act on the odds m / (1 - m), or
    (m - low) / (high - m) with other bounds.

    Other arguments as in `learning_rate`.
    """
    first = unwrap(optimizer[0] if isinstance(optimizer, Sequence) else optimizer)
    if beta not in (1, 2):
        raise ValueError(f"beta must be 1 or 2, got {beta!r}")
    if not (isinstance(bounds, tuple) and len(bounds) == 2 and 0 <= bounds[0] < bounds[1] <= 1):
        raise ValueError(f"bounds of a momentum must lie within (0, 1), got {bounds}; write for example (0.5, 0.99)")
    options: dict[str, Any] = {"coordinate": "logit", "bounds": bounds, "off_at_zero": True}
    if "betas" in first.defaults:
        about = InGroups(f"beta{beta}", float(spread), ladder, key="betas", index=beta - 1, **options)
    elif "momentum" in first.defaults and beta == 1:
        about = InGroups("momentum", float(spread), ladder, key="momentum", **options)
    else:
        raise ValueError(f"{type(first).__name__} has no {'momentum' if beta == 1 else 'beta2'} to explore")
    return _placed(about, optimizer, per_group)


def _placed(about: InGroups, optimizer: Any, per_group: bool) -> InGroups | list[InGroups]:
    """`about` in the groups of `optimizer`: one, or one for each group."""
    several = isinstance(optimizer, Sequence)
    optimizers = tuple(unwrap(o) for o in (optimizer if isinstance(optimizer, Sequence) else (optimizer,)))
    made = [replace(about, optimizers=optimizers)]
    if per_group:
        made = [
            replace(
                about,
                name=f"{about.name}/{f'{o}.' if several else ''}{group.get('name', g)}",
                optimizers=(owner,),
                group=g,
            )
            for o, owner in enumerate(optimizers)
            for g, group in enumerate(owner.param_groups)
        ]
    for h in made:
        for owner in h.optimizers:
            for number, group in enumerate(h.groups(owner), start=h.group or 0):
                if h.key not in group:
                    raise ValueError(f"{type(owner).__name__} has no {h.key!r} in parameter group {number}")
        check_scalar(h)
    return made if per_group else made[0]
