"""HDET in a transformers Trainer: `HDETCallback().attach(trainer)` before `trainer.train()`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from transformers.training_args import ParallelMode

from hdet._find_lr.found_rate import FoundRate
from hdet._user_warning import warn
from hdet.ensemble import Ensemble
from hdet.integrations.hosted import Given, Hosted
from hdet.integrations.overrides import Overrides
from hdet.integrations.trainer_batches import TrainerBatches, count_tokens, is_shared
from hdet.records.record import RoundRecord

_BESIDE = "hdet"  # the folder within a checkpoint
_ABOUT_TRAINING = ("loss", "train_runtime")  # a key of the Trainer's entries: of its steps, and at the end


class HDETCallback(TrainerCallback):  # type: ignore[misc]
    """Finds the learning rate before the first step, and trains at it; with several replicas, as an `hdet.Ensemble`.

    The search takes the Trainer's own steps, on batches of its loader, and puts everything back. The schedule keeps its
    shape, and its peak becomes the rate that was found, which the Trainer's log then shows. A run that is resumed keeps
    the schedule of its checkpoint; one of fewer than 100 steps keeps its own.

    The Trainer scales a replica's loss by its share of all tokens and shows it to no callback. `attach()` therefore
    looks at `training_step`, and gives the ensemble this replica's own mean loss per token of each optimizer step.
    `evaluate`, `predict` and every saved model are of the consensus; a checkpoint has a folder `hdet` with what each
    replica needs to go on exactly. The numbers of the last round are added to the Trainer's own log entries.

    Args:
        hyperparameters: what to explore, or a function that is given the optimizer and returns it; by default one joint
            learning rate.
        find_lr: find the learning rate before the first step; False if you know it.
        **options: as in `hdet.Ensemble`, apart from the model. `total_steps` is the Trainer's by default.

    Raises:
        TypeError: for an option that `hdet.Ensemble` does not have.

    Example::

        trainer = Trainer(model=model, args=args, train_dataset=data)
        HDETCallback().attach(trainer)
        trainer.train()
    """

    def __init__(self, hyperparameters: Given = None, *, find_lr: bool = True, **options: Any) -> None:
        self._hosted = Hosted(hyperparameters, options, find_lr)
        self._trainer: Trainer | None = None
        self._overrides = Overrides()
        self._resumed: str | None = None
        self._loss = _StepLoss()
        self._untold: dict[str, float] = {}  # numbers of the last round, if no log entry has them yet
        self._of_search: dict[str, float] = {}  # those of the search, likewise

    @property
    def ensemble(self) -> Ensemble | None:
        """The ensemble, from the start of training on."""
        return self._hosted.ensemble

    @property
    def found(self) -> FoundRate | None:
        """What was found before the first step."""
        return self._hosted.found

    def attach(self, trainer: Trainer) -> HDETCallback:
        """Add the callback to a Trainer.

        Raises:
            ValueError: if its replicas cannot hold different weights.
        """
        _check_trainer(trainer)
        if self._trainer is not None:
            raise ValueError("this HDETCallback is attached already; make one for each Trainer")
        _warn_of_own_loss(trainer)
        self._trainer = trainer
        trainer.add_callback(self)
        Overrides().replace(trainer, "train", self._training)
        return self

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        trainer = self._trainer
        if trainer is None:
            raise RuntimeError(
                "HDETCallback must be attached, to see this replica's losses; write HDETCallback(...).attach(trainer) "
                "instead of callbacks=[HDETCallback(...)]"
            )
        total_steps = state.max_steps if self._hosted.total_steps is None else self._hosted.total_steps
        self._overrides.restore()
        self._hosted.close()
        self._hosted.found, self._of_search = None, {}
        if self._resumed is None and state.global_step == 0:
            self._find(trainer, total_steps)
        self._hosted.start([trainer.optimizer], trainer.model_wrapped, total_steps, self._note)
        self._loss = _StepLoss()
        self._untold = {}
        self._overrides.replace(trainer, "log", self._logging)
        self._overrides.replace(trainer, "training_step", lambda call: self._loss.watch(trainer, call))
        for name in ("evaluate", "predict"):
            self._overrides.replace(trainer, name, self._on_consensus)
        self._overrides.replace(trainer, "save_model", lambda call: self._saving(trainer, call))
        if self._resumed is not None:
            self._hosted.load(os.path.join(self._resumed, _BESIDE), state.global_step, state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        assert self.ensemble is not None
        self.ensemble.step(self._loss.take(), attempted=self._hosted.local)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if control.should_training_stop:  # before the Trainer loads the best model over what is to be averaged
            self._hosted.finish()

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._hosted.finish()

    def _find(self, trainer: Trainer, total_steps: int) -> None:
        """The search, where it pays; nothing that it does is logged by the Trainer."""
        if not self._hosted.wants_search(total_steps):
            self._say(trainer, self._hosted.no_search(total_steps))
            return
        quiet = Overrides()
        quiet.replace(trainer, "log", lambda log: lambda *args, **kwargs: None)
        try:
            self._of_search = self._hosted.search(
                trainer.model_wrapped,
                [trainer.optimizer],
                [trainer.lr_scheduler],
                lambda: TrainerBatches(trainer),
                total_steps,
                trainer.state.max_steps,
                progress=not trainer.args.disable_tqdm,
            )
        finally:
            quiet.restore()
        self._say(trainer, None if self.found is None else f"hdet {self.found}")

    def _say(self, trainer: Trainer, text: str | None) -> None:
        """Where the Trainer prints its log."""
        if text is not None and trainer.is_world_process_zero():
            print(text)

    def _training(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """`trainer.train`, which knows where it resumes from, and which may raise."""

        def run(resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
            assert self._trainer is not None
            resumed = resume_from_checkpoint or None
            self._resumed = get_last_checkpoint(self._trainer.args.output_dir) if resumed is True else resumed
            try:
                return train(resume_from_checkpoint, *args, **kwargs)
            finally:
                self._overrides.restore()
                self._hosted.close()

        return run

    def _note(self, numbers: dict[str, float], record: RoundRecord) -> None:
        self._untold = numbers

    def _logging(self, log: Callable[..., Any]) -> Callable[..., Any]:
        """`trainer.log`, with the numbers of the search and of the last round in the entries about training.

        A callback that calls `trainer.log` itself would make the Trainer leave out its own entry of that step.
        """

        def told(logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            about = any(key in logs for key in _ABOUT_TRAINING)
            untold = {**self._of_search, **self._untold} if about else {}
            entry = {**logs, **untold}
            result = log(entry, *args, **kwargs)
            if untold:
                self._of_search, self._untold = {}, {}
            logs.clear()  # as the Trainer leaves it, without ours: train() may return it
            logs.update({key: value for key, value in entry.items() if key not in untold})
            return result

        return told

    def _on_consensus(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with self._hosted.consensus():
                return call(*args, **kwargs)

        return run

    def _saving(self, trainer: Trainer, save: Callable[..., None]) -> Callable[..., None]:
        """`trainer.save_model` on the consensus; in a checkpoint, with the replicas' own state beside it."""

        def save_model(output_dir: str | None = None, _internal_call: bool = False) -> None:
            if _internal_call and output_dir is not None and not trainer.args.save_only_model:
                self._hosted.save(os.path.join(output_dir, _BESIDE), trainer.state.global_step)
            with self._hosted.consensus():
                save(output_dir, _internal_call)

        return save_model


