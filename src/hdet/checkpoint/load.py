"""`load()`: resume from the newest checkpoint that every replica can verify, on any number of replicas."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hdet._replicas import Replicas, Where, collective_device
from hdet._tensors.restore import Generators
from hdet._user_warning import warn
from hdet.checkpoint import entries as contents
from hdet.checkpoint import folder, random_state
from hdet.checkpoint.ensemble_state import with_common, with_losses, without_common, without_replica
from hdet.checkpoint.exchange import come_to, exchange, replicas_of, together
from hdet.checkpoint.mean import mean


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint.

    Attributes:
        path: its folder.
        step: optimizer steps taken when it was saved.
        replicas: number of replicas that saved it.
        mid_round: whether each replica has its own state: it was saved in mid-round, or with
            `hdet.Averaging(state=False)`.
        exact: whether this replica continues exactly as the one that saved it; False on another number of replicas.
        values: the plain values among the entries, by name.
        notices: differences from the saved run, in words; each was a warning too.
    """

    path: Path
    step: int
    replicas: int
    mid_round: bool
    exact: bool
    values: Mapping[str, Any] = field(repr=False)
    notices: tuple[str, ...]


def load(
    path: str | os.PathLike[str],
    entries: Mapping[str, Any],
    *,
    own: Mapping[str, Any] | None = None,
    replicas: Where | None = None,
) -> Checkpoint | None:
    """Load the newest checkpoint in `path` that every replica can verify. Collective: every replica calls it.

    Call it after wrapping the model in DDP, which gives all replicas the first one's weights, and before the first
    step. Files must match their checksums and contain only tensors and plain values, so unpickling runs no code. Names,
    shapes and dtypes are compared before anything is copied: on a mismatch nothing changes.

    On the same number of replicas, each gets its own state and random numbers back and continues bit for bit. On
    another number, slots and random numbers start afresh, with a warning; from a checkpoint in mid-round all replicas
    get the mean, and the rest of that round is not judged.

    Args:
        path: the path given to `save()`, or one checkpoint in it to load only that one.
        entries: as in `save()`. Objects and tensors are loaded in place; plain values are in `Checkpoint.values`.
        own: as in `save()`; not loaded on another number of replicas.
        replicas: a process group or a device mesh; by default the ensemble's, or all ranks.

    Returns:
        The checkpoint; None if there is none, so that a script can start and resume with the same call.

    Raises:
        ValueError: if it does not fit the entries.
        RuntimeError: if there are checkpoints but none can be verified. Both are the same on every replica.
    """
    found, mine = contents.flatten("entries", entries), contents.flatten("own", own or {})
    ensemble = contents.find_ensemble(found)
    notices: list[str] = []
    with replicas_of(ensemble, replicas) as everyone, nullcontext() if ensemble is None else ensemble.saving():
        come_to("hdet.load", everyone)
        try:
            loaded = _Reader(everyone, Path(path), found, mine, notices).load()
        finally:
            torch.clear_autocast_cache()  # the caller's autocast keeps casts of the old weights until it ends
            for notice in notices:
                warn(notice)
    if ensemble is not None and loaded is not None:
        ensemble.last_checkpoint = str(loaded.path)
    return loaded


@dataclass
class _Content:
    """The contents of a checkpoint for this replica."""

    entries: dict[str, Any]
    own: dict[str, Any]
    random: dict[str, Any]


