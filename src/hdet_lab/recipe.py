"""A recipe: the optimizer, its schedule, and how they prepare the model for evaluation."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from hdet_lab.options import RunOptions
from hdet_lab.tasks import Task


class Recipe:
    """AdamW, or SGD with momentum, under OneCycleLR.

    A subclass trains the lab's tasks with another optimizer or schedule. Everything else stays the same: the initial
    weights, the order of the batches, the replicas and the evaluation.
    """

    def optimizer(self, options: RunOptions, task: Task, model: nn.Module, peak_lr: float) -> Optimizer:
        """The optimizer of the task's parameter groups."""
        decay = {} if options.weight_decay is None else {"weight_decay": options.weight_decay}
        return task.optimizer(model, peak_lr, options.optimizer, **decay)

    def schedule(self, optimizer: Optimizer, peak_lr: float, steps: int) -> LRScheduler:
        """The scheduler of the learning rate."""
        return OneCycleLR(optimizer, max_lr=peak_lr, total_steps=steps)

    def evaluating(self, task: Task, model: nn.Module, optimizer: Optimizer) -> AbstractContextManager[None]:
        """A context in which the model is ready for evaluation; collective, like a step."""
        return nullcontext()


ONE_CYCLE = Recipe()
