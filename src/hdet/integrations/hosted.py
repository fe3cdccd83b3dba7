"""What the callbacks share: an ensemble in a loop that belongs to another library."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from hdet._arguments import check_flag, check_names
from hdet._explore.hyperparameter import Hyperparameter
from hdet._find_lr.found_rate import FoundRate
from hdet._find_lr.no_rate import FindLRError
from hdet._find_lr.search import Search
from hdet._find_lr.workload import Workload
from hdet._hooks import unwrap
from hdet._options.averaging import Averaging
from hdet._replicas.agreement import Agreement, claim
from hdet._run.settings import instead
from hdet._user_warning import warn
from hdet.ensemble import Ensemble
from hdet.integrations.beside import Beside, trained_by
from hdet.records.record import RoundRecord, metrics

Hyperparameters = Sequence[Hyperparameter | Sequence[Hyperparameter]]
Given = Hyperparameters | Callable[[Any], Hyperparameters] | None
_OURS = ("self", "optimizer", "hyperparameters", "model")
SHORTEST = 100
"""Optimizer steps of a run below which a search does not pay."""
_INTERVAL = 100  # where nobody knows how long the run is, and "auto" has nothing to go by


class Hosted:
    """An ensemble that is made when the optimizers exist, and ends with the loop.

    Args:
        hyperparameters: what to explore, or a function that is given the optimizer (a list, if there are several) and
            returns it; by default one joint learning rate.
        options: the other arguments of `hdet.Ensemble`.
        finds: whether the learning rate is found before the first step.

    Attributes:
        ensemble: the ensemble, from the start of the loop on.
        found: what was found before the first step.
    """

    def __init__(self, hyperparameters: Given, options: Mapping[str, Any], finds: bool = False) -> None:
        _check_options(options)
        check_flag("find_lr", finds)
        self.ensemble: Ensemble | None = None
        self.found: FoundRate | None = None
        self.finds = finds
        self._hyperparameters, self._options = hyperparameters, dict(options)
        self._beside: Beside | None = None
        self._average: AbstractContextManager[None] | None = None

    @property
    def local(self) -> bool:
        """Whether replicas keep their gradients to themselves."""
        return bool(self._options.get("gradients") == "local")

    @property
    def total_steps(self) -> int | None:
        """What the user said."""
        steps: int | None = self._options.get("total_steps")
        return steps

    def wants_search(self, total_steps: int | None) -> bool:
        """Whether the learning rate is to be found: the user wants it, and the run is long enough for it to pay."""
        return self.finds and (total_steps is None or total_steps >= SHORTEST)

    def no_search(self, total_steps: int | None) -> str | None:
        """What to tell the user, once, where the search that they want is left out; None if there is nothing to say."""
        if not self.finds or self.wants_search(total_steps):
            return None
        return (
            f"hdet keeps the learning rate as it is: {total_steps} optimizer steps are fewer than {SHORTEST}, too few "
            "for a search to pay"
        )

    def search(
        self,
        model: nn.Module,
        optimizers: Sequence[Any],
        schedulers: Sequence[Any],
        make_work: Callable[[], Workload],
        total_steps: int | None,
        scheduler_steps: int | None = None,
        progress: bool = True,
    ) -> dict[str, float]:
        """Find the learning rate and let it take effect; collective, before `start()`.

        Where none is found the run keeps its own, with a warning.

        Args:
            model: as it is called in training.
            optimizers: those that step together.
            schedulers: theirs, in the same order; None for an optimizer without one.
            make_work: makes what is trained and scored; what it raises is raised on all replicas.
            total_steps: optimizer steps of the loop, if known.
            scheduler_steps: how often a scheduler steps in it; by default as often as the optimizer.
            progress: show a line on the terminal.

        Returns:
            What loggers are told.
        """
        inner = [unwrap(optimizer) for optimizer in optimizers]
        averaging: Averaging = self._options.get("averaging") or Averaging()
        where = self._options.get("replicas")
        self.found = None
        with Agreement("the search for the learning rate", where):
            work = make_work()
            search = Search(
                model, inner, work, total_steps, min(averaging.gain, 1.0), replicas=where, progress=progress
            )  # fmt: skip
            claim(search.claims({}))
        try:
            self.found = search.run()
        except FindLRError as error:
            warn(f"no learning rate was found, so the run keeps its own: {error}")
            return {}
        self.found.apply(inner, list(schedulers), steps=scheduler_steps)
        return {f"hdet/search/{name}": float(getattr(self.found, name)) for name in ("rate", "scale", "cost", "sure")}

    def start(
        self,
        optimizers: Sequence[Any],
        model: nn.Module,
        total_steps: int | None,
        log: Callable[[dict[str, float], RoundRecord], object],
    ) -> Ensemble:
        """Make the ensemble; a loop before this one has ended. All replicas, before the first step.

        Args:
            optimizers: those that step together.
            model: as it is called in training, in DistributedDataParallel.
            total_steps: optimizer steps of the loop, if known.
            log: called with the numbers of each round.
        """
        self.close()
        inner = [unwrap(optimizer) for optimizer in optimizers]
        given = self._hyperparameters
        if callable(given):
            given = given(inner[0] if len(inner) == 1 else inner)

        def tell(record: RoundRecord) -> None:
            numbers = metrics(dataclasses.replace(record, search=None))  # `search()` has told of it
            log({f"hdet/{name}": value for name, value in numbers.items()}, record)

        def own() -> dict[str, Any]:
            entries: dict[str, Any] = {f"optimizer.{number}": optimizer for number, optimizer in enumerate(inner)}
            entries |= {f"followers.{number}": follower for number, follower in enumerate(followers)}
            return {**trained_by(inner, "model", model), **entries}

        options = {**self._options, "total_steps": total_steps}
        if total_steps is None:
            options.setdefault("interval", _INTERVAL)
        options["on_round"] = [*options.get("on_round", ()), tell]
        averaging: Averaging | None = options.get("averaging")
        followers = () if averaging is None else averaging.followers
        self.ensemble = Ensemble(inner, given, model=model, **options)
        self.ensemble.found = self.found
        # Nobody can forget to call step() here, and one batch of a host may be many optimizer steps.
        self.ensemble.engine.run.values.fan_out.patience = math.inf
        self.ensemble.engine.run.rounds.warns_alone = False  # a host runs in one process too, and then only searches
        self._beside = Beside(self.ensemble, {"ensemble": self.ensemble}, own)
        return self.ensemble

    def finish(self) -> None:
        """The loop is over: average the replicas. Collective."""
        self.leave()
        if self.ensemble is not None and not self.ensemble.closed:
            self.ensemble.finish()

    def close(self) -> None:
        """Remove every hook. Not collective."""
        self.leave()
        if self.ensemble is not None and not self.ensemble.closed:
            self.ensemble.close()

    # The consensus

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Within it the model is the average of the replicas; as it is, where no loop is under way. Collective."""
        entered = self.enter()
        try:
            yield
        finally:
            if entered:
                self.leave()

    def enter(self) -> bool:
        """Swap the average in; False if that is done already, or there is nothing to average."""
        if self._average is not None or self.ensemble is None or self.ensemble.closed:
            return False
        average = self.ensemble.consensus()
        average.__enter__()
        self._average = average
        return True

    def leave(self) -> bool:
        """Give this replica its own weights back; False if it has them. Not collective."""
        average, self._average = self._average, None
        if average is None:
            return False
        average.__exit__(None, None, None)
        return True

    # Checkpoints

    def save(self, path: str | os.PathLike[str], step: int) -> None:
        """Write what the replicas need to go on exactly to a folder beside a checkpoint. Collective.

        Args:
            path: the folder.
            step: how the host counts its steps: what tells this state from one that was saved there before.
        """
        if self._beside is None or self.ensemble is None or self.ensemble.closed:
            return
        again = self.leave()
        try:
            self._beside.save(Path(path), step, keep=2)
        finally:
            if again:
                self.enter()

    def load(self, path: str | os.PathLike[str], step: int, taken: int) -> None:
        """Go on from `save()`; where there is no such state, from the average and with a new controller. Collective.

        Call it when the host has loaded its checkpoint: on as many replicas as had saved it each gets its own weights
        and random numbers back, and goes on as if it had never stopped.

        Args:
            path: the folder.
            step: as it was given to `save()`.
            taken: optimizer steps that were taken, where there is no state that says.
        """
        assert self.ensemble is not None
        assert self._beside is not None
        if not self._beside.load(Path(path), step):
            warn(
                f"there is no state of an ensemble at step {step} in {path}: the replicas go on from the weights in "
                "the checkpoint, with a new controller"
            )
            self.ensemble.start_from(taken)


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise for what `hdet.Ensemble` does not take, when the callback is made and not when training starts."""
    known = [name for name in inspect.signature(Ensemble.__init__).parameters if name not in _OURS]
    for name in options:
        if name in (*_OURS, "start_step"):
            raise TypeError(f"{name} is given by the trainer; leave it out")
    check_names("hdet.Ensemble", options, known, instead("{}={}"))
