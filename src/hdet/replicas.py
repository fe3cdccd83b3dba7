"""Who the replicas are, and the only place that talks to the other ones.

Collectives run on a process group of our own, made when the first one is needed, so that they can never be
mixed up with those of DDP or of a data loader.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from hdet.board import Board


class Replicas:
    """The data-parallel replicas of one model, seen from one of them: the ranks of a process group.

    Attributes:
        rank: which replica this is, 0 to size - 1.
        size: how many there are; 1 where torch.distributed is not initialised.
        wrapping_broadcasts: whether wrapping a model to share gradients gives all replicas the first one's weights.
    """

    wrapping_broadcasts = True

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.rank = 0
        self.size = 1
        self._parent = process_group
        self._own: dist.ProcessGroup | None = None
        if dist.is_available() and dist.is_initialized():
            self.rank = dist.get_rank(process_group)
            self.size = dist.get_world_size(process_group)
            if self.rank < 0:
                raise ValueError("process_group must contain this rank; give each rank the group that it is in")

    def settle(self, mine: str, decide: Callable[[list[str]], str]) -> str:
        """Show `mine` to the first replica, which decides from everybody's; its decision. Through the store.

        Not a collective, so that replicas which wait in vain can say for whom.

        Raises:
            MissingError: if some replicas do not come within the group's timeout.
        """
        board = self._board()
        return decide([mine] * self.size) if board is None else board.settle(mine, decide)

    def gather(self, values: Tensor) -> list[list[float]]:
        """Every replica's float64 vector `values`, by replica: one collective, one read from the device."""
        if self.size == 1:
            return [values.tolist()]
        everyone = values.new_empty(self.size, values.numel())
        dist.all_gather(list(everyone.unbind()), values, group=self._group())
        return everyone.tolist()

    def start_mean(self, flat: Tensor) -> dist.Work | None:
        """Begin to replace `flat`, a contiguous tensor, by its mean over the replicas; done when the work is."""
        if self.size == 1:
            return None
        flat.div_(self.size)  # before the sum, which could overflow
        work: dist.Work = dist.all_reduce(flat, group=self._group(), async_op=True)
        return work

    def broadcast(self, flat: Tensor) -> None:
        """Replace `flat`, a contiguous tensor, by the first replica's."""
        if self.size > 1:
            dist.broadcast(flat, group=self._group(), group_src=0)

    def gather_into(self, everyone: Tensor, mine: Tensor) -> None:
        """Fill the contiguous `everyone` with every replica's `mine`, one after another, bit for bit.

        `mine` has the same size on all replicas. It travels as bytes: NCCL does not know every dtype.
        """
        if self.size == 1:
            everyone.copy_(mine)
            return
        dist.all_gather_into_tensor(everyone.view(torch.uint8), mine.view(torch.uint8), group=self._group())

    def close(self) -> None:
        """Give back the process group, if one was made. Not a collective."""
        if self._own is not None and dist.is_initialized():
            dist.destroy_process_group(self._own)
        self._own = None

    def _board(self) -> Board | None:
        """Where the replicas leave notes; None in a dry run on a fake group, where there is nobody else."""
        parent = self._parent or dist.group.WORLD
        return None if parent is None or dist.get_backend(parent) == "fake" else Board(parent)

    def _group(self) -> dist.ProcessGroup:
        if self._own is None:
            if self._parent is None:
                self._own = dist.new_group()
            else:
                ranks: Sequence[int] = dist.get_process_group_ranks(self._parent)
                self._own = dist.new_group(list(ranks), use_local_synchronization=True)
        assert self._own is not None
        return self._own


_here = threading.local()


def find_replicas(process_group: dist.ProcessGroup | None = None) -> Replicas:
    """The replicas that the caller is one of: those of `hdet.in_process`, or the ranks of the process group."""
    seat: Replicas | None = getattr(_here, "seat", None)
    return Replicas(process_group) if seat is None or process_group is not None else seat


@contextmanager
def seated(replicas: Replicas) -> Iterator[None]:
    """Within it `find_replicas()` finds `replicas`, in this thread."""
    _here.seat = replicas
    try:
        yield
    finally:
        _here.seat = None


def collective_device(tensors: Sequence[Tensor]) -> torch.device:
    """Where small vectors must live to be gathered beside `tensors`."""
    return tensors[0].device if tensors else torch.device("cpu")
