"""N replicas in one process, for notebooks, tests and machines with fewer cores than replicas.

Each replica is a thread, and one runs at a time: it continues until it needs the others, then the next one takes its
turn. So runs are reproducible, and every replica has its own torch generator state, as in its own process.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from hdet._hooks import WeakHook
from hdet._replicas import Replicas, find_replicas, seated, weigh
from hdet._tensors.converge import average

T = TypeVar("T")
_NEED_A_GROUP = ("torch.distributed", "torch.nn.parallel")  # modules that raise without a process group


class ReplicaError(RuntimeError):
    """A replica raised; its own exception is the cause."""


class _Abandoned(BaseException):
    """Ends the other replicas when one has raised."""


class _Table:
    """Where the replicas of one process meet. Only the replica whose turn it is may touch it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.failed: tuple[int, BaseException] | None = None
        self._turn = 0
        self._gone: set[int] = set()
        self._changed = threading.Condition()
        self._laid: dict[int, dict[int, Any]] = {}
        self._result: dict[int, Any] = {}
        self._read: dict[int, int] = {}

    def meet(self, rank: int, number: int, mine: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Contribute `mine` to meeting `number`, wait for all replicas, and return `combine` of all contributions."""
        laid = self._laid.setdefault(number, {})
        laid[rank] = mine
        self.pass_turn(rank)
        self.await_turn(rank)
        if len(laid) < self.size:
            missing = sorted(self._gone - set(laid))
            raise RuntimeError(f"replica {missing[0]} has returned, but replica {rank} still waits for it")
        if number not in self._result:
            self._result[number] = combine([laid[r] for r in range(self.size)])
        result = self._result[number]
        self._read[number] = self._read.get(number, 0) + 1
        if self._read[number] == self.size:
            del self._laid[number], self._result[number], self._read[number]
        return result

    def await_turn(self, rank: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == rank)
        if self.failed is not None:
            raise _Abandoned

    def pass_turn(self, rank: int) -> None:
        with self._changed:
            turns = [(rank + k) % self.size for k in range(1, self.size + 1)]
            self._turn = next((r for r in turns if r not in self._gone), rank)
            self._changed.notify_all()

    def leave(self, rank: int, error: BaseException | None) -> None:
        if error is not None and self.failed is None:
            self.failed = (rank, error)
        self._gone.add(rank)
        self.pass_turn(rank)


class InProcess(Replicas):
    """One of the replicas of this process."""

    wrapping_broadcasts = False

    def __init__(self, rank: int, table: _Table) -> None:
        self.rank, self.size = rank, table.size
        self._table = table
        self._meetings = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> InProcess:
        """Itself: a copied model belongs to the same replica."""
        return self

    def arrive(self, place: str, call: str | None = None) -> None:
        """Nothing to do: `meet` notices replicas that have returned."""

    def part(self, readers: int | None = None) -> None:
        """Nothing to do: there is no store."""

    def explain(self, error: Exception, began: float, wrappers: Sequence[DistributedDataParallel] = ()) -> None:
        """Nothing to do: no replica is lost without an exception."""

    def settle(self, mine: str, decide: Callable[[list[str]], str]) -> str:
        """Return `decide` of all replicas' `mine`."""
        decided: str = self._meet(mine, decide)
        return decided

    def gather(self, values: Tensor) -> list[list[float]]:
        """Every replica's vector, by replica."""
        found: list[list[float]] = self._meet(values.tolist(), list)
        return found

    def start_mean(self, flat: Tensor, of: Sequence[int] | None = None) -> None:
        """Replace `flat` by its mean over the replicas."""
        weigh(flat, self.rank, range(self.size) if of is None else of)
        flat.copy_(self._meet(flat, lambda everyone: torch.stack(everyone).sum(0)))

    def broadcast(self, flat: Tensor, source: int = 0) -> None:
        """Replace `flat` by that of replica `source`."""
        flat.copy_(self._meet(flat, lambda everyone: everyone[source].clone()))

    def gather_into(self, everyone: Tensor, mine: Tensor) -> None:
        """Fill `everyone` with every replica's `mine`, one after another."""
        everyone.copy_(self._meet(mine, torch.cat))

    def mean_of_sparse(self, gradient: Tensor) -> Tensor:
        """The mean of a sparse tensor over the replicas, with the indices of all of them, as in DDP."""
        mine = gradient.coalesce() / self.size

        def combine(everyone: list[Tensor]) -> Tensor:
            total = everyone[0]
            for other in everyone[1:]:
                total = total + other
            return total.coalesce()

        mean: Tensor = self._meet(mine, combine)
        return mean.clone()

    def close(self) -> None:
        """Nothing to give back."""

    def _meet(self, mine: Any, combine: Callable[[list[Any]], Any]) -> Any:
        self._meetings += 1
        generator = torch.get_rng_state()
        result = self._table.meet(self.rank, self._meetings, mine, combine)
        torch.set_rng_state(generator)
        return result


def in_process(function: Callable[..., T], size: int, *args: Any) -> list[T]:
    """Call `function(*args)` once for each of `size` replicas in this process; return the results, by replica.

    Within it `Ensemble`, `OneCycleAutoLR`, `warm_init` and `data_parallel` know which replica they serve, as they do
    under torchrun: the same function runs in both. torch.distributed does not know these replicas, so in `function`
    write `hdet.data_parallel(model)` for `DistributedDataParallel(model)`, and `hdet.find_replicas()`, which has `rank`
    and `size`, for `dist.get_rank()` and `dist.get_world_size()`.

    Raises:
        ReplicaError: if a replica raises. Its exception is the cause; the others are ended.

    >>> in_process(lambda: find_replicas().rank, 3)
    [0, 1, 2]
    """
    table = _Table(size)
    results: dict[int, T] = {}
    generator = torch.get_rng_state()

    def live(rank: int) -> None:
        error: BaseException | None = None
        try:
            table.await_turn(rank)
            torch.set_rng_state(generator)
            with seated(InProcess(rank, table)):
                results[rank] = function(*args)
        except _Abandoned:
            pass
        except BaseException as raised:
            error = raised
        finally:
            table.leave(rank, error)

    threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_rng_state(generator)
    if table.failed is not None:
        (rank, cause), table.failed = table.failed, None  # its traceback would keep all that the replicas had
        raise ReplicaError(f"replica {rank} raised {type(cause).__name__}: {cause}{_instead(cause)}") from cause
    return [results[rank] for rank in range(size)]


def _instead(error: BaseException) -> str:
    """What to write instead if a replica called torch.distributed without a process group."""
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    if dist.is_initialized() or not frames or not frames[-1].startswith(_NEED_A_GROUP):
        return ""
    return (
        " torch.distributed does not know the replicas of in_process: write hdet.data_parallel(model) for "
        "DistributedDataParallel(model), and hdet.find_replicas(), which has rank and size, for dist.get_rank() and "
        "dist.get_world_size(); both do the same under torchrun"
    )


class SharedGradients(nn.Module):
    """The in-process counterpart of DistributedDataParallel: averages the gradients after each backward pass."""

    shares_gradients = True

    def __init__(self, module: nn.Module, replicas: InProcess) -> None:
        super().__init__()
        self.module = module
        self._replicas = replicas
        self._queued = False
        self.require_backward_grad_sync = True  # DistributedDataParallel's switch
        self._watch()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Share the gradients of a copy too, as DistributedDataParallel does: parameters are copied without hooks."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._watch()

    def _watch(self) -> None:
        for p in self.module.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(WeakHook(self._queue))  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's."""
        return self.module(*args, **kwargs)

    def _queue(self, _: Tensor) -> None:
        if self.require_backward_grad_sync and not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._average)

    def _average(self) -> None:
        self._queued = False
        dense = []
        for p in self.module.parameters():
            if p.grad is None:
                continue
            if p.grad.is_sparse:
                p.grad = self._replicas.mean_of_sparse(p.grad)
            else:
                p.grad = p.grad.resolve_conj()  # of a complex parameter it may be a view that is conjugated lazily
                dense.append(p.grad)
        average(dense, self._replicas)


def data_parallel(model: nn.Module) -> nn.Module:
    """`model` with gradients shared by the replicas: DistributedDataParallel, its twin in one process, or itself.

    For code that runs under torchrun and under `in_process` alike.
    """
    replicas = find_replicas()
    if isinstance(replicas, InProcess):
        return SharedGradients(model, replicas)
    return DistributedDataParallel(model) if replicas.size > 1 else model
