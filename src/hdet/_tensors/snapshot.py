"""One copy of the consensus, split over the replicas, for rollbacks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from hdet._replicas import Replicas
from hdet._tensors.converge import BUCKET_BYTES, elements
from hdet._tensors.parameters import once

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_Layout = list[tuple[torch.Size, torch.dtype, torch.device]]


class Snapshot:
    """One copy of tensors that are equal on all replicas, of which each replica keeps its share on the same device.

    If some tensors are on an accelerator, its collectives cannot send those on the CPU. Each replica keeps complete
    copies of these; they are small, such as Adam's step counters, unless optimizer state is offloaded.

    Args:
        replicas: the replicas to split it over.
        bucket_bytes: bytes to restore at once. Memory: the share, plus a bucket while restoring.

    Attributes:
        shares: this replica's part of the tensors, one after another, by kind.
        whole: copies of tensors that cannot be split.
    """

    def __init__(self, replicas: Replicas, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._replicas = replicas
        self._bucket_bytes = bucket_bytes
        self._layout: _Layout | None = None
        self.shares: list[Tensor] = []
        self.whole: list[Tensor] = []

    @property
    def saved(self) -> bool:
        """Whether there is anything to restore."""
        return self._layout is not None

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether `tensors` have the layout of the saved ones."""
        return self._layout is not None and _layout(tensors) == self._layout

    @property
    def nbytes(self) -> int:
        """The memory that this replica's share takes."""
        return sum(t.nbytes for t in (*self.shares, *self.whole))

    @torch.no_grad()
    def save(self, tensors: Sequence[Tensor]) -> None:
        """Copy this replica's share of `tensors`, which are the same on all replicas. No traffic, no wait."""
        kinds, whole = _sort(tensors)
        layout = _layout(tensors)
        if layout != self._layout:
            sizes = [sum(len(own) for _, own in self._buckets(flat)) for flat in kinds]
            self.shares = [torch.empty(n, dtype=f.dtype, device=f.device) for n, f in zip(sizes, kinds, strict=True)]
            self.whole = [torch.empty_like(t) for t in whole]
            self._layout = layout
        for flat, share in zip(kinds, self.shares, strict=True):
            _pack(share, [piece for _, own in self._buckets(flat) for piece in flat.between(own.start, own.stop)])
        _copy(self.whole, whole)

    @torch.no_grad()
    def restore(self, tensors: Sequence[Tensor]) -> None:
        """Restore `tensors` in place and bit for bit, on all replicas. Collective."""
        if self._layout is None:
            raise RuntimeError("there is no snapshot to restore; call save() first")
        if not self.fits(tensors):
            raise RuntimeError(
                "the tensors to restore must be those that were saved, got others in number, shape, dtype or device; "
                "save again after changing the model or the optimizer"
            )
        kinds, whole = _sort(tensors)
        for flat, share in zip(kinds, self.shares, strict=True):
            self._restore(flat, share)
        _copy(whole, self.whole)

    def _restore(self, flat: _Flat, share: Tensor) -> None:
        size, position = self._replicas.size, 0
        for bucket, own in self._buckets(flat):
            length = len(bucket)
            most = -(-length // size)
            mine, everyone = share.new_zeros(most), share.new_empty(most * size)
            mine[: len(own)] = share[position : position + len(own)]
            position += len(own)
            self._replicas.gather_into(everyone, mine)
            if length < len(everyone):  # the last bucket, in which some shares are one shorter
                rows = everyone.view(size, most)
                everyone = torch.cat([row[: len(part)] for row, part in zip(rows, _shares(length, size), strict=True)])
            _unpack(everyone, list(flat.between(bucket.start, bucket.stop)))

    def _buckets(self, flat: _Flat) -> Iterator[tuple[range, range]]:
        """The ranges to send at once, and this replica's part of each.

        All but the last split evenly, so that shares differ by at most one element of each kind.
        """
        size, rank = self._replicas.size, self._replicas.rank
        limit = max(1, self._bucket_bytes // flat.dtype.itemsize // size) * size
        for start in range(0, len(flat), limit):
            stop = min(start + limit, len(flat))
            part = _shares(stop - start, size)[rank]
            yield range(start, stop), range(start + part.start, start + part.stop)


class _Flat:
    """The elements of tensors of one width on one device, in a row, without copying them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.dtype, self.device = tensors[0].dtype, tensors[0].device
        self._tensors = tensors
        self._ends = list(accumulate(t.numel() for t in tensors))

    def __len__(self) -> int:
        return self._ends[-1]

    def between(self, start: int, stop: int) -> Iterator[Tensor]:
        """Views of the elements from `start` to before `stop`."""
        index = bisect_right(self._ends, start)
        while start < stop:
            tensor, end = self._tensors[index], self._ends[index]
            first = end - tensor.numel()
            yield from _between(tensor, start - first, min(stop, end) - first)
            start, index = end, index + 1


def _between(tensor: Tensor, start: int, stop: int) -> Iterator[Tensor]:
    """Views of some elements of one tensor, in row-major order."""
    if start >= stop:
        return
    if start == 0 and stop == tensor.numel():
        yield tensor
    elif tensor.is_contiguous():
        yield tensor.view(-1)[start:stop]
    else:
        row = tensor[0].numel()
        first, last = -(-start // row), stop // row
        if first > last:  # within one row
            yield from _between(tensor[last], start - last * row, stop - last * row)
            return
        if start < first * row:
            yield from _between(tensor[first - 1], start - (first - 1) * row, row)
        if first < last:
            yield tensor[first:last]
        if last * row < stop:
            yield from _between(tensor[last], 0, stop - last * row)


def _sort(tensors: Sequence[Tensor]) -> tuple[list[_Flat], list[Tensor]]:
    """The tensors as bits: those to split, by width and device, and those to keep whole."""
    bits = [_bits(elements(t.detach())) for t in once(tensors) if t.numel()]
    only_cpu = all(t.device.type == "cpu" for t in bits)
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for t in bits:
        if only_cpu or t.device.type != "cpu":
            kinds.setdefault((t.dtype, t.device), []).append(t)
    return [_Flat(members) for members in kinds.values()], [t for t in bits if not only_cpu and t.device.type == "cpu"]


def _bits(tensor: Tensor) -> Tensor:
    """A view as integers: they are never rounded, and one width is one kind whatever the dtype."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.view(_BITS[real.element_size()])


def _layout(tensors: Sequence[Tensor]) -> _Layout:
    return [(t.shape, t.dtype, t.device) for t in once(tensors)]


def _shares(length: int, size: int) -> list[range]:
    return [range(length * rank // size, length * (rank + 1) // size) for rank in range(size)]


def _pack(flat: Tensor, pieces: list[Tensor]) -> None:
    _copy(list(_unflatten_dense_tensors(flat, pieces)), pieces)  # type: ignore[no-untyped-call]


def _unpack(flat: Tensor, pieces: list[Tensor]) -> None:
    _copy(pieces, list(_unflatten_dense_tensors(flat, pieces)))  # type: ignore[no-untyped-call]


def _copy(into: list[Tensor], out_of: list[Tensor]) -> None:
    if into:
        torch._foreach_copy_(into, out_of)
