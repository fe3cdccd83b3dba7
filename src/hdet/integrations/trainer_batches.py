"""What a search trains and scores in a transformers Trainer: its own steps, on batches of its own loader."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from hdet._find_lr.loader import MEMORY, check_loader, read, to_device, wanted
from hdet._find_lr.workload import Batches
from hdet._probe.batches import count_samples
from hdet._tensors.attributes import Attributes

_IGNORED = -100  # the label of what is not predicted
_DATA = ("train_dataset", "eval_dataset")


class TrainerBatches(Batches):
    """Batches of the loader that the Trainer is about to train on.

    Training passes are the Trainer's `training_step`. The score is its `compute_loss` on the module inside DDP, a mean
    over this replica's own tokens, or over samples where there are no labels. What these write into the Trainer (lists
    of metrics, counters) is put back.

    Args:
        trainer: the Trainer, when training begins.

    Raises:
        TypeError, ValueError: for a loader that is empty or cannot be read twice.
    """

    without_gradients = (
        "the Trainer's training_step must give parameters of its optimizer a gradient, but none of them has one after "
        "it; check which parameters require a gradient, and that the loss depends on them"
    )

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        args, model = trainer.args, trainer.model_wrapped
        clip = None
        if args.max_grad_norm and args.max_grad_norm > 0:
            clip = partial(clip_grad_norm_, list(model.parameters()), args.max_grad_norm)
        super().__init__(
            model,
            self._loss,
            _read(trainer),
            accumulate=args.gradient_accumulation_steps,
            clip=clip,
            scaler=trainer.accelerator.scaler,
        )
        written = (trainer, trainer.state, trainer.control, trainer.accelerator, trainer.accelerator.gradient_state)
        self._attributes = Attributes(written, shallow=_DATA)

    def backward(self, index: int) -> None:
        """One optimizer step's passes, as `Trainer._run_epoch` has them."""
        trainer, first = self._trainer, index * self._accumulate
        taken = (self._train[micro % len(self._train)] for micro in range(first, first + self._accumulate))
        batches, items = trainer.get_batch_samples(
            (to_device(kept.batch, self._device) for kept in taken), self._accumulate, trainer.args.device
        )
        trainer.current_gradient_accumulation_steps = len(batches)
        for number, inputs in enumerate(batches):
            last = number == len(batches) - 1
            trainer.accelerator.gradient_state._set_sync_gradients(last)
            with contextlib.nullcontext() if last else trainer.accelerator.no_sync(model=self.model):
                trainer.training_step(self.model, inputs, items)

    def rewind(self) -> None:
        super().rewind()
        self._attributes.restore()

    def _loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The mean over what this replica predicts in a batch."""
        trainer = self._trainer
        inputs = trainer._prepare_inputs(batch)
        own = _tokens(trainer, inputs) if trainer.model_accepts_loss_kwargs or trainer.compute_loss_func else None
        items = None if own is None else own.clamp(min=1)
        with trainer.compute_loss_context_manager():
            loss: Tensor = trainer.compute_loss(model, inputs, num_items_in_batch=items)
        return loss.mean() / (trainer.accelerator.num_processes if items is not None and is_shared(trainer) else 1)


def is_shared(trainer: Any) -> bool:
    """Whether losses are divided by the tokens of all replicas, and multiplied by their number."""
    if getattr(trainer, "loss_is_scaled_for_ga", None) is False:  # a mean per micro-batch, of the user's own making
        return False
    scaled = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
    return bool(scaled and trainer.args.average_tokens_across_devices and trainer.args.world_size > 1)


def count_tokens(trainer: Any, inputs: Mapping[str, Any]) -> Tensor:
    """The tokens of a micro-batch that are predicted, counted as the Trainer counts them."""
    if "shift_labels" in inputs:
        labels = inputs["shift_labels"]
    else:
        labels = inputs["labels"][..., 1:] if getattr(trainer, "_loss_shifts_labels", False) else inputs["labels"]
    counted: Tensor = labels.ne(_IGNORED).sum()
    return counted


def _read(trainer: Any) -> list[Any]:
    loader = trainer.callback_handler.train_dataloader
    try:
        check_loader(loader)
    except ValueError as error:
        raise ValueError(f"{error}; or leave the search out: HDETCallback(find_lr=False)") from error
    return read(loader, wanted(trainer.args.gradient_accumulation_steps), MEMORY, partial(_weight, trainer))


def _weight(trainer: Any, batch: Any) -> int:
    """What a batch counts for in the score."""
    tokens = _tokens(trainer, batch)
    if tokens is not None:
        return max(1, int(tokens))
    try:
        return max(1, count_samples(batch))
    except TypeError:
        return 1


def _tokens(trainer: Any, batch: Any) -> Tensor | None:
    """How much is predicted in a batch; None where its labels are of another kind, or there are none."""
    if not isinstance(batch, Mapping) or not ("labels" in batch or "shift_labels" in batch):
        return None
    try:
        return count_tokens(trainer, batch)
    except (AttributeError, TypeError, IndexError):
        return None
