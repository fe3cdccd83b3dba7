"""HDET in a loop with Accelerate: `find_lr` before it, `hdet.Ensemble` in it, `save_state` and `load_state` beside it.

An ensemble takes optimizers and models that were prepared as well as plain ones, and counts the steps that were taken:
call `ensemble.step(loss)` once per batch, with the loss that was given to `accelerator.backward`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn

from hdet._find_lr.find_lr import find_lr as _find_lr
from hdet._find_lr.found_rate import FoundRate
from hdet._tensors.attributes import Attributes
from hdet.checkpoint.entries import find_ensemble, flatten
from hdet.integrations.beside import Beside, trained_by

_BESIDE = "hdet"  # the folder within a checkpoint


def find_lr(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,
    loader: Iterable[Any],
    loss_fn: Callable[[nn.Module, Any], Tensor],
    *,
    total_steps: int | None = None,
    **options: Any,
) -> FoundRate:
    """`hdet.find_lr` with the accelerator's accumulation and grad scaler. Everything is put back.

    Collective: every replica calls it, before training. `found.apply(optimizer, scheduler)` then trains at the rate
    that was found. A prepared model runs in the accelerator's precision.

    Args:
        accelerator: yours.
        model: prepared; in one process it need not be.
        optimizer: prepared or not; a list for several.
        loader: prepared, or this replica's batches.
        loss_fn: `loss_fn(model, batch)`: the mean loss of a batch, as it is given to `accelerator.backward`.
        total_steps: optimizer steps of the training to come.
        **options: others of `hdet.find_lr`, such as `clip_grad_norm`. `accumulate` is by default the accelerator's.

    Raises:
        ValueError: where replicas do not hold whole models, and as `hdet.find_lr` does.

    Example::

        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        find_lr(accelerator, model, optimizer, loader, loss_fn, total_steps=1000).apply(optimizer, scheduler)
    """
    _check_whole(accelerator)
    given: dict[str, Any] = {"accumulate": accelerator.gradient_accumulation_steps, "scaler": accelerator.scaler}
    before = Attributes([accelerator.gradient_state])
    try:
        return _find_lr(model, optimizer, loader, loss_fn, total_steps=total_steps, **{**given, **options})
    finally:
        before.restore()


def save_state(
    accelerator: Accelerator, run: Mapping[str, Any], output_dir: str | os.PathLike[str] | None = None, **options: Any
) -> Path:
    """`accelerator.save_state`, of the consensus; a folder `hdet` in it holds what each replica needs to go on exactly.

    Collective: every replica calls it, between steps.

    Args:
        accelerator: yours.
        run: the entries of the run as in `hdet.save`: model, optimizer and ensemble, prepared or not. What was not
            prepared is saved as well.
        output_dir: as in `accelerator.save_state`.
        **options: of `accelerator.save_state`.

    Returns:
        The folder of the checkpoint.

    Raises:
        ValueError: without an ensemble, and where replicas cannot hold different weights.

    Example::

        run = {"model": model, "optimizer": optimizer, "ensemble": ensemble}
        save_state(accelerator, run, "checkpoints/100")
    """
    beside = _beside(accelerator, run)
    ensemble = find_ensemble(run)
    assert ensemble is not None
    folders: list[Path] = []

    def clear(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        folders.append(Path(folder))
        if accelerator.is_main_process:  # a kill from here on leaves no state that belongs to other weights
            shutil.rmtree(Path(folder) / _BESIDE, ignore_errors=True)

    hook = accelerator.register_save_state_pre_hook(clear)
    try:
        with ensemble.consensus():
            accelerator.save_state(None if output_dir is None else os.fspath(output_dir), **options)
    finally:
        hook.remove()
    beside.save(folders[0] / _BESIDE, None, keep=1)
    return folders[0]


def load_state(
    accelerator: Accelerator, run: Mapping[str, Any], input_dir: str | os.PathLike[str] | None = None, **options: Any
) -> Path:
    """`accelerator.load_state`, and then for each replica its own state. Collective: every replica calls it.

    On as many replicas as had saved it they go on as if they had never stopped; another number begins with the average.

    Args:
        accelerator: yours.
        run: as in `save_state`.
        input_dir: as in `accelerator.load_state`.
        **options: of `accelerator.load_state`.

    Returns:
        The folder of the checkpoint.

    Raises:
        ValueError: for a checkpoint that was not saved by `save_state`.
    """
    beside = _beside(accelerator, run)
    folders: list[Path] = []
    hook = accelerator.register_load_state_pre_hook(lambda models, folder: folders.append(Path(folder)))
    try:
        accelerator.load_state(None if input_dir is None else os.fspath(input_dir), **options)
    finally:
        hook.remove()
    if not beside.load(folders[0] / _BESIDE, None):
        raise ValueError(
            f"{folders[0]} has no folder {_BESIDE!r}, as hdet.integrations.accelerate.save_state writes it; to go on "
            "from a plain checkpoint write accelerator.load_state(...) and ensemble.start_from(step)"
        )
    return folders[0]


def _beside(accelerator: Accelerator, run: Mapping[str, Any]) -> Beside:
    """What goes into the folder: what Accelerate does not save, and in mid-round what it saves of one replica only."""
    _check_whole(accelerator)
    found = flatten("run", run)
    ensemble = find_ensemble(found)
    if ensemble is None:
        raise ValueError(
            'run must hold the ensemble; write {"model": model, "optimizer": optimizer, "ensemble": ensemble}'
        )
    prepared = flatten("prepared", {"": [*accelerator._models, *accelerator._optimizers, *accelerator._schedulers]})
    saved = {id(entry) for entry in prepared.values()}
    optimizers = [entry for entry in found.values() if hasattr(entry, "param_groups")]

    def own() -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for name, entry in found.items():
            if id(entry) in saved:
                entries |= trained_by(optimizers, name, entry) if isinstance(entry, nn.Module) else {name: entry}
        return entries

    return Beside(ensemble, {name: entry for name, entry in found.items() if id(entry) not in saved}, own)


def _check_whole(accelerator: Accelerator) -> None:
    kind = str(accelerator.distributed_type.value)
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise ValueError(
            f"every replica must hold a whole model, got {kind}; use Accelerate's data-parallel mode, which wraps the "
            "model in DistributedDataParallel"
        )
