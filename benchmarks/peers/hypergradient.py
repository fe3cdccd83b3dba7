"""Hypergradient descent (Baydin et al., ICLR 2018): the rate follows the gradient of the loss with respect to itself.

With theta_t = theta_t-1 - alpha f_t d_t, where d_t is the direction that the optimizer steps in (Adam's, with decoupled
decay) and f_t the schedule, the loss at theta_t has the derivative -f_t g_t+1 . d_t in alpha. So before each step

    additive (the paper's SGD-HD and Adam-HD)       alpha <- alpha + beta f_t g_t+1 . d_t
    relative (the paper's multiplicative rule)      alpha <- alpha (1 + beta cos(g_t+1, d_t))

beta of the additive rule is the paper's for its small models: 1e-7 for Adam, 1e-3 for SGD. That of the relative rule is
ours, 0.02.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from hdet_lab.options import RunOptions
from hdet_lab.recipe import Recipe
from hdet_lab.tasks import Task

ADDITIVE_BETA = {"adamw": 1e-7, "sgd": 1e-3}
RELATIVE_BETA = 0.02


class Hypergradient(Recipe):
    """AdamW or SGD with a rate that follows its hypergradient, as a factor on OneCycleLR or on a constant rate.

    The paper keeps the rate constant but for the rule. Under OneCycleLR it starts from the plain schedule, and what is
    compared is the rule alone.
    """

    def __init__(self, rule: Literal["additive", "relative"] = "additive", constant: bool = False) -> None:
        self.found: float | None = None
        self._rule, self._constant = rule, constant
        self._follower: Follower | None = None

    def optimizer(self, options: RunOptions, task: Task, model: nn.Module, peak_lr: float) -> Optimizer:
        optimizer = super().optimizer(options, task, model, peak_lr)
        beta = ADDITIVE_BETA[options.optimizer] if self._rule == "additive" else RELATIVE_BETA
        self._follower = Follower(optimizer, peak_lr, self._rule, beta)
        return optimizer

    def schedule(self, optimizer: Optimizer, peak_lr: float, steps: int) -> LRScheduler:
        if self._constant:
            return LambdaLR(optimizer, lambda step: 1.0)
        return super().schedule(optimizer, peak_lr, steps)

    @contextmanager
    def evaluating(self, task: Task, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
        self.found = None if self._follower is None else self._follower.rate
        yield


class Follower:
    """Moves the rate of an optimizer before each of its steps. Between steps the groups hold the plain schedule."""

    def __init__(self, optimizer: Optimizer, peak_lr: float, rule: str, beta: float) -> None:
        self.rate = self._start = peak_lr
        self._rule, self._beta = rule, beta
        self._before: list[Tensor] = []
        self._directions: list[Tensor] = []
        self._shape = 0.0  # f_t
        self._scheduled: list[float] = []
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._end)

    @torch.no_grad()
    def _begin(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        parameters = _parameters(optimizer)
        if self._directions:
            self._follow([p.grad for p in parameters])
        self._before = [p.detach().clone() for p in parameters]
        self._scheduled = [group["lr"] for group in optimizer.param_groups]
        self._shape = self._scheduled[0] / self._start
        for group in optimizer.param_groups:
            group["lr"] *= self.rate / self._start

    @torch.no_grad()
    def _end(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        length = optimizer.param_groups[0]["lr"]
        for group, lr in zip(optimizer.param_groups, self._scheduled, strict=True):
            group["lr"] = lr
        after = _parameters(optimizer)
        self._directions = []
        if length > 0:
            self._directions = [(a - b) / length for a, b in zip(self._before, after, strict=True)]

    def _follow(self, gradients: list[Tensor]) -> None:
        pairs = list(zip(gradients, self._directions, strict=True))
        slope = float(sum((g * d).sum() for g, d in pairs))
        if self._rule == "additive":
            self.rate = max(0.0, self.rate + self._beta * self._shape * slope)
            return
        norms = [float(sum(x.square().sum() for x in xs)) ** 0.5 for xs in zip(*pairs, strict=True)]
        if norms[0] * norms[1] > 0:
            self.rate *= 1 + self._beta * slope / (norms[0] * norms[1])


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
