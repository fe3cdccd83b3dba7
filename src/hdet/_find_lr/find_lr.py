"""`hdet.find_lr`: its arguments. The search itself is in `search.py`, what it trains and scores in `workload.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast, overload

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hdet._arguments import Rule, answers, check_count, check_number
from hdet._find_lr.found_rate import FoundRate
from hdet._find_lr.loader import MEMORY, check_loader, read, wanted
from hdet._find_lr.search import Search
from hdet._find_lr.workload import Batches, StepFunction, Workload
from hdet._hooks import unwrap
from hdet._probe.probe import Probe, check_loss_fn
from hdet._replicas import Where
from hdet._replicas.agreement import Agreement, claim
from hdet._tensors.deepspeed import check_deepspeed
from hdet._tensors.parameters import parameters_of
from hdet._user_warning import warn

_WRITE = "write for example lambda model, batch: cross_entropy(model(batch[0]), batch[1])"


@overload
def find_lr(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    loader: Iterable[Any],
    loss_fn: Callable[[nn.Module, Any], Tensor],
    *,
    total_steps: int | None = None,
    accumulate: int = 1,
    clip_grad_norm: float | None = None,
    scaler: GradScaler | None = None,
    probe: Probe | None = None,
    progress: bool = True,
    outer_step: float = 1.0,
    factor: float | None = None,
    also: Sequence[Any] = (),
    replicas: Where | None = None,
) -> FoundRate: ...
@overload
def find_lr(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    loader: Callable[[int], Any] | None = None,
    *,
    step_fn: Callable[[int], Any] | None = None,
    probe: Probe,
    total_steps: int | None = None,
    progress: bool = True,
    outer_step: float = 1.0,
    factor: float | None = None,
    also: Sequence[Any] = (),
    replicas: Where | None = None,
) -> FoundRate: ...
@answers(
    "hdet.find_lr",
    {"process_group": "replicas=process_group", "mesh": "replicas=mesh", "max_norm": "clip_grad_norm=max_norm",
     "accumulation": "accumulate=", "gradient_accumulation_steps": "accumulate="},
)  # fmt: skip
def find_lr(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    loader: Iterable[Any] | Callable[[int], Any] | None = None,
    loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
    *,
    total_steps: int | None = None,
    accumulate: int = 1,
    clip_grad_norm: float | None = None,
    scaler: GradScaler | None = None,
    probe: Probe | None = None,
    step_fn: Callable[[int], Any] | None = None,
    progress: bool = True,
    outer_step: float = 1.0,
    factor: float | None = None,
    also: Sequence[Any] = (),
    replicas: Where | None = None,
) -> FoundRate:
    """The learning rate to train with, found in a few hundred steps from the present weights, nearly whatever rate
    the optimizer has now. Everything is put back. Collective: call it on every replica, before training.

    Weights, buffers, gradients, modes, optimizer state, groups, hooks, random generators, the loader and its samplers
    are afterwards bit for bit as before, also after an exception or Ctrl-C. `found.apply(optimizer, scheduler)` then
    trains at the rate that was found.

    The search costs a copy of the trained weights and buffers, a second optimizer state, the batches that it takes,
    and for the first ramp a copy of frozen weights on the host. The present rate of a group is its "max_lr" if a
    schedule such as OneCycleLR has put one there, then its "initial_lr", then its "lr", so that the answer is a peak;
    all groups are scaled alike. LBFGS is not supported.

    Args:
        model: the model that is trained, wrapped in DistributedDataParallel where there are several replicas.
        optimizer: its optimizer, or several of them.
        loader: this replica's batches: a DataLoader, a list, or any iterable that begins anew each time. The batches of
            64 steps are taken and used in turn, and those of 4 more are scored; fewer where the loader ends before, or
            where they would take more than 1 GiB of main memory (but at least two). They move to the model's device.
        loss_fn: `loss_fn(model, batch)`: the mean loss of a batch, as in training, with the autocast that you train
            with in it or around this call.
        total_steps: optimizer steps of the training to come. Shorter runs get a shorter search; None counts as long.
        accumulate: batches per optimizer step.
        clip_grad_norm: the norm that gradients are clipped to, if they are.
        scaler: the GradScaler that you train with, if any.
        probe: what the weights are scored on, by default batches of the loader. Held-out data shows overfitting.
        step_fn: instead of `loader` and `loss_fn`, together with a probe: `step_fn(index)` does forward and backward
            pass of this replica's batch `index` in 0..427. The same index must give the same batch.
        progress: show a line on the terminal.
        outer_step: that of the training to come; a half allows higher rates.
        factor: on the geometric middle of the low losses; by default what suits the optimizer and `total_steps`.
        also: further objects with `state_dict()` and `load_state_dict()` that steps change, such as a moving average.
        replicas: who they are, as in `hdet.Ensemble`: a process group or a device mesh; by default all ranks.

    Warns if something speaks against the answer; `FoundRate.doubts` says what.

    Raises:
        FindLRError: if the loss is not finite or not positive, or does not fall at any rate.
        TypeError, ValueError: for an argument that cannot work, and if the replicas hold different weights or rates.
        LostReplicaError: if another replica has failed; what it raised is quoted.

    >>> import torch
    >>> model = nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    >>> loader = [(torch.eye(2), torch.tensor([[3.0], [5.0]]))]
    >>> def loss_fn(model, batch):
    ...     return nn.functional.mse_loss(model(batch[0]), batch[1])
    >>> found = find_lr(model, optimizer, loader, loss_fn, total_steps=8000)
    >>> 0.03 < found.rate < 3
    True
    """
    with Agreement("hdet.find_lr", replicas):
        check_deepspeed(optimizer, model)
        _check_model(model)
        _check_count("total_steps", total_steps)
        optimizers = _optimizers(optimizer)
        _check_also(also)
        check_count("accumulate", accumulate, unit="batches")
        given_step = _step_function(loader, loss_fn, step_fn)
        if given_step is not None:
            _check_step_function(given_step, probe, accumulate, clip_grad_norm, scaler)
            assert probe is not None
            work: Workload = StepFunction(model, given_step, probe)
        else:
            clip = _clip(clip_grad_norm, optimizers)
            work = from_loader(model, loader, loss_fn, accumulate=accumulate, clip=clip, scaler=scaler, probe=probe)
        search = Search(model, optimizers, work, total_steps, outer_step, factor, also, replicas, progress)
        claim(search.claims({"probe": probe, "accumulate": accumulate, "clip_grad_norm": clip_grad_norm}))
    return search.run()


def from_loader(
    model: nn.Module,
    loader: Any,
    loss_fn: Any,
    *,
    accumulate: int = 1,
    clip: Callable[[], object] | None = None,
    scaler: GradScaler | None = None,
    probe: Probe | None = None,
) -> Batches:
    """The batches that a search takes from a loader. The loader is as before.

    Raises:
        TypeError, ValueError: for a loader that is empty or cannot be read twice, and for what is no loss_fn.
    """
    check_loader(loader)
    check_loss_fn(loss_fn, _WRITE)
    if probe is not None:
        _check_probe(probe)
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
    kept = read(loader, wanted(accumulate), MEMORY)
    return Batches(model, loss_fn, kept, accumulate=accumulate, clip=clip, scaler=scaler, probe=probe)


def _optimizers(optimizer: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    if not given:
        raise ValueError("optimizer must be an optimizer or several of them, got an empty list")
    for entry in given:
        if isinstance(entry, LRScheduler):
            raise TypeError(f"optimizer must be an optimizer, got a {type(entry).__name__}; pass its optimizer")
    found = [unwrap(entry) for entry in given]
    if any(isinstance(entry, LBFGS) for entry in found):
        raise ValueError("optimizer must not be LBFGS, which needs a closure; it has a line search of its own")
    return found


def _check_model(model: nn.Module) -> None:
    """Raise where no step could be taken."""
    if not torch.is_grad_enabled():
        raise RuntimeError("a search takes training steps: call it outside of torch.no_grad() and inference_mode()")
    meta = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if meta is not None:
        raise ValueError(f"model must have its weights, but {meta} is on the meta device; materialize it first")
    if not model.training:
        warn(
            f"{type(model).__name__} is in evaluation mode, and the search trains it so: without dropout, and with the "
            "running statistics of BatchNorm; call model.train() before it, as before training"
        )


def _check_count(name: str, value: int | None) -> None:
    if value is not None:
        check_count(name, value)


def _check_also(also: Sequence[Any]) -> None:
    for entry in also:
        if not (hasattr(entry, "state_dict") and hasattr(entry, "load_state_dict")):
            raise TypeError(f"also must hold objects with state_dict and load_state_dict, got {type(entry).__name__}")


def _step_function(loader: Any, loss_fn: Any, step_fn: Any) -> Callable[[int], Any] | None:
    """The function that does forward and backward pass, where one was given in place of loader and loss_fn."""
    if step_fn is not None:
        if loader is not None or loss_fn is not None:
            raise TypeError("step_fn replaces loader and loss_fn; give step_fn and probe, or loader and loss_fn")
        if not callable(step_fn):
            raise TypeError(f"step_fn must be a function of the batch's index, got {step_fn!r}")
        return cast(Callable[[int], Any], step_fn)
    if loss_fn is None and callable(loader) and not isinstance(loader, Iterable):
        return cast(Callable[[int], Any], loader)
    if loss_fn is None:
        raise TypeError(
            f"loss_fn must be given beside a loader, got loader={type(loader).__name__} and no loss_fn; write for "
            "example find_lr(model, optimizer, loader, lambda model, batch: cross_entropy(model(batch[0]), batch[1]))"
        )
    return None


def _check_step_function(step_fn: Any, probe: Any, accumulate: int, clip: Any, scaler: Any) -> None:
    for name, value, none in (("accumulate", accumulate, 1), ("clip_grad_norm", clip, None), ("scaler", scaler, None)):
        if value != none:
            raise TypeError(f"{name} goes with loader and loss_fn; with step_fn, do it there")
    _check_probe(probe)


def _check_probe(probe: Any) -> None:
    if not isinstance(probe, Probe):
        raise TypeError(f"probe must be an hdet.Probe, got {type(probe).__name__}; write Probe(data, loss_fn)")


def _clip(norm: float | None, optimizers: Sequence[Optimizer]) -> Callable[[], object] | None:
    if norm is None:
        return None
    check_number("clip_grad_norm", norm, Rule(lambda x: 0 < x < math.inf, "be positive and finite", "1.0"))
    return partial(clip_grad_norm_, parameters_of(*optimizers), float(norm))