class _Reader:
    """One replica's part in loading."""

    def __init__(
        self, replicas: Replicas, path: Path, found: Mapping[str, Any], own: Mapping[str, Any], notices: list[str]
    ) -> None:
        self._replicas, self._path, self._found, self._own, self._notices = replicas, path, found, own, notices
        self._device: torch.device = collective_device(contents.tensors_of(found))

    def load(self) -> Checkpoint | None:
        failed = f"no checkpoint was loaded from {self._path}"
        listed = together(self._replicas, self._device, failed, self._list)
        wrong: list[str] = []
        for name in listed[0]:
            manifest, content, problems = self._read(self._path / name)
            if content is not None:
                return self._take(self._path / name, manifest, content)
            wrong += problems
            self._notices.append(f"a checkpoint cannot be verified, so the one before is taken: {'; '.join(problems)}")
        if wrong:
            raise RuntimeError(f"{failed}: none of {len(listed[0])} can be verified: {'; '.join(wrong)}")
        seeing = [replica for replica, names in enumerate(listed) if names]
        if seeing:
            raise RuntimeError(
                f"{failed}: replica {seeing[0]} sees checkpoints there, replica 0 does not; path must be on a file "
                "system that all replicas share"
            )
        return None

    def _list(self) -> list[str]:
        return [str(found.relative_to(self._path)) for found in folder.candidates(self._path)]

    def _read(self, path: Path) -> tuple[Any, _Content | None, list[str]]:
        """The contents of a checkpoint if every replica can verify its part; otherwise the problems."""
        manifest, content, problem = None, None, None
        try:
            manifest = folder.read_manifest(path)
            content = self._read_files(path, manifest)
        except folder.DamagedError as error:
            problem = str(error)
        except Exception as error:  # intact files, but not from save()
            problem = f"it is not a checkpoint of a run: {type(error).__name__}: {error}"
        everyone = exchange(self._replicas, problem, self._device)
        problems = [f"{path.name}, replica {r}: {text}" for r, text in enumerate(everyone) if text is not None]
        return manifest, None if problems else content, problems

    def _read_files(self, path: Path, manifest: folder.Manifest) -> _Content:
        same = manifest.replicas == self._replicas.size
        mine = folder.read(path, folder.own_file(self._replicas.rank if same else 0), manifest)
        if not manifest.mid_round:
            shared = folder.read(path, folder.SHARED, manifest)["entries"]
            entries = {**shared, **_with_losses(shared, mine["losses"])} if same else self._rank_free(shared)
        elif same:
            entries = _with_common(mine["entries"], path, manifest)
        else:
            files = (folder.own_file(replica) for replica in range(manifest.replicas))
            averaged = mean(self._without_parts(folder.read(path, file, manifest)["entries"]) for file in files)
            entries = self._rank_free(_with_common(averaged, path, manifest))
        return _Content(entries, mine["own"] if same else {}, mine["random"])

    def _without_parts(self, entries: dict[str, Any]) -> dict[str, Any]:
        """The entries that other ranks can use: parts of tensors are useless to them."""
        ensembles = {name: contents.ensemble_of(entry) for name, entry in self._found.items()}
        parts = {name for name, ensemble in ensembles.items() if ensemble is not None and ensemble.holds_parts}
        return {name: without_common(e)[0] if name in parts else e for name, e in entries.items()}

    def _rank_free(self, entries: dict[str, Any]) -> dict[str, Any]:
        ensembles = {name for name, entry in self._found.items() if contents.ensemble_of(entry) is not None}
        return {name: without_replica(e) if name in ensembles else e for name, e in entries.items()}

    def _take(self, path: Path, manifest: folder.Manifest, content: _Content) -> Checkpoint:
        """Check, then load, on all replicas or on none."""
        exact = manifest.replicas == self._replicas.size
        found = {**self._found, **(self._own if exact else {})}
        saved = {**content.entries, **content.own}
        failed = f"{path} was not loaded, and nothing has changed"
        together(self._replicas, self._device, f"{failed}; it does not fit", lambda: contents.check(found, saved))
        undo: list[tuple[Any, Any]] = []
        generators = Generators()

        def change() -> None:
            contents.put_objects(found, saved, undo)
            if exact:
                random_state.put(content.random)
            else:
                random_state.reseed(content.random, self._replicas.rank, self._replicas.size)

        try:
            together(self._replicas, self._device, failed, change)
        except Exception:
            contents.put_back(undo)
            generators.restore()
            raise
        contents.put_tensors(found, saved)
        if not exact:
            self._notices.append(self._notice(path, manifest))
        values = {name: entry["state"] for name, entry in saved.items() if entry["kind"] == "value"}
        notices = tuple(self._notices)
        return Checkpoint(path, manifest.step, manifest.replicas, manifest.mid_round, exact, values, notices)

    def _notice(self, path: Path, manifest: folder.Manifest) -> str:
        mean = "all of them start from the mean of the saved ones, and the rest of the round is not judged; "
        own = f"own entries {sorted(self._own)} are left as they are; " if self._own else ""
        return (
            f"{path} was saved by {manifest.replicas} replicas and is loaded by {self._replicas.size}: slots are dealt "
            f"again, {mean if manifest.mid_round else ''}{own}random numbers start afresh"
        )


def _with_common(entries: dict[str, Any], path: Path, manifest: folder.Manifest) -> dict[str, Any]:
    """The entries of mid-round, completed with the common part that was written once for all replicas."""
    if folder.SHARED not in manifest.files:
        return entries
    common = folder.read(path, folder.SHARED, manifest)["common"]
    return {**entries, **{name: with_common(entries[name], state) for name, state in common.items()}}


def _with_losses(entries: Mapping[str, Any], losses: Mapping[str, Any]) -> dict[str, Any]:
    return {name: with_losses(entries[name], of_round) for name, of_round in losses.items()}
