"""Uneven data: a replica whose data have ended goes along with the others, through torch's join protocol."""

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

from hdet.replicas import LostReplicaError, Replicas


class _Follow(JoinHook):
    def __init__(self, follow: Callable[[], None]) -> None:
        self.main_hook = follow  # type: ignore[method-assign]


class Follower(Joinable):
    """Calls `follow` for each step that others take after this replica's data have ended."""

    def __init__(self, follow: Callable[[], None], device: torch.device, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._follow, self._device, self._group = follow, device, group

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What torch calls."""
        return _Follow(self._follow)

    @property
    def join_device(self) -> torch.device:
        """Where torch counts who is left."""
        return self._device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """Among whom."""
        return self._group


@contextmanager
def joined(model: nn.Module | None, follow: Callable[[], None]) -> Iterator[None]:
    """torch's join context for a model whose gradients are shared: DDP goes along, then `follow` is called.

    Nothing for replicas in one process, which see when one of them has returned.

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
            "join() needs model=, wrapped in DistributedDataParallel, to go along with its shared gradients; give it "
            'to the ensemble, or use gradients="local"'
        )
    ddp = wrapped[0]
    try:
        with Join([ddp, Follower(follow, ddp.join_device, ddp.join_process_group)]):
            yield
    finally:
        # or each later step would count who is left
        ddp._join_config = _JoinConfig.construct_disabled_join_config()  # type: ignore[no-untyped-call]


def wrappers(model: nn.Module | None) -> list[DistributedDataParallel]:
    """Those in a model that share its gradients."""
    return [] if model is None else [m for m in model.modules() if isinstance(m, DistributedDataParallel)]


class Joining:
    """Whether the replicas may run out of data at different steps, and whether this one has.

    Attributes:
        open: within `join()`, as long as somebody trains.
        ended: this replica has no more data.
    """

    def __init__(self) -> None:
        self.open = self.ended = False
        self._stepped_at = 0.0

    def note_step(self) -> None:
        """This replica has taken a step, and waits for the others from now on."""
        if self.open:
            self._stepped_at = time.monotonic()

    @contextmanager
    def within(self, replicas: Replicas, model: nn.Module | None = None) -> Iterator[None]:
        """Around the loop over `model`. An error in a collective becomes one that says who is missing."""
        self.open = True
        self.note_step()
        try:
            yield
        except LostReplicaError:
            raise
        except Exception as error:
            found = replicas.explain(error, self._stepped_at, wrappers(model))
            if found is None:
                raise
            raise found from error
        finally:
            self.open = self.ended = False
