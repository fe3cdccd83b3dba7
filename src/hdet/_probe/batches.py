"""Batches as bytes, to send one replica's data to the others without pickles, and their number of samples.

A batch is a tensor, or tuples, lists and dicts of tensors and plain values (numbers, strings, None) to any depth.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_PLAIN = (str, int, float, bool, type(None))


def count_samples(batch: Any) -> int:
    """The first dimension of the first tensor of `batch`; the length of a batch that is an object of another kind.

    >>> count_samples({"image": torch.zeros(3, 8, 8), "label": torch.zeros(3)})
    3

    Raises:
        TypeError: if there is neither.
    """
    first = next(_tensors(batch), None)
    if first is not None and first.dim():
        return len(first)
    if not isinstance(batch, (Tensor, Mapping, list, tuple, str)) and hasattr(batch, "__len__"):
        return len(batch)
    raise TypeError(
        f"a batch of the probe must hold a tensor whose first dimension counts the samples, got {type(batch).__name__}"
    )


def plain(batches: list[Any]) -> list[Any]:
    """The batches as they would arrive at another replica, with the same tensors in them.

    Raises:
        TypeError: for a part that is no tensor, tuple, list, dict or plain value.
    """
    return [_rebuild(_describe(batch), _tensors(batch)) for batch in batches]


def pack(batches: list[Any]) -> tuple[bytes, Tensor]:
    """The structure as JSON, and the content of all tensors as one vector of bytes.

    Raises:
        TypeError: for a part that is no tensor, tuple, list, dict or plain value.
    """
    tensors = list(_tensors(batches))
    kinds = [[str(t.dtype).removeprefix("torch."), list(t.shape), t.device.type == "cpu"] for t in tensors]
    header = json.dumps({"batches": [_describe(batch) for batch in batches], "tensors": kinds}).encode()
    content = [t.detach().contiguous().reshape(-1).view(torch.uint8).cpu() for t in tensors]
    return header, torch.cat(content) if content else torch.empty(0, dtype=torch.uint8)


def unpack(header: bytes, content: Tensor, device: torch.device) -> list[Any]:
    """The inverse of `pack`. Tensors that were not in main memory are moved to `device`.

    >>> unpack(*pack([{"x": (torch.ones(2), "name")}]), torch.device("cpu"))
    [{'x': (tensor([1., 1.]), 'name')}]
    """
    described = json.loads(header)
    tensors = []
    for name, shape, main in described["tensors"]:
        tensor = torch.empty(shape, dtype=getattr(torch, name))
        size = tensor.numel() * tensor.itemsize
        tensor.view(-1).view(torch.uint8).copy_(content[:size])
        content = content[size:]
        tensors.append(tensor if main else tensor.to(device))
    assert not len(content)
    rest = iter(tensors)
    return [_rebuild(node, rest) for node in described["batches"]]


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _tensors(value)


def _describe(part: Any) -> Any:
    """A batch without its tensors, as JSON has it: a list of its kind and its content."""
    if isinstance(part, Tensor):
        if part.layout != torch.strided:
            raise TypeError(f"batches that travel must hold dense tensors, got {part.layout}; pass data(index) instead")
        return ["tensor", None]
    if isinstance(part, Mapping):
        if not all(isinstance(key, _PLAIN) for key in part):
            raise TypeError("the keys of a batch that travels must be strings or numbers; pass data(index) instead")
        return ["dict", [[key, _describe(value)] for key, value in part.items()]]
    if isinstance(part, (list, tuple)):
        return ["tuple" if isinstance(part, tuple) else "list", [_describe(value) for value in part]]
    if isinstance(part, _PLAIN):
        return ["plain", part]
    raise TypeError(
        "batches that one replica gives to the others must be made of tensors, tuples, lists, dicts, numbers and "
        f"strings, got {type(part).__name__}; pass a data set, or a function data(index), which need not travel"
    )


def _rebuild(node: Any, tensors: Iterator[Tensor]) -> Any:
    kind, content = node
    if kind == "tensor":
        return next(tensors)
    if kind == "plain":
        return content
    if kind == "dict":
        return {key: _rebuild(value, tensors) for key, value in content}
    parts = [_rebuild(value, tensors) for value in content]
    return tuple(parts) if kind == "tuple" else parts
