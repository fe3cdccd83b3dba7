"""The search for the learning rate in a Lightning Trainer: what it trains and scores, and how nobody sees it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.optim import Optimizer

from hdet._find_lr.interrupts import deferred_interrupts
from hdet._find_lr.loader import MEMORY, Kept, check_loader, on_host, read, wanted
from hdet._find_lr.workload import Batches
from hdet._replicas import Replicas
from hdet._tensors.attributes import Attributes
from hdet.integrations.overrides import Overrides

_PLAIN = "HDETCallback(find_lr=False) trains at the rate that the optimizer has"


class TrainingSteps(Batches):
    """Batches of the Trainer's loader, and the module's own `training_step`, run as the Trainer runs it.

    Batches are converted and moved by the Trainer's strategy, losses scaled and gradients clipped by its precision
    plugin, with the module's hooks of these and no callback's. A batch for which `training_step` returns None is
    skipped; the next one that has a loss takes its place.
    """

    without_gradients = (
        "training_step must return a loss that depends on parameters of the optimizer, but none of them has a gradient "
        "after backward()"
    )

    def __init__(self, trainer: Trainer) -> None:
        self._strategy, self._precision = trainer.strategy, trainer.precision_plugin
        self._module = trainer.lightning_module
        self._alone = trainer.world_size == 1
        self._last: Tensor | None = None
        kept = _taken(trainer, self._module)
        self._samples = {entry.batch[1]: len(entry) for entry in kept}
        self._skipped = 0
        super().__init__(
            self._strategy.model,
            self._score,
            kept,
            accumulate=trainer.accumulate_grad_batches,
            scaler=getattr(self._precision, "scaler", None),
        )

    def moved(self, batch: Any) -> Any:
        """One item of the loader, (batch, index in the epoch, loader), as the Trainer passes it on."""
        data, index, _ = batch
        data = self._precision.convert_input(on_host(data))
        data = self._module._on_before_batch_transfer(data, dataloader_idx=0)
        return self._strategy.batch_to_device(data, dataloader_idx=0), index

    def pass_through(self, batch: Any) -> None:
        loss = self._loss(self._strategy.training_step, *batch)
        for number in range(len(self._train)):
            if loss is not None:
                break
            other = self._train[(batch[1] + number) % len(self._train)]
            loss = self._loss(self._strategy.training_step, *self.moved(other.batch))
        self._last = None if loss is None else loss.detach()
        if loss is not None and loss.requires_grad:
            self._strategy.backward(loss / self._accumulate, None)

    def step(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            self._precision.optimizer_step(optimizer, model=self._module, closure=lambda: self._last)

    def share(self, replicas: Replicas) -> Tensor:
        self._skipped = 0
        sums = super().share(replicas)
        sums[1] -= self._skipped
        return sums if sums[1] > 0 else sums.new_tensor([math.nan, 1.0])

    def _score(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a batch that is not trained on; of one that is skipped, nothing that counts."""
        try:
            with self._precision.train_step_context():
                loss = self._loss(self._module.training_step, *batch)
        except AttributeError as error:
            raise RuntimeError(
                "training_step has failed in the search for the learning rate, which comes before the module's "
                f"on_train_start and on_train_epoch_start: {error}. Set in setup() what it needs; or {_PLAIN}"
            ) from error
        if loss is None:
            self._skipped += self._samples[batch[1]]
            return torch.zeros((), device=self._device)
        return loss

    def _loss(self, training_step: Callable[..., Any], batch: Any, index: int) -> Tensor | None:
        if batch is None:
            return None
        takes_index = is_param_in_hook_signature(self._module.training_step, "batch_idx", min_args=2)
        given = training_step(batch, index) if takes_index else training_step(batch)
        loss = given.get("loss") if isinstance(given, Mapping) else given
        if loss is None and given is None and self._alone:
            return None
        if not (isinstance(loss, Tensor) and loss.numel() == 1):
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(given).__name__
            raise TypeError(
                'training_step must return the loss, a tensor with one element, or a dict with a "loss", or on a '
                f"single replica None, got {what}"
            )
        return loss.reshape(())


