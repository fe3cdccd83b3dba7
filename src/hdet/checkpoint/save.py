"""`save()`: all replicas write one checkpoint together, completely or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from hdet._arguments import check_count
from hdet._replicas import Replicas, Where, collective_device
from hdet._user_warning import warn
from hdet.checkpoint import entries as contents
from hdet.checkpoint import folder, in_use, random_state
from hdet.checkpoint.ensemble_state import losses_of, without_common
from hdet.checkpoint.exchange import come_to, replicas_of, together
from hdet.ensemble import Ensemble


def save(
    path: str | os.PathLike[str],
    entries: Mapping[str, Any],
    *,
    own: Mapping[str, Any] | None = None,
    step: int | None = None,
    keep: int = 3,
    replicas: Where | None = None,
) -> Path:
    """Write a checkpoint of the run to a new folder in `path`. Collective: every replica calls it, between steps.

    At a round's end the first replica writes one state for all, and every replica its random numbers. In mid-round, and
    always with `hdet.Averaging(state=False)`, every replica writes its own state, so that `load()` resumes bit for bit.
    A rename publishes the checkpoint once all of it is on disk: a kill at any moment leaves it complete or absent, and
    older checkpoints intact.

    Args:
        path: one run's folder, shared by all replicas.
        entries: objects to save, by name: modules, optimizers, schedulers, the ensemble, anything with `state_dict()`
            and `load_state_dict()`, lists of these, tensors, and plain values (numbers, strings, lists, dicts). They
            must be equal on all replicas, except where an ensemble lets replicas differ in mid-round.
        own: entries that differ between replicas even at a round's end, such as the position in the data. They are not
            restored on another number of replicas.
        step: optimizer steps taken; by default the ensemble's count.
        keep: number of newest checkpoints to keep.
        replicas: a process group or a device mesh; by default the ensemble's, or all ranks.

    Returns:
        The folder of the checkpoint.

    Raises:
        ValueError: for entries that could not be loaded again, and for replicas that save different things.
        RuntimeError: if any replica could not write (a full disk): the same on all of them. Older checkpoints stay
            intact.
    """
    found, mine = contents.flatten("entries", entries), contents.flatten("own", own or {})
    ensemble = contents.find_ensemble(found)
    device = collective_device(contents.tensors_of(found))
    with replicas_of(ensemble, replicas) as everyone:
        come_to("hdet.save", everyone)
        writer = _Writer(everyone, device, Path(path), found, mine, ensemble)
        writer.check(step, keep)
        written = writer.write(keep)
    if ensemble is not None:
        ensemble.last_checkpoint = str(written)
    return written


class _Writer:
    """One replica's part in one checkpoint."""

    def __init__(
        self,
        replicas: Replicas,
        device: torch.device,
        path: Path,
        found: Mapping[str, Any],
        own: Mapping[str, Any],
        ensemble: Ensemble | None,
    ) -> None:
        self._replicas, self._device, self._path, self._ensemble = replicas, device, path, ensemble
        self._found, self._own = found, own
        self._mid_round = ensemble is not None and (ensemble.replicas_differ or ensemble.holds_parts)
        self._step = 0
        self._failed = f"the checkpoint in {path} was not saved"
        self._files: dict[str, Any] = {}

    def check(self, step: int | None, keep: int) -> None:
        """Collect the state to write and compare its description with the other replicas'."""
        about = self._together(lambda: self._collect(step, keep))
        for replica, theirs in enumerate(about):
            if theirs != about[0]:
                odd = next(key for key in about[0] if theirs[key] != about[0][key])
                raise ValueError(
                    f"{self._failed}: {odd} is {theirs[odd]} on replica {replica}, {about[0][odd]} on replica 0; the "
                    "replicas of a run must save together, at the same step and with the same entries"
                )

    def write(self, keep: int) -> Path:
        """Write everything to disk and return the folder of the checkpoint."""
        first = self._replicas.rank == 0
        temporary: Path | None = None
        if first and self._ensemble is not None:
            self._ensemble.at_end(in_use.let_go)
        try:
            names = self._together(lambda: self._begin() if first else "")
            temporary = self._path / names[0]
            written = self._together(lambda: self._write_files(self._path / names[0]))
            files = {name: tuple(about) for part in written for name, about in part.items()}
            manifest = folder.Manifest(self._step, self._replicas.size, self._mid_round, files)
            final = self._together(lambda: folder.publish(self._path / names[0], manifest).name if first else "")
        except Exception:
            if first and temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        finally:
            if self._ensemble is None or self._ensemble.closed or self._ensemble.progress["finished"]:
                in_use.let_go(self._owner())
        if first:
            _prune(self._path, keep)
        return self._path / str(final[0])

    def _begin(self) -> str:
        return folder.begin(self._path, self._owner(), lone=self._ensemble is None).name

    def _owner(self) -> object:
        """The run's owner, which holds the folder until the run ends or saves elsewhere."""
        return self if self._ensemble is None else self._ensemble

    def _collect(self, step: int | None, keep: int) -> dict[str, Any]:
        """Fill `_files`, and return the values that must be equal on all replicas."""
        check_count("keep", keep, unit="checkpoints")
        both = sorted(self._found.keys() & self._own.keys())
        if both:
            raise ValueError(f"own must have other names than entries, got {both} in both")
        if step is None:
            if self._ensemble is None:
                raise ValueError("step must be given if there is no ensemble to count the steps; write step=step")
            step = self._ensemble.progress["step"]
        check_count("step", step, least=0)
        self._step = step
        names = contents.names_of(self._found)
        with nullcontext() if self._ensemble is None else self._ensemble.saving():
            own = {name: contents.take(name, entry, names) for name, entry in self._own.items()}
            taken = {}
            if self._mid_round or self._replicas.rank == 0:
                taken = {name: contents.take(name, entry, names) for name, entry in self._found.items()}
            state = {"own": own, "random": random_state.take(), "losses": self._losses()}
        if self._mid_round:
            state["entries"] = self._without_common(taken)
        elif self._replicas.rank == 0:
            self._files[folder.SHARED] = {"entries": taken}
        self._files[folder.own_file(self._replicas.rank)] = state
        kinds = {name: contents.kind_of(entry) for name, entry in self._found.items()}
        return {"the step": step, "being in mid-round": self._mid_round, "the entries": kinds, "own": sorted(self._own)}

    def _without_common(self, taken: dict[str, Any]) -> dict[str, Any]:
        """The entries of mid-round without the common part, which the first replica writes."""
        common: dict[str, Any] = {}
        for name, entry in self._found.items():
            ensemble = contents.ensemble_of(entry)
            if ensemble is not None and not ensemble.holds_parts:
                taken[name], common[name] = without_common(taken[name])
        if self._replicas.rank == 0 and any(common.values()):
            self._files[folder.SHARED] = {"common": common}
        return taken

    def _losses(self) -> dict[str, Any]:
        """By entry, the losses of the current round while all replicas hold the same weights."""
        ensembles = {name: contents.ensemble_of(entry) for name, entry in self._found.items()}
        if self._mid_round or self._ensemble is None or not self._ensemble.progress["step_in_round"]:
            return {}
        return {name: losses_of(ensemble) for name, ensemble in ensembles.items() if ensemble is not None}

    def _write_files(self, temporary: Path) -> dict[str, tuple[int, str]]:
        if not temporary.is_dir():
            raise RuntimeError(f"{temporary} is not visible here; path must be on a file system shared by all replicas")
        return {name: folder.write(temporary / name, state) for name, state in self._files.items()}

    def _together(self, work: Any) -> list[Any]:
        return together(self._replicas, self._device, self._failed, work)


def _prune(path: Path, keep: int) -> None:
    try:
        folder.prune(path, keep)
    except OSError as error:  # the new checkpoint is safe
        warn(f"old checkpoints in {path} could not be removed: {error}")
