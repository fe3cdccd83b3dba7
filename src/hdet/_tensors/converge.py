"""Converge: replace tensors by their mean over the replicas, in place, through flat buckets.

This module also selects those tensors: `parameters`, `buffers` and `module_tensors`.
"""

from __future__ import annotations

import zlib
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors
from torch.optim import Optimizer

from hdet._replicas import LostReplicaError, Replicas, Travelling, collective_device
from hdet._tensors.parameters import once, parameters_of
from hdet._tensors.shards import part

BUCKET_BYTES = 16 * 2**20
_PACKED = {getattr(torch, "float4_e2m1fn_x2", None)}  # two numbers in each element, which torch only moves about
_Travelling = tuple[list[Tensor], list[Tensor], "Travelling | None"]


def parameters(optimizers: Iterable[Optimizer], trained: Container[int] = ()) -> list[Tensor]:
    """The trained parameters, each once. Frozen ones never change and are left alone.

    Args:
        optimizers: the optimizers with the parameters.
        trained: ids of parameters that were trained earlier in the round, and may have been frozen since.
    """
    return _averageable(p for p in parameters_of(*optimizers) if p.requires_grad or id(p) in trained)


def buffers(module: nn.Module | None) -> list[Tensor]:
    """The floating-point and complex buffers of `module`."""
    return [] if module is None else _averageable(module.buffers())


def module_tensors(followers: Iterable[nn.Module | Tensor]) -> list[Tensor]:
    """All tensors of modules that follow the weights and can be averaged, including frozen ones."""
    return _averageable(tensors_of(followers))


def tensors_of(followers: Iterable[nn.Module | Tensor]) -> list[Tensor]:
    """All tensors of modules that follow the weights, whatever their dtype."""
    found: list[Tensor] = []
    for follower in followers:
        if isinstance(follower, Tensor):
            found.append(follower)
        else:
            found += [*follower.parameters(), *follower.buffers()]
    return found


def layout(tensors: Sequence[Tensor]) -> int:
    """A checksum of the shapes and dtypes, to compare between replicas before anything is averaged."""
    return zlib.crc32(repr([(tuple(t.shape), t.dtype) for t in tensors]).encode())


@torch.no_grad()
def average(
    tensors: Sequence[Tensor],
    replicas: Replicas,
    bucket_bytes: int = BUCKET_BYTES,
    of: Sequence[int] | None = None,
    atomic: bool = False,
) -> None:
    """Replace each tensor by its mean over the replicas, in place: no object and no storage is replaced.

    Tensors are packed into two reused flat buckets, one being filled while the other travels; half
    precision is averaged in single precision and rounded once. The number of collectives depends on the
    bytes, not on the number of tensors.

    Args:
        tensors: the tensors to average.
        replicas: the replicas to average over.
        bucket_bytes: size of a bucket.
        of: the replicas whose tensors count; by default all of them. All get the mean.
        atomic: restore everything if a replica is lost meanwhile. Costs one copy of the tensors.

    Raises:
        LostReplicaError: if a replica is lost; it says whether the tensors are as before.
    """
    own = [t.detach().clone() for t in tensors] if atomic else []
    try:
        average_in_buckets(tensors, replicas, bucket_bytes, of)
        if atomic:
            replicas.gather(torch.zeros(1, dtype=torch.float64, device=collective_device(tensors)))  # all have it
    except LostReplicaError as error:
        if not atomic:
            raise error.and_then(_HALF_AVERAGED) from error
        for tensor, value in zip(tensors, own, strict=True):
            tensor.copy_(value)
        raise error.and_then(UNTOUCHED) from error


UNTOUCHED = "the weights of this replica are as before the averaging"
LAST_WEIGHTS = "the weights of this replica are those of the last step"
_HALF_AVERAGED = (
    "the weights of this replica may be averaged in part: do not go on with them, load a checkpoint; with "
    "hdet.Safety(atomic=True) they would be as before"
)


