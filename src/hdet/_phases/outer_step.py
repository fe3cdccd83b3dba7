"""The outer step: how much of a round's weight change is applied when it ends.

    theta <- theta_0 + outer_step (mean_r theta_r - theta_0)

An outer step of 1/2 every few steps forgives learning rates that are too high. Without fan-out and with shared
gradients all replicas hold the same weights, so nothing is sent. `Nesterov` takes the way as a gradient instead, for
local gradients and rounds of hundreds of steps.

torch.optim.SGD does the same arithmetic, and a test compares the two. It is not used: it would need a third copy of
the weights for its gradients, and would keep momenta of half precision beside weights of half precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hdet._options.averaging import Nesterov
from hdet._phases.phase import Phase, Round, State
from hdet._run.rounds import Stage
from hdet._run.run import Run


class OuterStep:
    """Remembers where a round began: a copy of the trained parameters, unless the weight change is applied whole.

    Args:
        given: fraction of a round's weight change to apply, or the outer optimizer; None for all of it.

    Attributes:
        given: as it was.
        amount: fraction of a round's weight change to apply.
        momentum: fraction of the earlier rounds' change to apply again.
    """

    def __init__(self, given: float | Nesterov | None) -> None:
        given = 1.0 if given is None else given
        self.given = given
        self.amount, self.momentum = (given, 0.0) if isinstance(given, float) else (given.lr, given.momentum)
        self._parameters: list[Tensor] = []
        self._start: list[Tensor] = []
        self._owners: list[Tensor] = []  # whose momenta these are
        self._momenta: list[Tensor] = []

    @property
    def active(self) -> bool:
        """Whether it does anything."""
        return self.amount != 1.0 or self.momentum != 0.0

    @torch.no_grad()
    def begin(self, parameters: Sequence[Tensor]) -> None:
        """Remember where the round begins; copies into the last round's memory where it fits."""
        if not self.active or not parameters:  # a rank may hold no part of what is trained
            return
        self._parameters = list(parameters)
        if _layout(self._start) == [(p.shape, self._dtype(p), p.device) for p in parameters]:
            torch._foreach_copy_(self._start, self._parameters)
        else:
            self._start = [p.detach().to(self._dtype(p), copy=True) for p in parameters]
        if self.momentum:
            self._own(parameters)

    @torch.no_grad()
    def take(self) -> None:
        """Take the outer step from where the round began to where it has led, in place."""
        parameters, self._parameters = self._parameters, []
        if parameters and self.momentum:
            torch._foreach_sub_(self._start, parameters)  # the gradient, in its place: the start is copied anew
            torch._foreach_mul_(self._momenta, self.momentum)
            torch._foreach_add_(self._momenta, self._start)
            torch._foreach_mul_(self._start, 1.0 - self.amount)
            torch._foreach_add_(self._start, self._momenta, alpha=-self.amount * self.momentum)
            torch._foreach_add_(parameters, self._start)
        elif parameters:
            torch._foreach_lerp_(parameters, self._start, 1.0 - self.amount)

    def forget(self) -> None:
        """This round's step is taken whole."""
        self._parameters = []

    def reset(self) -> None:
        """Begin anew: this round's step is taken whole, and the rounds before it do not count."""
        self.forget()
        self._owners, self._momenta = [], []

    def check_join(self, diverges: bool) -> None:
        """Raise if a replica whose data have ended would lose track of the momenta.

        Without fan-out it gets the others' weights from torch's join, at the end of the loop only.
        """
        if self.momentum and not diverges:
            raise ValueError(
                f"join() cannot be used with outer_step={self.given} where all replicas hold the same weights: one "
                'whose data have ended would have other momenta; use gradients="local", or outer_step without momentum'
            )

    def state_dict(self, begun: bool) -> dict[str, list[Tensor]]:
        """Where this round began, if it has `begun` and that is known, and the momenta. The same on all replicas."""
        state = {}
        if begun and self._parameters:
            state["start"] = [t.clone() for t in self._start]
        if self._momenta:
            state["momenta"] = [t.clone() for t in self._momenta]
        return state

    def check_state(self, state: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Raise if `load_state_dict` could not go on from this.

        Raises:
            ValueError: if it was saved for other parameters.
        """
        for key, what in (("start", "start of the round is"), ("momenta", "momenta of outer_step are")):
            saved = state.get(key, [])
            if self.active and saved and [t.shape for t in saved] != [p.shape for p in parameters]:
                raise ValueError(
                    f"the saved {what} that of another model; resume with the same model, and the same layers frozen"
                )

    def load_state_dict(self, state: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Go on from `state_dict()`, which `check_state()` has passed."""
        start, momenta = state.get("start", []), state.get("momenta", [])
        self.reset()
        if momenta and self.momentum:
            self._own(parameters)
            torch._foreach_copy_(self._momenta, list(momenta))
        if start and self.active:
            self.begin(parameters)
            torch._foreach_copy_(self._start, list(start))

    def _own(self, parameters: Sequence[Tensor]) -> None:
        """Have a momentum for each parameter: those that were not trained in the last round begin with 0."""
        owners = [p if p._base is None else p._base for p in parameters]  # views of expanded ones are made anew
        if len(owners) == len(self._owners) and all(a is b for a, b in zip(owners, self._owners, strict=True)):
            return
        known = {id(owner): momentum for owner, momentum in zip(self._owners, self._momenta, strict=True)}
        self._momenta = [
            known[id(owner)] if id(owner) in known else torch.zeros_like(p, dtype=self._dtype(p), requires_grad=False)
            for owner, p in zip(owners, parameters, strict=True)
        ]
        self._owners = owners

    def _dtype(self, p: Tensor) -> torch.dtype:
        """Momenta of half precision would lose what they add up."""
        return torch.float32 if self.momentum and p.dtype in (torch.float16, torch.bfloat16) else p.dtype


def _layout(tensors: Sequence[Tensor]) -> list[tuple[torch.Size, torch.dtype, torch.device]]:
    return [(t.shape, t.dtype, t.device) for t in tensors]


class TakeOuterStep(Phase):
    """Applies a part of each round's weight change, but the last round's whole."""

    name = "outer step"

    def __init__(self, run: Run) -> None:
        self._run = run
        self.outer = OuterStep(run.settings.averaging.outer_step)

    @property
    def holds_weights(self) -> bool:
        return self.outer.active

    def begin(self) -> None:
        if not self._run.at.noisy:  # noisy replicas did not begin from one place
            self.outer.begin(self._run.tensors.parameters())

    def after(self, rnd: Round) -> None:
        if rnd.last:
            self.outer.forget()
        self.outer.take()
        rnd.record |= {"outer_step": self.outer.amount, "outer_momentum": self.outer.momentum}

    def undone(self, rnd: Round) -> None:
        self.outer.reset()
        self.after(rnd)

    def finish(self, rnd: Round) -> None:
        self.outer.reset()

    def join(self) -> None:
        self.outer.check_join(self._run.settings.local or self._run.rounds.explores)

    def reset(self) -> None:
        self.outer.reset()

    def state_dict(self) -> State:
        at = self._run.at
        return self.outer.state_dict(begun=at.stage is Stage.TRAINING and at.step_in_round > 0)

    def check_state(self, state: State) -> None:
        self.outer.check_state(state, self._run.tensors.parameters())

    def load_state_dict(self, state: State, own: State) -> None:
        self.outer.load_state_dict(state, self._run.tensors.parameters())
