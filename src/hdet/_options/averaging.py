"""How the replicas' weights are averaged: `Averaging`, and the outer optimizer `Nesterov`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

from torch import Tensor, nn

from hdet._arguments import Rule, check_flag, check_number

_NESTEROV = {
    "lr": Rule(lambda x: 0 < x < math.inf, "be positive", "0.7"),
    "momentum": Rule(lambda x: 0 <= x < 1, "lie in [0, 1)", "0.9"),
}
_OUTER_STEP = Rule(lambda x: 0 < x <= 1, "lie in (0, 1], where 1 takes the whole step", "outer_step=0.5")
_TAIL = Rule(lambda x: 0 <= x <= 1, "lie in [0, 1], a part of the run; 0 for none", "tail=0.5")


@dataclass(frozen=True)
class Nesterov:
    """An outer optimizer: SGD with Nesterov momentum that treats a round's weight change as a gradient (DiLoCo).

    At every converge, with g the negative weight change and m = 0 at first::

        g = theta_0 - mean_r theta_r
        m <- momentum m + g
        theta <- theta_0 - lr (g + momentum m)

    as `torch.optim.SGD(nesterov=True)` would step. With a momentum of 0 this is `outer_step=lr`, and with lr = 1 as
    well it is the plain average. In the long run a round counts lr / (1 - momentum) times: 7 times with the defaults,
    which are DiLoCo's, so that few long rounds go as far as many short ones.

    Costs two copies of the trained parameters in at least single precision, but no communication, because all replicas
    compute the same.

    Args:
        lr: fraction of the round's weight change to apply.
        momentum: fraction of the earlier rounds' change to apply again.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        for name, rule in _NESTEROV.items():
            check_number(f"{name} of Nesterov", getattr(self, name), rule)


@dataclass(frozen=True)
class Averaging:
    """What to average at the end of a round and of the run, and how much of the result to apply.

    Args:
        outer_step: fraction of a round's weight change to apply, in (0, 1], or an `hdet.Nesterov`. The last round's
            change is applied in full. By default the controller's choice, which is usually 1.
        tail: part of the run at its end, in [0, 1], whose round ends are averaged; 0 for none. When the run ends, the
            probe decides whether to move halfway from the last weights to that mean. By default the controller's choice
            if it is possible: `Auto` takes a half in runs of at least 2,000 steps.
            Costs a copy of the trained parameters and the followers in at least single precision. The probe gets 16
            indices that no round has used.
        state: average the optimizer state of local gradients too. False: each replica keeps its own, which saves two
            thirds of the traffic with Adam; it is averaged once, when the run ends.
        followers: modules or tensors that follow the weights (EMA, SWA, fp32 masters), averaged with them.

    >>> Averaging(outer_step=2.0)
    Traceback (most recent call last):
    ValueError: outer_step must lie in (0, 1], where 1 takes the whole step, got 2.0; write for example outer_step=0.5
    """

    outer_step: float | Nesterov | None = None
    tail: float | None = None
    state: bool = True
    followers: Sequence[nn.Module | Tensor] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if not (self.outer_step is None or isinstance(self.outer_step, Nesterov)):
            check_number("outer_step", self.outer_step, _OUTER_STEP)
            object.__setattr__(self, "outer_step", float(self.outer_step))
        if self.tail is not None:
            check_number("tail", self.tail, _TAIL)
            object.__setattr__(self, "tail", float(self.tail))
        check_flag("state", self.state)
        self._check_followers()

    def _check_followers(self) -> None:
        given = self.followers
        if isinstance(given, (nn.Module, Tensor)) or not isinstance(given, Iterable):
            raise TypeError(f"followers must be a list, got {type(given).__name__}; write followers=[ema]")
        object.__setattr__(self, "followers", tuple(given))
        for follower in self.followers:
            if not isinstance(follower, (nn.Module, Tensor)):
                raise TypeError(f"followers must hold modules or tensors, got {follower!r}; write followers=[ema]")

    @property
    def gain(self) -> float:
        """The number of times a round's weight change counts in the long run."""
        if isinstance(self.outer_step, Nesterov):
            return self.outer_step.lr / (1.0 - self.outer_step.momentum)
        return 1.0 if self.outer_step is None else self.outer_step

    @property
    def steps(self) -> bool:
        """Whether the outer step differs from a round's full weight change."""
        return self.outer_step not in (None, 1.0, Nesterov(1.0, 0.0))

    def told(self) -> dict[str, object]:
        """The options that must be equal on all replicas, by name. Followers are compared elsewhere, by tensor."""
        return {f"averaging.{option.name}": getattr(self, option.name) for option in fields(self) if option.compare}