@torch.no_grad()
def average_in_buckets(
    tensors: Sequence[Tensor], replicas: Replicas, bucket_bytes: int, of: Sequence[int] | None
) -> None:
    buffers: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    travelling: _Travelling | None = None
    for number, batch in enumerate(_batches(tensors, bucket_bytes)):
        kind = (_arithmetic(batch[0].dtype), batch[0].device)
        pair = buffers.setdefault(kind, [])
        flat = _buffer(pair, number % 2, sum([t.numel() for t in batch]), kind)
        slices = list(_unflatten_dense_tensors(flat, batch))  # type: ignore[no-untyped-call]
        torch._foreach_copy_(slices, batch)
        work = replicas.start_mean(flat, of)
        if travelling is not None:
            _unpack(travelling)
        travelling = (slices, batch, work)
    if travelling is not None:
        _unpack(travelling)


@contextmanager
def averaged(
    tensors: Sequence[Tensor], replicas: Replicas, kept: Sequence[Tensor] = (), of: Sequence[int] | None = None
) -> Iterator[None]:
    """Within this context `tensors` hold their mean over the replicas; afterwards their own values, bit for bit.

    Tensors in `kept` are restored too, but not averaged. Costs one copy of both. Also restores if averaging fails.
    """
    touched = [elements(t) for t in once((*tensors, *kept))]
    own = [t.detach().clone() for t in touched]
    try:
        average_in_buckets(tensors, replicas, BUCKET_BYTES, of)
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(touched, own, strict=True):
                tensor.copy_(value)


@torch.no_grad()
def copy_from(
    source: int, tensors: Sequence[Tensor], replicas: Replicas, bucket_bytes: int = BUCKET_BYTES, take: bool = True
) -> None:
    """Replace each tensor by that of replica `source`, in place, through flat buckets.

    A replica without `take` takes part but keeps its own tensors.
    """
    for batch in _batches(tensors, bucket_bytes, as_they_are=True):
        flat = torch.cat([t.reshape(-1) for t in batch])
        replicas.broadcast(flat, source)
        if take:
            torch._foreach_copy_(batch, list(_unflatten_dense_tensors(flat, batch)))  # type: ignore[no-untyped-call]


def _unpack(travelling: _Travelling) -> None:
    slices, batch, work = travelling
    if work is not None:
        work.wait()
    torch._foreach_copy_(batch, slices)


def _buffer(pair: list[Tensor], index: int, size: int, kind: tuple[torch.dtype, torch.device]) -> Tensor:
    while len(pair) <= index:
        pair.append(torch.empty(0, dtype=kind[0], device=kind[1]))
    if pair[index].numel() < size:
        pair[index] = torch.empty(size, dtype=kind[0], device=kind[1])
    return pair[index][:size]


def _batches(tensors: Sequence[Tensor], bucket_bytes: int, as_they_are: bool = False) -> Iterator[list[Tensor]]:
    """Runs of pieces that share arithmetic, or their dtype, and device, and fill at most one bucket each."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        kinds.setdefault((real.dtype if as_they_are else _arithmetic(real.dtype), real.device), []).append(real)
    for (dtype, _), members in kinds.items():
        limit = max(1, bucket_bytes // dtype.itemsize)
        batch: list[Tensor] = []
        filled = 0
        for member in members:
            for piece in (member,) if member.numel() <= limit else _pieces(member, limit):
                filled += piece.numel()
                if filled > limit and batch:
                    yield batch
                    batch, filled = [], piece.numel()
                batch.append(piece)
        yield batch


def _pieces(tensor: Tensor, limit: int) -> Iterator[Tensor]:
    """Views that cover `tensor`, each of at most `limit` elements."""
    if tensor.numel() <= limit:
        yield tensor
        return
    longest = max(range(tensor.dim()), key=tensor.size)
    for half in tensor.chunk(2, dim=longest):
        yield from _pieces(half, limit)


def _arithmetic(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def _averageable(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [elements(t) for t in map(part, once(tensors)) if has_numbers(t)]


def has_numbers(tensor: Tensor) -> bool:
    """Whether its elements can be averaged and may be not finite."""
    return tensor.numel() > 0 and (tensor.is_floating_point() or tensor.is_complex()) and tensor.dtype not in _PACKED


def widened(tensor: Tensor) -> Tensor:
    """`tensor`, in single precision where torch cannot add or compare its elements: with 8 bits and less."""
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize == 1 else tensor


def elements(tensor: Tensor) -> Tensor:
    """`tensor` itself, or a view without the repetitions of an expanded one, in which each element is one place."""
    for dim in range(tensor.dim()):
        if tensor.stride(dim) == 0 and tensor.size(dim) > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