class _StepLoss:
    """This replica's mean loss over the micro-batches of one optimizer step, on the device and without waiting for it.

    Where the Trainer divides the summed loss by the tokens of all replicas, and multiplies it by their number, that is
    undone: what is left is the mean over this replica's own tokens.
    """

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._tokens: Tensor | int = 0
        self._of_all: Tensor | None = None
        self._last: Tensor | None = None

    def watch(self, trainer: Trainer, step: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`trainer.training_step`, and what it returns."""

        def training_step(
            model: Any, inputs: Mapping[str, Any], num_items_in_batch: Tensor | int | None = None
        ) -> Tensor:
            shared = num_items_in_batch is not None and is_shared(trainer)
            tokens = count_tokens(trainer, inputs) if shared else None  # before the Trainer takes the labels out
            loss = step(model, inputs, num_items_in_batch)
            self._total = loss.detach() if self._total is None else self._total + loss.detach()
            if tokens is not None:
                self._tokens = self._tokens + tokens.to(loss.device)
                self._of_all = (
                    torch.as_tensor(num_items_in_batch, device=loss.device) / trainer.accelerator.num_processes
                )
            return loss

        return training_step

    def take(self) -> Tensor | None:
        """The mean of the step that was taken; the one before it, where none of its tokens count here."""
        total, tokens, of_all = self._total, self._tokens, self._of_all
        self._total, self._tokens, self._of_all = None, 0, None
        if total is None or of_all is None:
            return total
        mean = total * of_all / torch.as_tensor(tokens).clamp(min=1)
        last = mean if self._last is None else self._last
        self._last = torch.where(torch.as_tensor(tokens) > 0, mean, last)
        return self._last


def _warn_of_own_loss(trainer: Trainer) -> None:
    """Warn of a loss whose scaling is not known: replicas would be judged by how many tokens they have."""
    own = type(trainer).compute_loss is not Trainer.compute_loss
    if own and trainer.args.world_size > 1 and getattr(trainer, "loss_is_scaled_for_ga", None) is None:
        warn(
            f"{type(trainer).__name__} computes its own loss: is it a mean over its own tokens? Then say so, or "
            "replicas with fewer tokens seem worse: trainer.loss_is_scaled_for_ga = False; set it to True if the loss "
            "is divided by num_items_in_batch"
        )


def _check_trainer(trainer: Trainer) -> None:
    sharded = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
    mode = trainer.args.parallel_mode
    if sharded or mode not in (ParallelMode.DISTRIBUTED, ParallelMode.NOT_PARALLEL):
        what = "DeepSpeed or FSDP" if sharded else f"the parallel mode {mode.value!r}"
        raise ValueError(
            f"every replica must hold a whole model in a process of its own, got {what}; leave out deepspeed= and "
            "fsdp=, and start the script with torchrun --nproc-per-node 2"
        )
