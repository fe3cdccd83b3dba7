"""Sources of a probe's samples: a data set, a function, or an iterable that one replica reads for all."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from hdet._arguments import check_count
from hdet._probe.batches import count_samples, pack, plain, unpack
from hdet._replicas import Replicas, find_replicas
from hdet._tensors.restore import seeded

_SIZE = 1024
_CHUNKS = 8
_BATCHES = 4
_Load = Callable[[], tuple[Any, int]]


def counter_seed(seed: int, index: int, number: int, use: str) -> int:
    """The seed of a generator, as a function of the arguments alone."""
    counter = f"probe/{seed}/{index}/{number}/{use}".encode()
    return int.from_bytes(hashlib.blake2b(counter, digest_size=8).digest(), "big") >> 1


class Chunk:
    """A batch and its number of samples, loaded on first use, which may never happen on another replica."""

    def __init__(self, load: _Load) -> None:
        self._load: _Load | None = load
        self._loaded: tuple[Any, int] = (None, 0)

    def load(self) -> tuple[Any, int]:
        """The batch, and how many samples it has."""
        if self._load is not None:
            self._loaded, self._load = self._load(), None
        return self._loaded


class Source(Protocol):
    """Where the chunks of probe `index` come from, the same on all replicas.

    Attributes:
        repeats: the same index gives the same samples again, in another process too.
        samples: the number of samples to draw from; None if unknown.
    """

    repeats: bool
    samples: int | None

    def draw(self, index: int, replicas: Replicas | None, device: torch.device) -> list[Chunk]: ...


class _DataSet:
    """Samples of a data set, the same on every replica because the draw is."""

    repeats = True

    def __init__(self, data: Any, size: int, chunk: int, seed: int, collate: Callable[[list[Any]], Any]) -> None:
        self.samples: int | None = len(data)
        self._data, self._size, self._seed, self._collate = data, size, seed, collate
        self._count = math.ceil(size / chunk)

    def draw(self, index: int, replicas: Replicas | None, device: torch.device) -> list[Chunk]:
        generator = torch.Generator().manual_seed(counter_seed(self._seed, index, 0, "draw"))
        chosen = _choose(len(self._data), self._size, generator)
        edges = [k * self._size // self._count for k in range(self._count + 1)]  # no chunk is much smaller than others
        return [Chunk(partial(self._load, chosen[edges[k] : edges[k + 1]], index, k)) for k in range(self._count)]

    def _load(self, chosen: list[int], index: int, number: int) -> tuple[Any, int]:
        with seeded(counter_seed(self._seed, index, number, "data")):  # for samples that are augmented at random
            return self._collate([self._data[i] for i in chosen]), len(chosen)


class _Function:
    """The batches that a function of the index gives."""

    repeats = True
    samples: int | None = None

    def __init__(self, data: Callable[[int], Iterable[Any]], seed: int) -> None:
        self._data, self._seed = data, seed

    def draw(self, index: int, replicas: Replicas | None, device: torch.device) -> list[Chunk]:
        with seeded(counter_seed(self._seed, index, 0, "data")):
            found = self._data(index)
            if isinstance(found, Tensor) or not isinstance(found, Iterable):
                raise TypeError(f"data(index) must give a list of batches, got {type(found).__name__}; write [batch]")
            return _loaded(list(found))


class _Stream:
    """The next batches of an iterable, from the first replica to all."""

    repeats = False
    samples: int | None = None

    def __init__(self, data: Iterable[Any], batches: int, seed: int) -> None:
        self._data, self._batches, self._seed = data, batches, seed
        self._iterator: Iterator[Any] | None = None

    def draw(self, index: int, replicas: Replicas | None, device: torch.device) -> list[Chunk]:
        found = find_replicas() if replicas is None else replicas
        if found.size == 1:
            return _loaded(plain(self._next(index)))
        try:
            return _loaded(self._exchange(index, found, device))
        finally:
            if replicas is None:
                found.close()

    def _exchange(self, index: int, replicas: Replicas, device: torch.device) -> list[Any]:
        """Send the first replica's batches to all, or its error: otherwise they would wait forever."""
        header, content, cause = b"", torch.empty(0, dtype=torch.uint8), None
        if replicas.rank == 0:
            try:
                header, content = pack(self._next(index))
            except Exception as error:
                header, cause = f"{type(error).__name__}: {error}".encode(), error
        sizes = torch.tensor([len(header), len(content), cause is not None], device=device)
        replicas.broadcast(sizes)
        head, body, failed = sizes.tolist()
        flat = torch.empty(head + body, dtype=torch.uint8, device=device)
        if replicas.rank == 0:
            flat[:head] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
            flat[head:] = content
        replicas.broadcast(flat)
        flat = flat.cpu()
        header = bytes(flat[:head].tolist())
        if failed:
            raise RuntimeError(f"replica 0 could not draw the probe: {header.decode()}") from cause
        return unpack(header, flat[head:], device)

    def _next(self, index: int) -> list[Any]:
        with seeded(counter_seed(self._seed, index, 0, "data")):  # a DataLoader draws its shuffling from torch's
            return [self._one() for _ in range(self._batches)]

    def _one(self) -> Any:
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self._data)
            try:
                return next(self._iterator)
            except StopIteration:
                self._iterator = None
        raise ValueError(
            "data must be an iterable that can be started again, got one that is empty or has ended; pass a DataLoader"
        )


