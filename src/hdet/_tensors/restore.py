"""Restores random generators, modules, weights and optimizers bit for bit after a measurement."""

from __future__ import annotations

import copy
import math
import random
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from hdet._tensors.parameters import once
from hdet._tensors.shards import part


def _gpus() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


class Generators:
    """The state of the global random generators: torch's on CPU and CUDA, Python's, and NumPy's if it is imported."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if _gpus() else []
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()

    def seed(self, seed: int) -> None:
        """Start all of them from `seed`."""
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed a GPU that is not in use yet
        if _gpus():
            torch.cuda.manual_seed_all(seed)
        random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed % 2**32)

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators within this context; afterwards they continue where they were."""
    before = Generators()
    before.seed(seed)
    try:
        yield
    finally:
        before.restore()


class Modules:
    """The mode of every submodule, and every buffer: which tensor it is and what is in it."""

    def __init__(self, model: nn.Module) -> None:
        self._modes = [(module, module.training) for module in model.modules()]
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    @torch.no_grad()
    def restore(self) -> None:
        for module, training in self._modes:
            module.training = training
        for module, name, buffer, value in self._buffers:
            now = module._buffers.get(name)
            # A table that has grown (of positions, say) stays: the module relies on its new size.
            if now is not None and (now.shape, now.dtype) != (value.shape, value.dtype):
                continue
            module._buffers[name] = buffer
            # Through .data, for a graph that waits for backward and holds the buffer would take it for changed.
            buffer.data.copy_(value)


@contextmanager
def batch_statistics(model: nn.Module) -> Iterator[None]:
    """Put every module in evaluation mode, but let norms with running statistics use those of the batch.

    The running statistics are hidden meanwhile. In evaluation mode SyncBatchNorm sends nothing. A norm that is in
    evaluation mode while the model trains is frozen, and keeps using the running statistics.
    """
    before = Modules(model)
    hidden: list[tuple[_NormBase, Tensor | None, Tensor | None, bool]] = []
    frozen = {module for module in model.modules() if model.training and not module.training}
    model.eval()
    try:
        for module in model.modules():
            if module in frozen or module._buffers.get("running_mean") is None:
                continue
            if isinstance(module, _NormBase):
                hidden.append((module, module.running_mean, module.running_var, module.track_running_stats))
                module.running_mean = module.running_var = None
                module.track_running_stats = False
            else:
                module.training = True
        yield
    finally:
        for norm, mean, variance, track in hidden:
            norm.running_mean, norm.running_var, norm.track_running_stats = mean, variance, track
        before.restore()


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Run operations on `device` in the precision of their inputs within this context, whatever the autocast."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        with torch.autocast(device.type, enabled=False):
            yield
    else:
        yield


