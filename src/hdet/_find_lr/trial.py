"""A model and its optimizers under a test: steps at given rates, scores on a probe, and everything as it was."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hdet._find_lr.apply import sizes_of
from hdet._find_lr.decisions import Curve
from hdet._find_lr.workload import Workload
from hdet._hooks import innermost
from hdet._replicas import Replicas
from hdet._tensors.attributes import Attributes, modules_of_users
from hdet._tensors.parameters import parameters_of
from hdet._tensors.restore import Frozen, Generators, Modules, OptimizerState, Others, Weights
from hdet._tensors.shards import reshard
from hdet._user_warning import warn


class Trial:
    """The model and its optimizers under test: steps, scores, and everything as it was.

    Attributes:
        references: the rate of every group, optimizer by optimizer.
        start: the first of them.
        steps, samples: taken and scored so far.
        stepped_at: when the last step began, by the monotonic clock.
        step_seconds, probe_seconds: what steps and scores have taken, by this replica's clock.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[Optimizer],
        workload: Workload,
        also: Sequence[Any],
        replicas: Replicas,
        watch: Callable[[int, float], object] = lambda steps, rate: None,
    ) -> None:
        self.references = [[_reference(group) for group in o.param_groups] for o in optimizers]
        self.start = next((rate for rates in self.references for rate in rates if rate > 0), 0.0)
        if not self.start:
            raise ValueError("the optimizer must have a positive learning rate, got 0 in all groups; set lr=1e-3 first")
        self.steps, self.samples = 0, 0
        self._suspects: list[int] = []  # the batches before the first score of a ramp that was not finite
        self.stepped_at = time.monotonic()
        self.step_seconds = self.probe_seconds = 0.0
        self._model, self._optimizers, self._workload = model, optimizers, workload
        self._replicas, self._watch = replicas, watch
        self._generators = Generators()
        self._modules = Modules(model)
        self._attributes = Attributes(modules_of_users(innermost(model)))
        reshard(model)  # while whole weights are gathered its parameters are others
        trained = parameters_of(*optimizers)
        self._device = trained[0].device
        self._weights = Weights([*trained, *(p for p in model.parameters() if p.requires_grad)])
        known = {id(p) for p in trained}
        self._trains_the_model = any(id(p) in known for p in model.parameters())
        self._frozen = Frozen(p for p in model.parameters() if not p.requires_grad and id(p) not in known)
        self._states = [OptimizerState(o) for o in optimizers]
        self._others = Others(also)
        self._ddp = [
            (module, module.require_forward_param_sync, module.require_backward_grad_sync)
            for module in model.modules()
            if isinstance(module, DistributedDataParallel)
        ]

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """How many numbers every group trains, optimizer by optimizer."""
        return sizes_of(self._optimizers)

    @property
    def doubts(self) -> tuple[str, ...]:
        """What speaks against any answer."""
        return self._workload.doubts

    @property
    def wrappers(self) -> list[DistributedDataParallel]:
        """What shares the gradients."""
        return [module for module, *_ in self._ddp]

    def prepare(self) -> None:
        """Let the workload meet the others. Collective."""
        self._workload.prepare(self._replicas, self._device)

    def require_agreement(self, when: str = "") -> None:
        """All replicas must hold the same weights and rates: each scores a part of the probe."""
        rates = [rate for rates in self.references for rate in rates]
        vector = torch.tensor([self._weights.checksum(), *rates], dtype=torch.float64, device=self._device)
        everyone = self._replicas.gather(vector)
        for rank, row in enumerate(everyone):
            if row != everyone[0] and not any(map(math.isnan, row)):
                what = "weights" if row[0] != everyone[0][0] else "learning rates"
                remedy = (
                    when or "; call find_lr after wrapping the model in DistributedDataParallel and before training"
                )
                raise ValueError(
                    f"all replicas must hold the same {what}, but replica {rank} differs from replica 0{remedy}"
                )

    def rewind(self) -> None:
        """Back to the start of a ramp: no optimizer state, no gradients, nobody's hooks."""
        self._generators.restore()
        self._modules.restore()
        self._attributes.restore()
        reshard(self._model)
        self._weights.rewind()
        if self.steps:
            self._frozen.settle()
        self._frozen.restore()
        self._others.restore()
        self._workload.rewind()
        for optimizer, state in zip(self._optimizers, self._states, strict=True):
            state.restart()
            for group in optimizer.param_groups:
                _put_momentum_of_peak(group)
        torch.clear_autocast_cache()

    def restore(self) -> None:
        """Everything as it was before the test."""
        reshard(self._model)
        self._weights.restore()
        self._frozen.restore()
        for state in self._states:
            state.restore()
        self._modules.restore()
        self._attributes.restore()
        self._workload.rewind()
        for module, forward, backward in self._ddp:
            module.require_forward_param_sync, module.require_backward_grad_sync = forward, backward
        try:
            self._others.restore()
        finally:
            torch.clear_autocast_cache()
            self._generators.restore()  # last: the others may draw
        if not self._frozen.all_restored():
            warn(
                "find_lr has left parameters changed that no optimizer trains: the second ramp changed them, and the "
                "first had not; pass the module that holds them in also="
            )

    def ramp(self, steps: Sequence[tuple[int, float]], every: int, over: Callable[[Curve], bool]) -> Curve:
        """Steps with these batches at these rates of the first group, scored every few of them, until `over` the curve
        so far.
        """
        self.rewind()
        curve: Curve = []
        self._suspects = []
        for number, (index, rate) in enumerate(steps):
            self._step(index, rate)
            if self.steps == 1:
                self.require_agreement(" after one step; train the model in the wrapper that shares the gradients")
            if (number + 1) % every == 0:
                curve.append((rate, self.score()))
                if not (self._suspects or math.isfinite(curve[-1][1])):
                    self._suspects = [index for index, _ in steps[number + 1 - every : number + 1]]
                if over(curve):
                    break
        return curve

    def bad_batch(self) -> int | None:
        """After a ramp whose scores ceased to be finite: the batch that did it, if its gradient is not finite at the
        weights that the ramp began with either. Then it is the data and not the rate.
        """
        suspects, self._suspects = self._suspects, []
        for index in suspects:
            self.rewind()
            started = time.perf_counter()
            self._backward(index)
            self.steps += 1
            self.step_seconds += time.perf_counter() - started
            finite = torch.tensor([float(self._weights.have_finite_gradients())], device=self._device)
            if not all(row[0] for row in self._replicas.gather(finite)):
                return index
        return None

    def effect(self) -> tuple[bool, bool]:
        """Whether the optimizers of all replicas hold parameters of the model that is scored, at least one; and whether
        the weights of any replica are others now than at the beginning of the ramp.
        """
        mine = [float(self._trains_the_model), float(self._weights.moved())]
        everyone = self._replicas.gather(torch.tensor(mine, dtype=torch.float64, device=self._device))
        return all(row[0] for row in everyone), any(row[1] for row in everyone)

    def score(self) -> float:
        """The probe's loss, the same float on every replica."""
        self._wait()
        started = time.perf_counter()
        parts = self._replicas.gather(self._workload.share(self._replicas))
        self.probe_seconds += time.perf_counter() - started
        weight = sum(row[1] for row in parts)
        self.samples += round(weight)
        return sum(row[0] for row in parts) / weight

    def clocks(self, *seconds: float) -> list[float]:
        """The mean over all replicas of what their own clocks say, the same on each of them."""
        everyone = self._replicas.gather(torch.tensor(seconds, dtype=torch.float64, device=self._device))
        return [math.fsum(column) / len(everyone) for column in zip(*everyone, strict=True)]

    def _backward(self, index: int) -> None:
        self._weights.clear_gradients()
        watched = [optimizer.register_step_pre_hook(_refuse_step) for optimizer in self._optimizers]
        try:
            self._workload.backward(index)
        finally:
            for handle in watched:
                handle.remove()

    def _step(self, index: int, rate: float) -> None:
        started, self.stepped_at = time.perf_counter(), time.monotonic()
        self._watch(self.steps, rate)
        self._backward(index)
        if not self.steps and not self._weights.have_gradients():
            raise ValueError(self._workload.without_gradients)
        for optimizer, references in zip(self._optimizers, self.references, strict=True):
            for group, reference in zip(optimizer.param_groups, references, strict=True):
                _put_rate(group, reference * (rate / self.start))
        self._workload.step(self._optimizers)
        torch.clear_autocast_cache()  # the caller's autocast would keep the casts of the old weights until it ends
        self.steps += 1
        self.step_seconds += time.perf_counter() - started

    def _wait(self) -> None:
        """A GPU has not done yet what the host has asked of it; without this the probe's clock would count it."""
        if self._device.type == "cuda":
            started = time.perf_counter()
            torch.cuda.synchronize(self._device)
            self.step_seconds += time.perf_counter() - started


def _refuse_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    raise ValueError(
        f"a search takes its own steps, at the rates that it tries, but what it was given called "
        f"{type(optimizer).__name__}.step(): let step_fn end with backward(), or loss_fn return the loss"
    )


def _reference(group: dict[str, Any]) -> float:
    """The rate that a group trains with at the peak of its schedule, as far as the group knows."""
    return next(
        (float(group[key]) for key in ("max_lr", "initial_lr") if float(group.get(key, 0)) > 0), float(group["lr"])
    )


def _put_rate(group: dict[str, Any], rate: float) -> None:
    lr = group["lr"]
    group["lr"] = torch.full_like(lr, rate) if isinstance(lr, Tensor) else rate  # not in place: groups may share it


def _put_momentum_of_peak(group: dict[str, Any]) -> None:
    """OneCycleLR begins with another momentum than it has where the rate is highest, which is what is sought here."""
    if "max_lr" in group and "base_momentum" in group:
        if "betas" in group:
            group["betas"] = (group["base_momentum"], *group["betas"][1:])
        elif "momentum" in group:
            group["momentum"] = group["base_momentum"]