def find_source(
    data: Any, size: int | None, chunk: int | None, batches: int | None, seed: int, collate: Callable[..., Any] | None
) -> Source:
    """The source that `data` is.

    Raises:
        TypeError, ValueError: for arguments that cannot work.
    """
    if isinstance(data, IterableDataset):
        raise TypeError("data must give batches, but an IterableDataset gives samples; pass DataLoader(data, ...)")
    of_batches = isinstance(data, (list, tuple)) and batches is not None
    counted = hasattr(data, "__len__") and hasattr(data, "__getitem__") and not of_batches
    if batches is not None and (counted or callable(data)):
        raise ValueError(
            f"batches must be None unless data is an iterable of batches, got {batches}; write size= for a data set; a "
            "function gives as many as it likes"
        )
    if counted:
        return _DataSet(data, *_check_size(len(data), size, chunk), seed, collate or default_collate)
    for name, value in (("size", size), ("chunk", chunk), ("collate_fn", collate)):
        if value is not None:
            raise ValueError(
                f"{name} must be None unless data is a data set, got {value!r}; data has batches of its own"
            )
    if callable(data):
        return _Function(data, seed)
    if isinstance(data, Iterable):
        return _Stream(data, _BATCHES if batches is None else batches, seed)
    raise TypeError(
        "data must be a data set with __len__ and __getitem__, a function data(index) that gives a list of batches, or "
        f"an iterable of batches, got {type(data).__name__}"
    )


def _check_size(most: int, size: int | None, chunk: int | None) -> tuple[int, int]:
    if most == 0:
        raise ValueError("data must have at least 1 sample, got 0")
    size = min(_SIZE, most) if size is None else size
    check_count("size", size, unit="samples")
    if size > most:
        raise ValueError(f"size must be at most the {most} samples of data, got {size}; write size={most} or size=None")
    chunk = math.ceil(size / _CHUNKS) if chunk is None else chunk
    check_count("chunk", chunk, unit="samples")
    return size, chunk


def _choose(most: int, size: int, generator: torch.Generator) -> list[int]:
    """`size` different numbers below `most`, without a list of all of them if that is long."""
    if most <= 8 * size:
        return torch.randperm(most, generator=generator)[:size].tolist()
    chosen: dict[int, None] = {}
    while len(chosen) < size:
        chosen.update(dict.fromkeys(torch.randint(most, (size,), generator=generator).tolist()))
    return list(chosen)[:size]


def _loaded(batches: Sequence[Any]) -> list[Chunk]:
    if not batches:
        raise ValueError("data must give at least 1 batch, got none")
    return [Chunk(partial(_with_count, batch, count_samples(batch))) for batch in batches]


def _with_count(batch: Any, samples: int) -> tuple[Any, int]:
    return batch, samples