def _taken(trainer: Trainer, module: LightningModule) -> list[Kept]:
    """The batches that a search takes; the loaders are as before."""
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(f"training_step takes batches itself (dataloader_iter), which a search cannot take; {_PLAIN}")
    combined = trainer.fit_loop._combined_loader
    most = min(wanted(trainer.accumulate_grad_batches), trainer.num_training_batches)
    try:
        for loader in combined.flattened:
            check_loader(loader)
        return read(_Again(combined), int(most), MEMORY)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error}; {_PLAIN}") from error


class _Again:
    """The Trainer's loaders, read from the beginning, with the iterators that it has of them left alone."""

    def __init__(self, combined: CombinedLoader) -> None:
        self._combined = combined
        self.loaders = list(combined.flattened)

    def __iter__(self) -> Iterator[Any]:
        again = CombinedLoader(self._combined.iterables, self._combined._mode)
        again.limits = self._combined.limits
        try:
            yield from again
        finally:
            again.reset()


class Together:
    """Several schedulers of one optimizer, as one that is stepped with it.

    Args:
        schedulers: each with the optimizer steps between two of its own, and whether it wants a metric.
    """

    def __init__(self, schedulers: Sequence[tuple[Any, float, bool]]) -> None:
        self.optimizer = schedulers[0][0].optimizer
        self.schedulers = [entry for entry, _, _ in schedulers]
        self._when = [(every, metric) for _, every, metric in schedulers]
        self._taken = 0

    def step(self) -> None:
        self._taken += 1
        for scheduler, (every, metric) in zip(self.schedulers, self._when, strict=True):
            if self._taken % every == 0:
                scheduler.step(1.0) if metric else scheduler.step()


def schedule(trainer: Trainer, total_steps: int | None) -> tuple[Any, int | None]:
    """The scheduler of the optimizer, if there is one, and how often the Trainer steps it before the last step of the
    optimizer, if that is known.
    """
    every = [_every(trainer, config) for config in trainer.lr_scheduler_configs]
    parts = [(c.scheduler, n, c.reduce_on_plateau) for c, n in zip(trainer.lr_scheduler_configs, every, strict=True)]
    if not parts:
        return None, None
    together, each = (parts[0][0], every[0]) if len(parts) == 1 else (Together(parts), 1)
    return together, None if total_steps is None else max(1, int((total_steps - 1) // each))


def _every(trainer: Trainer, config: Any) -> float:
    """Optimizer steps between two of a scheduler."""
    together: int = trainer.accumulate_grad_batches
    if config.interval == "step":  # the Trainer counts batches
        return math.lcm(together, config.frequency) / together
    batches = trainer.num_training_batches
    return float(config.frequency * (math.inf if batches == math.inf else math.ceil(batches / together)))


@contextmanager
def unseen(trainer: Trainer) -> Iterator[None]:
    """Within it nothing is logged or printed by the module, and no callback hears of anything. Then all is as before.

    What the module holds is not put back here, but by the search.
    """
    held = [entry for entry in (trainer, trainer.datamodule) if entry is not None]
    before = [Attributes([entry], shallow=vars(entry)) for entry in held]
    silenced = Overrides()
    try:
        for callback in trainer.callbacks:
            if isinstance(callback, GradientAccumulationScheduler):  # which would say so when the epoch begins
                trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(0)
        trainer.callbacks = []
        trainer.loggers = [DummyLogger() for _ in trainer.loggers]
        for module in trainer.lightning_module.modules():
            if isinstance(module, LightningModule):
                for name in ("log", "log_dict", "print"):
                    silenced.replace(module, name, lambda _: _nothing)
        yield
    finally:
        with deferred_interrupts():
            silenced.restore()
            for attributes in before:
                attributes.restore()


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None
