"""The outer step: how much of a round's weight change is applied when it ends.

    theta <- theta_0 + outer_step (mean_r theta_r - theta_0)

An outer step of 1/2 every few steps tolerates learning rates that are too high. Without fan-out and with shared
gradients all replicas hold the same weights, so nothing is sent. `Nesterov` treats the weight change as a gradient
instead, for local gradients and rounds of hundreds of steps.

torch.optim.SGD does the same arithmetic, and a test compares the two. It is not used because it needs a third copy of
the weights for its gradients and keeps half-precision momenta for half-precision weights.
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
    """Keeps a copy of the trained parameters from the start of a round, unless the full weight change is applied.

    Args:
        given: fraction of a round's weight change to apply, or the outer optimizer; None for all of it.

    Attributes:
        given: the argument.
        amount: fraction of a round's weight change to apply.
        momentum: fraction of the earlier rounds' change to apply again.
    """

    def __init__(self, given: float | Nesterov | None) -> None:
        given = 1.0 if given is None else given
        self.given = given
        self.amount, self.momentum = (given, 0.0) if isinstance(given, float) else (given.lr, given.momentum)
        self._parameters: list[Tensor] = []
        self._start: list[Tensor] = []
        self._owners: list[Tensor] = []  # the parameters that the momenta belong to
        self._momenta: list[Tensor] = []

    @property
    def active(self) -> bool:
        """Whether it does anything."""
        return self.amount != 1.0 or self.momentum != 0.0

    @torch.no_grad()
    def begin(self, parameters: Sequence[Tensor]) -> None:
        """Copy the parameters at the start of a round, into the last round's memory if it fits."""
        if not self.active or not parameters:  # a rank may hold no trained part
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
        """Apply the outer step from the round's start towards its end, in place."""
        parameters, self._parameters = self._parameters, []
        if parameters and self.momentum:
            torch._foreach_sub_(self._start, parameters)  # becomes the gradient: the start is copied again anyway
            torch._foreach_mul_(self._momenta, self.momentum)
            torch._foreach_add_(self._momenta, self._start)
            torch._foreach_mul_(self._start, 1.0 - self.amount)
            torch._foreach_add_(self._start, self._momenta, alpha=-self.amount * self.momentum)
            torch._foreach_add_(parameters, self._start)
        elif parameters:
            torch._foreach_lerp_(parameters, self._start, 1.0 - self.amount)

    def forget(self) -> None:
        """Apply the full weight change of this round."""
        self._parameters = []

    def reset(self) -> None:
        """Start over: apply this round's full weight change and forget earlier rounds."""
        self.forget()
        self._owners, self._momenta = [], []

    def check_join(self, diverges: bool) -> None:
        """Raise if a replica whose data have ended would get other momenta.

        Without fan-out it gets the others' weights only at the end of the loop, from torch's join.
        """
        if self.momentum and not diverges:
            raise ValueError(
                f"join() cannot be used with outer_step={self.given} if all replicas hold the same weights: one "
                'whose data have ended would have other momenta; use gradients="local", or outer_step without momentum'
            )

    def state_dict(self, begun: bool) -> dict[str, list[Tensor]]:
        """The weights at the round's start, if it has `begun` and they are known, and the momenta. Equal everywhere."""
        state = {}
        if begun and self._parameters:
            state["start"] = [t.clone() for t in self._start]
        if self._momenta:
            state["momenta"] = [t.clone() for t in self._momenta]
        return state

    def check_state(self, state: dict[str, Any], parameters: Sequence[Tensor]) -> None:
        """Raise if `load_state_dict` cannot use this state.

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
        """Resume from `state_dict()`, after `check_state()`."""
        start, momenta = state.get("start", []), state.get("momenta", [])
        self.reset()
        if momenta and self.momentum:
            self._own(parameters)
            torch._foreach_copy_(self._momenta, list(momenta))
        if start and self.active:
            self.begin(parameters)
            torch._foreach_copy_(self._start, list(start))

    def _own(self, parameters: Sequence[Tensor]) -> None:
        """Keep a momentum for each parameter; parameters not trained in the last round start from 0."""
        owners = [p if p._base is None else p._base for p in parameters]  # views of expanded tensors are new objects
        if len(owners) == len(self._owners) and all(a is b for a, b in zip(owners, self._owners, strict=True)):
            return
        known = {id(owner): momentum for owner, momentum in zip(self._owners, self._momenta, strict=True)}
        self._momenta = [
            known[id(owner)] if id(owner) in known else torch.zeros_like(p, dtype=self._dtype(p), requires_grad=False)
            for owner, p in zip(owners, parameters, strict=True)
        ]
        self._owners = owners

    def _dtype(self, p: Tensor) -> torch.dtype:
        """At least single precision: half precision would lose small contributions."""
        return torch.float32 if self.momentum and p.dtype in (torch.float16, torch.bfloat16) else p.dtype


def _layout(tensors: Sequence[Tensor]) -> list[tuple[torch.Size, torch.dtype, torch.device]]:
    return [(t.shape, t.dtype, t.device) for t in tensors]


class TakeOuterStep(Phase):
    """Applies a fraction of each round's weight change, and all of the last round's."""

    name = "outer step"

    def __init__(self, run: Run) -> None:
        self._run = run
        self.outer = OuterStep(run.settings.averaging.outer_step)

    @property
    def holds_weights(self) -> bool:
        return self.outer.active

    def begin(self) -> None:
        if not self._run.at.noisy:  # noisy replicas did not start from the same weights
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
