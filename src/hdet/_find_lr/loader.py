"""What a search takes from a loader: some batches, kept on the host, and the loader as it was before."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from hdet._probe.batches import count_samples
from hdet._tensors.attributes import Attributes
from hdet._tensors.restore import Generators

MEMORY = 1 << 30
"""The bytes that the batches of one replica may take."""
TRAINED, SCORED = 64, 4
"""Optimizer steps whose batches a search takes to train on, and to score."""

_HELD = (
    "dataset", "datasets", "sampler", "batch_sampler", "base_dataloader", "base_loader", "loader", "loaders",
    "flattened", "gradient_state", "iterables", "_iterables",
)  # fmt: skip
_INSTEAD = "pass a DataLoader, a list of batches, or another iterable that begins anew each time"


class Kept:
    """A batch on the host, and how many samples it counts for."""

    def __init__(self, batch: Any, samples: int) -> None:
        self.batch, self._samples = batch, samples

    def __len__(self) -> int:
        return self._samples


def check_loader(loader: object) -> None:
    """Raise for what cannot be read without losing batches.

    Raises:
        TypeError, ValueError: with what to pass instead.
    """
    if isinstance(loader, (str, bytes, Mapping, Tensor)) or not isinstance(loader, Iterable):
        raise TypeError(f"loader must be an iterable of batches, got {type(loader).__name__}; {_INSTEAD}")
    if isinstance(loader, Iterator):
        raise ValueError(
            f"loader must be an iterable that can be read again, got {type(loader).__name__}, an iterator: the batches "
            f"that the search takes would be missing in training; {_INSTEAD}"
        )
    for part in _parts(loader):
        streams = isinstance(part, IterableDataset) or (part is loader and not isinstance(part, DataLoader))
        held = [name for name, value in _attributes(part).items() if _is_consumed(value)] if streams else []
        if held or (streams and isinstance(part, Iterator)):
            what = f"its {held[0]} is an iterator" if held else "it is its own iterator"
            raise ValueError(
                f"loader must read data that can be read again, but {type(part).__name__} cannot be: {what}, and the "
                "batches that the search takes would be missing in training; make the iterator in __iter__, or search "
                "with a loader of its own: find_lr(model, optimizer, another_loader, loss_fn)"
            )


def read(loader: Iterable[Any], most: int, memory: int, count: Callable[[Any], int] | None = None) -> list[Kept]:
    """The first batches of a loader, copied to the host. The loader and all random generators are as before.

    Args:
        loader: any iterable of batches.
        most: how many to take at most.
        memory: how many bytes to keep at most; two batches are kept whatever their size.
        count: how many samples a batch counts for; by default the first dimension of its first tensor.

    Raises:
        ValueError: if there is none.
    """
    kept: list[Kept] = []
    used = 0
    with _as_it_was(loader):
        iterator = iter(loader)
        try:
            while len(kept) < most and (len(kept) < 2 or used + used / len(kept) <= memory):
                batch = next(iterator, _END)
                if batch is _END:
                    break
                batch = on_host(batch)
                used += _bytes(batch)
                kept.append(Kept(batch, _samples(batch) if count is None else count(batch)))
        finally:
            _close(iterator)
    if not kept:
        raise ValueError("loader must give at least 1 batch, got none; check its data set, its sampler and drop_last=")
    return kept


def wanted(accumulate: int) -> int:
    """How many batches a search takes at most, of a run with so many to an optimizer step."""
    return (TRAINED + SCORED) * accumulate


_END = object()


def on_host(batch: Any) -> Any:
    """A copy of its tensors in main memory: neither pinned, nor shared with a worker, nor written to again."""
    return _rebuild(batch, lambda tensor: tensor.detach().to("cpu", copy=True), lambda other: other)


def to_device(batch: Any, device: torch.device) -> Any:
    """A copy of it there, as a training loop makes one; what has a method `to` is asked."""
    return _rebuild(
        batch,
        lambda tensor: tensor.to(device, copy=True),
        lambda other: other.to(device) if callable(getattr(other, "to", None)) else other,
    )


def _rebuild(batch: Any, tensor: Callable[[Tensor], Any], other: Callable[[Any], Any]) -> Any:
    def rebuilt(value: Any) -> Any:
        return _rebuild(value, tensor, other)

    if isinstance(batch, Tensor):
        return tensor(batch)
    if isinstance(batch, Mapping):
        same: Any = {} if type(batch) is dict else copy.copy(batch)  # with whatever else it holds
        same.update({key: rebuilt(value) for key, value in batch.items()})
        return same
    if isinstance(batch, (list, tuple)):
        values = [rebuilt(value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        same = copy.copy(batch)
        for entry in dataclasses.fields(batch):
            object.__setattr__(same, entry.name, rebuilt(getattr(batch, entry.name)))
        return same
    return other(batch)


def _tensors(batch: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _rebuild(batch, found.append, lambda other: other)
    return found


def _bytes(batch: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(batch))


def _samples(batch: Any) -> int:
    """As of the batch of a probe; 1 where nothing counts them: then all batches weigh the same."""
    try:
        return max(count_samples(batch), 1)
    except TypeError:
        return next((len(tensor) for tensor in _tensors(batch) if tensor.dim()), 1)


@contextmanager
def _as_it_was(loader: Any) -> Iterator[None]:
    """Within it the loader may be read; afterwards it, its samplers, its data and all generators are as before."""
    generators, attributes = Generators(), Attributes(_parts(loader))
    for part in _parts(loader):
        if isinstance(part, DataLoader) and part._iterator is not None:  # of persistent workers, which would be reset
            part._iterator = None
    try:
        yield
    finally:
        attributes.restore()
        generators.restore()


def _close(iterator: Iterator[Any]) -> None:
    """End it, and the workers behind it."""
    for name in ("close", "_shutdown_workers"):
        end = getattr(iterator, name, None)
        if callable(end):
            end()


def _parts(loader: object) -> list[object]:
    """The loader and what it reads through: data sets, samplers, loaders that it wraps."""
    found: dict[int, object] = {}
    rest = [loader]
    while rest:
        part = rest.pop()
        if part is None or id(part) in found:
            continue
        found[id(part)] = part
        for name in _HELD:
            value = _attributes(part).get(name)
            rest += _listed(value)
    return list(found.values())


def _listed(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [entry for entry in value if hasattr(entry, "__dict__")] if len(value) <= 64 else []
    if isinstance(value, dict):
        return [entry for entry in value.values() if hasattr(entry, "__dict__")] if len(value) <= 64 else []
    return [value] if hasattr(value, "__dict__") else []


def _attributes(part: object) -> dict[str, Any]:
    own = getattr(part, "__dict__", None)
    return own if isinstance(own, dict) else {}


def _is_consumed(value: object) -> bool:
    """Whether what is read of it is gone: an iterator that cannot go back, as a file can."""
    seekable = getattr(value, "seekable", None)
    return isinstance(value, Iterator) and not (callable(seekable) and seekable())
