"""The replicas, and the only module that communicates with the others.

Collectives run on a process group of our own, created when first needed, so they cannot mix with those of DDP or of a
data loader.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hdet._replicas.lookout import Lookout, lookout_of
from hdet._replicas.notes import LostReplicaError
from hdet._replicas.store import group_timeout


class Travelling:
    """A collective that is under way."""

    def __init__(self, work: dist.Work, replicas: Replicas, device: torch.device) -> None:
        self._work, self._replicas, self._device = work, replicas, device

    def wait(self) -> None:
        """Return when it is done; raise as the collective itself would."""
        with self._replicas._named():
            self._replicas._wait(self._work, self._device)


NOT_IN_IT = "replicas must be a group that contains this rank; give each rank the group that it is in"


class Replicas:
    """The data-parallel replicas of one model, seen from one of them: the ranks of a process group.

    Attributes:
        rank: which replica this is, 0 to size - 1.
        size: number of replicas; 1 if torch.distributed is not initialised.
        group: their process group; None for all ranks.
        wrapping_broadcasts: whether wrapping a model to share gradients gives all replicas the first one's weights.
        device: device of small vectors if there is no tensor to go by.
        noun: what `settle` and errors count: replicas or ranks.
    """

    wrapping_broadcasts = True
    noun = "replica"
    device = torch.device("cpu")

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.rank = 0
        self.size = 1
        self.group = process_group
        self._own: dist.ProcessGroup | None = None
        self._seen: Lookout | None = None
        if dist.is_available() and dist.is_initialized():
            self.rank = dist.get_rank(process_group)
            self.size = dist.get_world_size(process_group)
            if self.rank < 0:
                raise ValueError(NOT_IN_IT)

    def settle(self, mine: str, decide: Callable[[list[str]], str]) -> str:
        """Send `mine` to the first replica through the store; it decides from all, and every replica gets the decision.

        Not a collective, so that a replica that waits in vain can name the missing ones.

        Raises:
            MissingError: if some replicas do not come within the group's timeout.
        """
        lookout = self.lookout()
        return decide([mine] * self.size) if lookout is None else lookout.settle(mine, decide)

    def part(self, readers: int | None = None) -> None:
        """Before all fail with the same error: the process that serves the store waits until the others have read it.

        Args:
            readers: number of replicas that must read it; by default all.
        """
        lookout = self.lookout()
        if lookout is not None:
            lookout.part(lookout.board.size if readers is None else readers)

    def arrive(self, place: str, call: str | None = None) -> None:
        """Leave word of where this replica is, before others may wait for it there; see `Lookout.arrive`."""
        lookout = self.lookout()
        if lookout is not None:
            lookout.arrive(place, call)

    def last_seen(self, ranks: Sequence[int]) -> str:
        """Where these replicas were last seen, in words; empty if they were not."""
        lookout = self.lookout()
        return "" if lookout is None else lookout.last_seen(ranks)

    def explain(
        self, error: Exception, began: float, wrappers: Sequence[DistributedDataParallel] = ()
    ) -> LostReplicaError | None:
        """Find who is dead, stalled or elsewhere after `error` in communication; None if no replica is.

        Any other error is left for the others to read. For a communication error the remaining replicas report, which
        may take until they fail too: the group's timeout after they `began` to wait. Replicas that wait for one another
        in `wrappers` are made to fail now.
        """
        lookout = self.lookout()
        return None if lookout is None else lookout.explain(error, began, wrappers)

    @property
    def sharded(self) -> bool:
        """Whether a replica is several ranks."""
        return self.ranks is not self

    @property
    def ranks(self) -> Replicas:
        """All ranks that hold part of the run: the replicas themselves, or all parts of sharded ones."""
        return self

    def all_true(self, mine: bool) -> bool:
        """Whether `mine` is true on every part of sharded replicas; otherwise `mine`, which is equal on all.

        A collective of replicas that are sharded, and of no others.
        """
        return mine

    def gather(self, values: Tensor) -> list[list[float]]:
        """Every replica's float64 vector `values`, by replica: one collective, one read from the device."""
        if self.size == 1:
            return [values.tolist()]
        everyone = values.new_empty(self.size, values.numel())
        with self._named():
            work = dist.all_gather(list(everyone.unbind()), values, group=self._group(), async_op=True)
            self._wait(work, values.device, read=True)
            return everyone.tolist()

    def start_mean(self, flat: Tensor, of: Sequence[int] | None = None) -> Travelling | None:
        """Start replacing `flat`, a contiguous tensor, by its mean over the replicas; done when `wait()` returns.

        Args:
            flat: this replica's values.
            of: the replicas that count; by default all. The others get the mean too.
        """
        if self.size == 1:
            return None
        weigh(flat, self.rank, range(self.size) if of is None else of)
        with self._named():
            return Travelling(dist.all_reduce(flat, group=self._group(), async_op=True), self, flat.device)

    def broadcast(self, flat: Tensor, source: int = 0) -> None:
        """Replace `flat`, a contiguous tensor, by that of replica `source`."""
        if self.size > 1:
            with self._named():
                self._wait(dist.broadcast(flat, group=self._group(), group_src=source, async_op=True), flat.device)

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
            group = self._group()
            work = all_gather(everyone.view(torch.uint8), mine.view(torch.uint8), group=group, async_op=True)
            self._wait(work, mine.device)

    def close(self) -> None:
        """Release the process group, if one was created. Not a collective."""
        if self._own is not None and dist.is_initialized():
            if self.group is None:
                dist.destroy_process_group(self._own)
            else:
                _idle.setdefault(self.group, []).append(self._own)
        self._own = self._seen = None

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Wrap a collective: if it fails, the error names the replica at fault."""
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

    def _wait(self, work: dist.Work, device: torch.device, *, read: bool = False) -> None:
        """Wait for a collective; if that blocks the caller, check meanwhile whether all replicas can come.

        It always blocks with gloo, and with other backends if the result is `read` from the device at once.
        """
        lookout = self.lookout()
        if lookout is not None and self._group()._get_backend(device).name() == "gloo":
            lookout.wait(work)
        else:
            if lookout is not None and read:
                lookout.outlast(work)
            work.wait()

    def lookout(self) -> Lookout | None:
        """The replicas' knowledge of each other; None in a dry run on a fake group, which has no other replica."""
        if self._seen is None and self.size > 1:
            parent = self.group or dist.group.WORLD
            self._seen = None if parent is None or dist.get_backend(parent) == "fake" else lookout_of(parent)
        return self._seen

    def _await_all(self) -> None:
        """Wait for all before creating a process group: during creation no one can check who is missing."""
        lookout = self.lookout()
        if lookout is not None:
            lookout.gather()

    def _group(self) -> dist.ProcessGroup:
        if self._own is None:
            parent = self.group or dist.group.WORLD
            assert parent is not None
            timeout = timedelta(seconds=group_timeout(parent))
            if self.group is None:
                self._await_all()
                self._own = dist.new_group(timeout=timeout)
            elif _idle.get(self.group):
                self._own = _idle[self.group].pop()
            else:
                self._await_all()
                ranks: Sequence[int] = dist.get_process_group_ranks(self.group)
                self._own = dist.new_group(list(ranks), timeout, use_local_synchronization=True)
        assert self._own is not None
        return self._own


# Our own groups, by the group that they are made from. If one were destroyed, torch would reuse its name for the next
# group of the same ranks, which would then wait for the stale addresses under that name.
_idle: dict[dist.ProcessGroup, list[dist.ProcessGroup]] = {}


def weigh(flat: Tensor, rank: int, of: Sequence[int]) -> None:
    """Make the sum over all replicas the mean over those in `of`: before it, which could overflow."""
    if rank in of:
        flat.div_(len(of))
    else:
        flat.zero_()  # not times 0: it may not be finite


def collective_device(tensors: Sequence[Tensor]) -> torch.device:
    """The device on which small vectors must be to be gathered with `tensors`."""
    return tensors[0].device if tensors else torch.device("cpu")
