"""HDET in a Lightning Trainer: `Trainer(callbacks=[HDETCallback()])`."""

from __future__ import annotations

import math
import os
import shutil
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from hdet._find_lr.found_rate import FoundRate
from hdet.ensemble import Ensemble
from hdet.integrations.hosted import Given, Hosted
from hdet.integrations.lightning_search import TrainingSteps, schedule, unseen
from hdet.integrations.overrides import Overrides
from hdet.records.record import RoundRecord


class HDETCallback(Callback):  # type: ignore[misc]
    """Finds the learning rate before the first step, and trains at it; explores around it where there are replicas.

    The search runs the module's own `training_step` on the Trainer's batches, with its precision, accumulation and
    clipping. Nothing of it is logged, and everything is put back; then `found.apply` gives the rate to the optimizer
    and its schedulers. Loggers get one line, `hdet/search/...` at step 0. Runs of fewer than 100 optimizer steps, and
    `fast_dev_run`, keep their rate, as a search would not pay. So does a resumed run: the checkpoint holds the rate
    that was found. A second `fit()` goes on at the same rate. The search calls the module's hooks around batches,
    backward passes and clipping, but not `on_train_start`, `optimizer_step` or the callbacks.

    Then an `hdet.Ensemble` of the Trainer's optimizers explores. Works with DDP and on one device, and with automatic
    and manual optimization. Losses are those that `training_step` returns, averaged over accumulated batches.
    Validation runs on the consensus. Every checkpoint holds the consensus; beside it, in a folder with `.hdet` behind
    its name, lies what each replica needs to go on exactly. The numbers of each round go to the Trainer's loggers.

    Args:
        hyperparameters: what to explore, or a function that is given the optimizer (the list of them, if there are
            several) and returns it; by default one joint learning rate.
        find_lr: whether to find the learning rate; False if you know it, and with manual optimization.
        **options: as in `hdet.Ensemble`, apart from the model. `total_steps` is the Trainer's by default; manual
            optimization must say.

    Raises:
        TypeError: for an option that `hdet.Ensemble` does not have.
        ValueError: when fitting starts, for a strategy under which replicas cannot hold different weights, and for a
            module, loader or scheduler that does not allow a search; the message says what to write.

    Example::

        trainer = Trainer(max_epochs=10, callbacks=[HDETCallback()])

        explored = lambda optimizer: [hdet.learning_rate(optimizer, spread=0.2)]
        callback = HDETCallback(explored, interval=50, controller=hdet.controllers.Softmax(temperature=0.1))
        trainer = Trainer(strategy="ddp", devices=2, callbacks=[callback, ModelCheckpoint(...)])
    """

    def __init__(self, hyperparameters: Given = None, *, find_lr: bool = True, **options: Any) -> None:
        self._hosted = Hosted(hyperparameters, options, finds=find_lr)
        self._overrides = Overrides()
        self._losses: list[Tensor] = []
        self._counted = 0  # the Trainer's optimizer steps that the ensemble knows of
        self._found_for: weakref.ref[LightningModule] | None = None  # the module of the last fit()

    @property
    def ensemble(self) -> Ensemble | None:
        """The ensemble, from the start of fitting on."""
        return self._hosted.ensemble

    @property
    def found(self) -> FoundRate | None:
        """What the search has found, from the start of fitting on; None if there was none, or it found nothing."""
        return self._hosted.found

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            check_strategy(trainer.strategy)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not earlier: asking for the number of steps makes the loaders, whose state Lightning would then not restore.
        def log(numbers: dict[str, float], record: RoundRecord) -> None:
            for logger in trainer.loggers:  # which write on the first replica only
                logger.log_metrics(numbers, step=record.step)

        if self._hosted.finds and not pl_module.automatic_optimization:
            raise ValueError(
                "find_lr needs automatic optimization: with manual optimization training_step takes the optimizer "
                "steps itself, at rates of its own, so that no others can be tried; write HDETCallback(find_lr=False), "
                "or call hdet.find_lr before trainer.fit"
            )
        if self._hosted.local and not pl_module.automatic_optimization:
            raise ValueError(
                'gradients="local" cannot be had here: with manual optimization Lightning shares the gradients itself; '
                "use automatic optimization, or leave gradients out"
            )
        total_steps = self._hosted.total_steps
        if total_steps is None:
            total_steps = _total_steps(trainer, pl_module)
        self._find(trainer, total_steps)
        self._hosted.start(trainer.optimizers, trainer.strategy.model, total_steps, log)
        self._overrides.restore()
        self._overrides.replace(trainer, "save_checkpoint", lambda call: self._saving(trainer, call))
        self._overrides.replace(trainer.strategy, "remove_checkpoint", lambda call: _removing(trainer, call))
        self._counted, self._losses = trainer.global_step, []
        taken = trainer.global_step // len(trainer.optimizers)  # Lightning adds up those of all optimizers
        if trainer.ckpt_path is not None:
            path = trainer.ckpt_path
            path = (
                os.path.realpath(path) if os.path.islink(path) else path
            )  # as ModelCheckpoint(save_last="link") makes
            self._hosted.load(_beside(path), trainer.global_step, taken)
        elif taken > 0 and self.ensemble is not None:  # a second fit() with the same Trainer
            self.ensemble.start_from(taken)

    def _find(self, trainer: Trainer, total_steps: int | None) -> None:
        """Find the learning rate and let it take effect, where there is reason to."""
        hosted, module = self._hosted, trainer.lightning_module
        again = self._found_for is not None and self._found_for() is module
        if again and trainer.global_step > 0 and trainer.ckpt_path is None:
            if hosted.found is not None:  # a second fit(), for which Lightning has made the optimizer anew
                scheduler, steps = schedule(trainer, total_steps)
                hosted.found.apply(trainer.optimizers, [scheduler], steps=steps)
            return
        hosted.found, self._found_for = None, weakref.ref(module)
        if trainer.global_step > 0 or trainer.ckpt_path is not None:
            return
        said = hosted.no_search(total_steps)
        if said is not None:
            rank_zero_info(said)
        elif hosted.finds and not trainer.fast_dev_run:
            self._search(trainer, total_steps)

    def _search(self, trainer: Trainer, total_steps: int | None) -> None:
        scheduler, steps = schedule(trainer, total_steps)
        shown = trainer.progress_bar_callback is not None
        model, optimizers = trainer.strategy.model, trainer.optimizers
        with unseen(trainer):
            numbers = self._hosted.search(
                model, optimizers, [scheduler], lambda: TrainingSteps(trainer), total_steps, steps, shown
            )
        if self.found is not None:
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=0)
            rank_zero_info(f"hdet {self.found}")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        stepped, self._counted = trainer.global_step != self._counted, trainer.global_step
        assert self.ensemble is not None
        if not pl_module.automatic_optimization:  # whose steps the Trainer may not see
            self.ensemble.step(loss, attempted=self._hosted.local and stepped)
            return
        divided_by = trainer.accumulate_grad_batches
        if loss is not None:
            self._losses.append(loss if divided_by == 1 else loss * divided_by)
        if stepped:
            losses, self._losses = self._losses, []
            self.ensemble.step(_mean(losses), attempted=self._hosted.local)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._hosted.enter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._hosted.leave()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._hosted.finish()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()  # not every replica need be here: nothing may be averaged any more

    def _close(self) -> None:
        self._overrides.restore()
        self._hosted.close()

    def _saving(self, trainer: Trainer, save: Callable[..., None]) -> Callable[..., None]:
        """`trainer.save_checkpoint` on the consensus, with the replicas' own state beside it."""

        def save_checkpoint(
            filepath: str | os.PathLike[str], weights_only: bool | None = None, storage_options: Any = None
        ) -> None:
            if trainer.global_step != self._counted:
                raise RuntimeError(
                    "a checkpoint is saved before HDETCallback has seen the last step, so it could not be resumed; put "
                    "HDETCallback first in Trainer(callbacks=[...])"
                )
            if not weights_only and "://" not in str(filepath):
                self._hosted.save(_beside(filepath), trainer.global_step)
            with self._hosted.consensus():
                save(filepath, weights_only, storage_options)

        return save_checkpoint


