"""Uneven data: a replica whose data have ended follows the others and is left out of the averages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig
from torch.nn.parallel import DistributedDataParallel

from hdet._phases.phase import Phase, Round
from hdet._probe.score import Loss
from hdet._replicas import LostReplicaError
from hdet._replicas.store import who
from hdet._run.run import Data, Run


class UnevenData(Phase):
    """Tracks which replicas are out of data, and the step of the others."""

    name = "uneven data"

    def __init__(self, run: Run) -> None:
        self._run = run
        self._stepped_at = 0.0

    def step(self, loss: Loss | None) -> None:
        if self._run.data is not Data.EVEN:  # from now on this replica waits for the others
            self._stepped_at = time.monotonic()

    def tell(self, rnd: Round) -> None:
        rnd.gone = self._run.data is Data.ENDED
        rnd.tell(self.name, [rnd.gone, rnd.step, rnd.full])

    def hear(self, rnd: Round) -> None:
        rows = rnd.heard(self.name)
        rnd.ended = tuple(rank for rank, (gone, _, _) in enumerate(rows) if gone)
        if rnd.gone:
            rnd.full = bool(rnd.present) and all(rows[rank][2] for rank in rnd.present)

    def decide(self, rnd: Round) -> None:
        if not rnd.compares:
            return
        if rnd.gone:  # catch up with the others
            steps = [int(step) for _, step, _ in rnd.heard(self.name)]
            step = max(steps[rank] for rank in rnd.present or range(rnd.replicas))
            self._run.rounds.catch_up(step)
            rnd.steps, rnd.step = rnd.steps + step - rnd.step, step
        if not rnd.present:
            self._run.note_data(Data.EVEN)

    def after(self, rnd: Round) -> None:
        if rnd.ended:
            text = f"{who(rnd.ended)} had no more data before step {rnd.step} and got the average of the others"
            rnd.events.append(text)

    def undone(self, rnd: Round) -> None:
        self.after(rnd)

    @contextmanager
    def within(self, model: nn.Module | None = None) -> Iterator[None]:
        """Wrap the loop over `model`. An error in a collective becomes one that names the missing replicas."""
        self._run.note_data(Data.UNEVEN)
        self.step(None)
        try:
            yield
        except LostReplicaError:
            raise
        except Exception as error:
            found = self._run.replicas.explain(error, self._stepped_at, wrappers(model))
            if found is None:
                raise
            raise found from error
        finally:
            self._run.note_data(Data.EVEN)


class _Follow(JoinHook):
    def __init__(self, follow: Callable[[], None]) -> None:
        self.main_hook = follow  # type: ignore[method-assign]


class _Follower(Joinable):
    """Calls `follow` for each step that the others take after this replica's data have ended."""

    def __init__(self, follow: Callable[[], None], device: torch.device, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._follow, self._device, self._group = follow, device, group

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return _Follow(self._follow)

    @property
    def join_device(self) -> torch.device:
        return self._device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self._group


@contextmanager
def joined(model: nn.Module | None, follow: Callable[[], None]) -> Iterator[None]:
    """torch's join context for a model with shared gradients: DDP shadows the others, then `follow` is called.

    Does nothing for replicas in one process, which notice when one of them has returned.

    Raises:
        ValueError: if there is no DistributedDataParallel in the model.
    """
    modules = [] if model is None else list(model.modules())
    if any(getattr(m, "shares_gradients", False) for m in modules):
        yield
        return
    wrapped = wrappers(model)
    if len(wrapped) != 1:
        raise ValueError(
            "join() needs model=, wrapped in DistributedDataParallel, to take part in its shared gradients; give it "
            'to the ensemble, or use gradients="local"'
        )
    ddp = wrapped[0]
    try:
        with Join([ddp, _Follower(follow, ddp.join_device, ddp.join_process_group)]):
            yield
    finally:
        # otherwise each later step would count the remaining replicas
        ddp._join_config = _JoinConfig.construct_disabled_join_config()  # type: ignore[no-untyped-call]


def wrappers(model: nn.Module | None) -> list[DistributedDataParallel]:
    """The DDP wrappers in a model that share its gradients."""
    return [] if model is None else [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