class Weights:
    """The values of parameters, and their gradients."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = once(parameters)
        self._values = [p.detach().clone() for p in self._parameters]
        # The value too: a gradient may be a view of a bucket of DDP, which the next backward pass fills.
        self._gradients = [(p.grad, None if p.grad is None else p.grad.clone()) for p in self._parameters]

    @torch.no_grad()
    def rewind(self) -> None:
        """Restore the values and clear the gradients."""
        for p, value in zip(self._parameters, self._values, strict=True):
            p.copy_(value)
            p.grad = None

    def clear_gradients(self) -> None:
        for p in self._parameters:
            p.grad = None

    def restore(self) -> None:
        self.rewind()
        with torch.no_grad():
            for p, (gradient, value) in zip(self._parameters, self._gradients, strict=True):
                p.grad = gradient
                if gradient is not None and value is not None:
                    gradient.copy_(value)

    @torch.no_grad()
    def checksum(self) -> float:
        """A checksum of the current weights."""
        return math.fsum(
            float(p.detach().abs().sum(dtype=torch.float64)) * (k + 1) for k, p in enumerate(self._parameters)
        )

    def moved(self) -> bool:
        """Whether any weights differ from the start, on this rank."""
        pairs = zip(self._parameters, self._values, strict=True)
        return any(not torch.equal(_local(p), _local(value)) for p, value in pairs)

    def have_gradients(self) -> bool:
        return any(p.grad is not None for p in self._parameters)

    def have_finite_gradients(self) -> bool:
        return all(p.grad is None or bool(p.grad.isfinite().all()) for p in self._parameters)


class Frozen:
    """The values of frozen parameters, which a forward pass may still change (a momentum encoder).

    Keeps all of them on the host until some steps have shown which ones change, then only those: the frozen part of a
    model may be far larger than the trained one.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._all = [p for p in once(parameters) if _is_plain(_local(p))]
        self._kept = [(p, _local(p).to("cpu", copy=True)) for p in self._all]
        self._sums = [_sums(p) for p in self._all]
        self._settled = False

    def settle(self) -> None:
        """After the first steps, keep only the changed ones. Later calls do nothing."""
        if not self._settled:
            self._kept = [
                (p, value) for p, value in self._kept if not torch.equal(_bytes(_local(p).cpu()), _bytes(value))
            ]
        self._settled = True

    @torch.no_grad()
    def restore(self) -> None:
        for p, value in self._kept:
            _local(p).copy_(value)

    def all_restored(self) -> bool:
        """Whether all have their original values; one that first changed after `settle()` does not."""
        return all(_sums(p) == before for p, before in zip(self._all, self._sums, strict=True))


def _local(p: Tensor) -> Tensor:
    """The current values, for a DTensor this rank's part. They share memory with `p`."""
    return part(p).detach()


def _is_plain(values: Tensor) -> bool:
    """Whether it can be copied and written: not sparse, not without memory, and no two elements in one place."""
    if values.layout != torch.strided or values.is_meta or not values.numel():
        return False
    return all(stride > 0 for size, stride in zip(values.shape, values.stride(), strict=True) if size > 1)


def _bytes(values: Tensor) -> Tensor:
    """Its bytes as a flat tensor, comparable for any dtype: frozen weights may be quantised."""
    return values.contiguous().reshape(-1).view(torch.uint8)


def _sums(p: Tensor) -> list[int]:
    """Sums over all bytes and over some: nearly every change shows in them."""
    seen = _bytes(_local(p))
    return [int(seen[::every].sum(dtype=torch.int64)) for every in (1, 3, 7)]


class OptimizerState:
    """An optimizer's attributes, groups, state and hooks. Its state is set aside, not copied."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._attributes = dict(vars(optimizer))
        self._groups = [(group, dict(group)) for group in optimizer.param_groups]
        self._tensors = [
            (value, value.clone()) for _, was in self._groups for value in was.values() if isinstance(value, Tensor)
        ]

    def restart(self) -> None:
        """Reset to a new optimizer with the original groups and without hooks around its steps."""
        self.restore()
        optimizer = self._optimizer
        optimizer._optimizer_step_pre_hooks = OrderedDict()
        optimizer._optimizer_step_post_hooks = OrderedDict()
        optimizer.state = defaultdict(dict)
        if isinstance(optimizer, optim.Adagrad):  # the one that makes its state at once
            groups = [dict(group) for group in optimizer.param_groups]
            optimizer.state = type(optimizer)(groups, **optimizer.defaults).state

    @torch.no_grad()
    def restore(self) -> None:
        attributes = vars(self._optimizer)
        for name in set(attributes) - set(self._attributes):
            del attributes[name]
        attributes.update(self._attributes)
        for group, was in self._groups:
            group.clear()
            group.update(was)
        for tensor, value in self._tensors:
            tensor.copy_(value)


class Others:
    """Objects with `state_dict` and `load_state_dict`: data loaders, samplers, models that follow the weights."""

    def __init__(self, objects: Sequence[Any]) -> None:
        self._states = [(entry, copy.deepcopy(entry.state_dict())) for entry in objects]

    def restore(self) -> None:
        for entry, state in self._states:
            entry.load_state_dict(copy.deepcopy(state))