def _removing(trainer: Trainer, remove: Callable[..., None]) -> Callable[..., None]:
    """`strategy.remove_checkpoint`, of what lies beside it too."""

    def remove_checkpoint(filepath: str | os.PathLike[str]) -> None:
        beside = _beside(filepath)
        remove(filepath)
        if trainer.is_global_zero:
            shutil.rmtree(beside, ignore_errors=True)

    return remove_checkpoint


def _beside(filepath: str | os.PathLike[str]) -> str:
    """The folder beside a checkpoint."""
    return f"{os.fspath(filepath)}.hdet"


def _mean(losses: list[Tensor]) -> Tensor | None:
    if len(losses) < 2:
        return losses[0] if losses else None
    return sum(losses[1:], losses[0]) / len(losses)


def _total_steps(trainer: Trainer, pl_module: LightningModule) -> int | None:
    if not pl_module.automatic_optimization:
        raise ValueError(
            "total_steps must be given with manual optimization, where the Trainer does not know how often you call "
            "optimizer.step(); write for example HDETCallback(total_steps=10_000)"
        )
    steps = trainer.estimated_stepping_batches
    return int(steps) if 0 < steps < math.inf else None


def check_strategy(strategy: Any) -> None:
    """Raise for a strategy under which replicas cannot diverge."""
    names = {c.__name__ for c in type(strategy).__mro__}
    works = isinstance(strategy, (DDPStrategy, SingleDeviceStrategy))
    if not works or names & {"DeepSpeedStrategy", "XLAStrategy", "SingleDeviceXLAStrategy"}:
        raise ValueError(
            f"strategy must be DDP, in which every replica holds a whole model, got {type(strategy).__name__}; write "
            'Trainer(strategy="ddp")'
        )
