"""Optimizers from PyPI that look for the rate or need no schedule, each used as its authors say."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler

from hdet import find_replicas
from hdet_lab.options import RunOptions
from hdet_lab.recipe import Recipe
from hdet_lab.tasks import Task


class Prodigy(Recipe):
    """Prodigy (Mishchenko and Defazio) with lr=1 under cosine annealing to 0, as its README recommends."""

    rate = 1.0

    def __init__(self) -> None:
        self.found: float | None = None

    def optimizer(self, options: RunOptions, task: Task, model: nn.Module, peak_lr: float) -> Optimizer:
        from prodigyopt import Prodigy as Kind  # noqa: PLC0415

        return Kind(_groups(options, task, model), lr=peak_lr)

    def schedule(self, optimizer: Optimizer, peak_lr: float, steps: int) -> LRScheduler:
        return CosineAnnealingLR(optimizer, T_max=steps)

    @contextmanager
    def evaluating(self, task: Task, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
        self.found = float(optimizer.param_groups[0]["d"])
        yield


class DAdaptation(Prodigy):
    """D-Adaptation for Adam (Defazio and Mishchenko), lr=1, under the "scheduler you would normally use"."""

    def optimizer(self, options: RunOptions, task: Task, model: nn.Module, peak_lr: float) -> Optimizer:
        from dadaptation import DAdaptAdam  # noqa: PLC0415

        with redirect_stdout(io.StringIO()):  # it says that the decay is decoupled
            return DAdaptAdam(_groups(options, task, model), lr=peak_lr, decouple=True)

    def schedule(self, optimizer: Optimizer, peak_lr: float, steps: int) -> LRScheduler:
        return Recipe.schedule(self, optimizer, peak_lr, steps)


class ScheduleFree(Recipe):
    """Schedule-Free AdamW (Defazio et al.) with its recommended warm-up, here a twentieth of the run.

    It is evaluated at its averaged weights. BatchNorm has not seen those: its statistics are taken anew from training
    batches first, as its README says, which costs a third of a step for each.
    """

    rates = (1e-3, 2.5e-3, 1e-2)  # the second is its default; its README: one to ten times a scheduled rate
    recalibration = 50  # batches

    def __init__(self, steps: int) -> None:
        self._warmup = max(1, steps // 20)
        self.found: float | None = None

    def optimizer(self, options: RunOptions, task: Task, model: nn.Module, peak_lr: float) -> Optimizer:
        from schedulefree import AdamWScheduleFree  # noqa: PLC0415

        optimizer = AdamWScheduleFree(_groups(options, task, model), lr=peak_lr, warmup_steps=self._warmup)
        optimizer.train()
        return optimizer

    def schedule(self, optimizer: Optimizer, peak_lr: float, steps: int) -> LRScheduler:
        return LambdaLR(optimizer, lambda step: 1.0)

    @contextmanager
    def evaluating(self, task: Task, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
        optimizer.eval()
        replicas = find_replicas()
        if has_batch_norm(model) and replicas.rank == 0:
            for norm in _batch_norms(model):
                norm.reset_running_stats()
                norm.momentum = None  # the plain mean over what follows
            with torch.no_grad():
                for index in range(self.recalibration):
                    task.loss(model, task.batch(index % task.steps, 0, replicas.size))
            for norm in _batch_norms(model):
                norm.momentum = 0.1
        replicas.close()
        yield
        optimizer.train()


def has_batch_norm(model: nn.Module) -> bool:
    return bool(_batch_norms(model))


def _batch_norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


def _groups(options: RunOptions, task: Task, model: nn.Module) -> list[dict]:
    """The task's parameter groups, with its weight decay."""
    if options.optimizer != "adamw":
        raise ValueError(f"optimizer must be adamw, whose relatives these peers are; got {options.optimizer}")
    plain = task.optimizer(model, 1.0, "adamw")
    return [{name: group[name] for name in ("name", "params", "weight_decay")} for group in plain.param_groups]
