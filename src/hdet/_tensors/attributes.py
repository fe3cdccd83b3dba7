"""Restores plain values in attributes of objects after a measurement: counters, lists of outputs, metrics."""

from __future__ import annotations

import io
import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

_DEPTH = 4  # of containers within containers
_LONG = 10_000  # longer containers are not searched
_LARGE = 1 << 24  # bytes of a tensor that is taken for data, which nothing writes into: it is not copied
_OF_MODULES = ("_parameters", "_buffers", "_modules", "training")
_Restore = Callable[[], object]


class Attributes:
    """The attributes of some objects: which there are, and what plain containers, tensors and generators hold.

    Args:
        objects: whose they are.
        shallow: names of attributes that nothing writes into, such as a data set: their content is not copied.
    """

    def __init__(self, objects: Iterable[object], shallow: Collection[str] = ()) -> None:
        self._kept: list[tuple[dict[str, Any], dict[str, Any], list[_Restore]]] = []
        for entry in {id(entry): entry for entry in objects}.values():
            own = getattr(entry, "__dict__", None)
            if isinstance(own, dict):
                values = {name: value for name, value in own.items() if name not in _OF_MODULES}
                contents = [_keep(value, _DEPTH) for name, value in values.items() if name not in shallow]
                self._kept.append((own, values, contents))

    def restore(self) -> None:
        for own, values, contents in self._kept:
            for name in set(own) - set(values) - set(_OF_MODULES):
                del own[name]
            own.update(values)
            for put_back in contents:
                put_back()


def modules_of_users(model: nn.Module) -> list[nn.Module]:
    """The submodules whose classes are not torch's: these may keep more than parameters and buffers."""
    return [module for module in model.modules() if not type(module).__module__.startswith("torch.")]


def _keep(value: Any, depth: int) -> _Restore:
    """A function that restores the content of `value` in place."""
    if depth and isinstance(value, (list, dict, set, deque)):
        return _keep_container(value, depth)
    if isinstance(value, Tensor):
        return _keep_tensor(value)
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: value.set_state(state)
    if isinstance(value, random.Random):
        drawn = value.getstate()
        return lambda: value.setstate(drawn)
    if isinstance(value, io.IOBase) and not value.closed and value.seekable():
        place = value.tell()
        return lambda: value.seek(place)
    return _keep_numpy(value)


def _keep_container(value: Any, depth: int) -> _Restore:
    shallow = value.copy()
    entries = list(value.values() if isinstance(value, dict) else value)
    inner = [_keep(entry, depth - 1) for entry in entries] if len(entries) <= _LONG else []

    def put_back() -> None:
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(shallow)
        for restore in inner:
            restore()

    return put_back


def _keep_tensor(value: Tensor) -> _Restore:
    if value.layout != torch.strided or value.is_meta or value.numel() * value.element_size() > _LARGE:
        return _nothing
    before = value.detach().clone()

    def put_back() -> None:
        if value.shape == before.shape and not torch.equal(value.detach(), before):
            with torch.no_grad():
                value.copy_(before)

    return put_back


def _keep_numpy(value: Any) -> _Restore:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return _nothing
    if isinstance(value, numpy.random.RandomState):
        state = value.get_state()
        return lambda: value.set_state(state)
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator.state

        def put_back() -> None:
            value.bit_generator.state = bits

        return put_back
    return _nothing


def _nothing() -> None:
    return None
