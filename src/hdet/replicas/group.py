"""Who the replicas are, and the only place that talks to the other ones.

Collectives run on a process group of our own, made when the first one is needed, so that they can never be
mixed up with those of DDP or of a data loader.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hdet.board import Board, group_timeout, who

_ROLL_CALL = 0.7  # seconds for everybody who is alive to say so


class LostReplicaError(RuntimeError):
    """A replica is dead or stalled, or has come to another place than the others; the message names it.

    Attributes:
        ranks: which.
    """

    def __init__(self, text: str, ranks: Sequence[int]) -> None:
        super().__init__(text)
        self.ranks = list(ranks)

    def and_then(self, text: str) -> LostReplicaError:
        """The same error with something to add."""
        return LostReplicaError(f"{self}; {text}", self.ranks)


class Travelling:
    """A collective that is under way."""

    def __init__(self, work: dist.Work, replicas: Replicas) -> None:
        self._work, self._replicas = work, replicas

    def wait(self) -> None:
        """Return when it is done; raise as the collective itself would."""
        with self._replicas._named():
            self._work.wait()


class Replicas:
    """The data-parallel replicas of one model, seen from one of them: the ranks of a process group.

    Attributes:
        rank: which replica this is, 0 to size - 1.
        size: how many there are; 1 where torch.distributed is not initialised.
        group: their process group; None for all ranks.
        wrapping_broadcasts: whether wrapping a model to share gradients gives all replicas the first one's weights.
        device: where small vectors live if there is no tensor to go by.
        noun: what those are that `settle` and errors count.
    """

    wrapping_broadcasts = True
    noun = "replica"
    device = torch.device("cpu")

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.rank = 0
        self.size = 1
        self.group = process_group
        self._own: dist.ProcessGroup | None = None
        self._notes: Board | None = None
        self._failed = False
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

    def arrive(self, place: str) -> None:
        """Leave word of where this replica is, before a collective that others may wait for it at."""
        if self._notes is None and self.size > 1:
            self._notes = self._board()
        if self._notes is not None:
            with suppress(RuntimeError):  # the store is gone: the collective that follows says so
                self._notes.write("at", place)

    def explain(self, error: Exception, began: float) -> LostReplicaError | None:
        """Who is dead, stalled or elsewhere, now that `error` was raised while talking to the others; None if nobody.

        An error of another kind is left for the others to read. Otherwise those who are still there say so, which can
        take until they have met the error too: at the group's timeout after they `began` to wait.
        """
        if self._notes is None:
            return None
        self._failed = True
        try:
            return self._roll_call(self._notes, error, began)
        except RuntimeError:
            return LostReplicaError("the store is gone, with the process that serves it: rank 0's, or torchrun's", [0])

    def _roll_call(self, notes: Board, error: Exception, began: float) -> LostReplicaError | None:
        if not _is_of_a_collective(error):
            notes.write("failed", f"raised {type(error).__name__}: {error}")
            return None
        notes.write("failed", "")
        failed, places = notes.read("failed", wait=_ROLL_CALL), notes.read("at")
        mine = places[self.rank]
        elsewhere = [rank for rank, place in enumerate(places) if place != mine]
        if not any(failed) and not any(failed[rank] is None for rank in elsewhere):  # nobody to blame yet
            left = began + notes.timeout + _ROLL_CALL - time.monotonic()
            failed = notes.read("failed", wait=max(left, 0.0))
        raised = [rank for rank, note in enumerate(failed) if note]
        silent = [rank for rank, note in enumerate(failed) if note is None]
        told = next((note for rank, note in enumerate(notes.read("lost")) if note and rank != self.rank), None)
        if told is not None and not silent and not raised:  # this is the one that the others have waited for
            return LostReplicaError(f"{told}; this replica came too late", [self.rank])
        lost = raised or [rank for rank in silent if rank in elsewhere] or silent or elsewhere
        if not lost:
            return None
        text = "; ".join(f"{who([rank])} {failed[rank] or _last_seen(places[rank], mine)}" for rank in lost)
        notes.write("lost", text)
        return LostReplicaError(text, lost)

    @property
    def sharded(self) -> bool:
        """Whether a replica is several ranks."""
        return self.ranks is not self

    @property
    def ranks(self) -> Replicas:
        """Everybody who holds something of the run: the replicas themselves, or all parts of sharded ones."""
        return self

    def all_true(self, mine: bool) -> bool:
        """Whether this holds for every part of the replicas; `mine` where none of them is sharded: all hold the same.

        A collective of replicas that are sharded, and of no others.
        """
        return mine

    def gather(self, values: Tensor) -> list[list[float]]:
        """Every replica's float64 vector `values`, by replica: one collective, one read from the device."""
        if self.size == 1:
            return [values.tolist()]
        everyone = values.new_empty(self.size, values.numel())
        with self._named():
            dist.all_gather(list(everyone.unbind()), values, group=self._group())
            return everyone.tolist()

    def start_mean(self, flat: Tensor, of: Sequence[int] | None = None) -> Travelling | None:
        """Begin to replace `flat`, a contiguous tensor, by its mean over the replicas; done when `wait()` returns.

        Args:
            flat: what this replica has.
            of: the replicas that count; by default all. The others get the mean too.
        """
        if self.size == 1:
            return None
        weigh(flat, self.rank, range(self.size) if of is None else of)
        with self._named():
            return Travelling(dist.all_reduce(flat, group=self._group(), async_op=True), self)

    def broadcast(self, flat: Tensor, source: int = 0) -> None:
        """Replace `flat`, a contiguous tensor, by that of replica `source`."""
        if self.size > 1:
            with self._named():
                dist.broadcast(flat, group=self._group(), group_src=source)

    def gather_into(self, everyone: Tensor, mine: Tensor) -> None:
        """Fill the contiguous `everyone` with every replica's `mine`, one after another, bit for bit.

        `mine` has the same size on all replicas. It travels as bytes: NCCL does not know every dtype.
        """
        if self.size == 1:
            everyone.copy_(mine)
            return
        # The older name warns where there is the newer one.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        with self._named():
            all_gather(everyone.view(torch.uint8), mine.view(torch.uint8), group=self._group())

    def close(self) -> None:
        """Give back the process group, if one was made. Not a collective."""
        if self._own is not None and dist.is_initialized():
            if self.group is None:
                dist.destroy_process_group(self._own)
            else:
                _idle.setdefault(self.group, []).append(self._own)
        if self._notes is not None and dist.is_initialized() and not self._failed:  # others read why, later
            self._notes.close()
        self._own = self._notes = None

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Around a collective: if it fails, the error says because of whom."""
        began = time.monotonic()
        try:
            yield
        except LostReplicaError:
            raise
        except RuntimeError as error:
            found = self.explain(error, began)
            if found is None:
                raise
            raise found from error

    def _board(self) -> Board | None:
        """Where the replicas leave notes; None in a dry run on a fake group, where there is nobody else."""
        parent = self.group or dist.group.WORLD
        return None if parent is None or dist.get_backend(parent) == "fake" else Board(parent)

    def _group(self) -> dist.ProcessGroup:
        if self._own is None:
            parent = self.group or dist.group.WORLD
            assert parent is not None
            timeout = timedelta(seconds=group_timeout(parent))
            if self.group is None:
                self._own = dist.new_group(timeout=timeout)
            elif _idle.get(self.group):
                self._own = _idle[self.group].pop()
            else:
                ranks: Sequence[int] = dist.get_process_group_ranks(self.group)
                self._own = dist.new_group(list(ranks), timeout, use_local_synchronization=True)
        assert self._own is not None
        return self._own


# Groups of our own, by the group that they are made of. If one were destroyed, torch would give its name to the next
# one of the same ranks, which would then wait for the addresses that it finds under that name.
_idle: dict[dist.ProcessGroup, list[dist.ProcessGroup]] = {}


def weigh(flat: Tensor, rank: int, of: Sequence[int]) -> None:
    """Make the sum over all replicas the mean over those in `of`: before it, which could overflow."""
    if rank in of:
        flat.div_(len(of))
    else:
        flat.zero_()  # not times 0: it may not be finite


def _is_of_a_collective(error: Exception) -> bool:
    """Whether an error comes from torch's communication: its own classes, or gloo's, which are plain RuntimeErrors."""
    words = ("gloo", "NCCL", "Connection closed", "Connection reset", "Timed out waiting", "Wait timeout")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def _last_seen(place: str | None, mine: str | None) -> str:
    if place is None:
        return f"was never seen, while this one is at {mine}"
    if place == mine:
        return f"died or stalled after {mine}"
    return f"was last seen at {place}, while this one is at {mine}"


def collective_device(tensors: Sequence[Tensor]) -> torch.device:
    """Where small vectors must live to be gathered beside `tensors`."""
    return tensors[0].device if tensors else torch.device("cpu")
