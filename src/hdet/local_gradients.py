"""Local gradients: replicas train on their own between converges, and nothing is sent for a step.

DistributedDataParallel has a switch for it, the one that its `no_sync()` turns for the length of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch import nn

Gradients = Literal["shared", "local"]
_SWITCH, _BUFFERS = "require_backward_grad_sync", "require_forward_param_sync"


class LocalGradients:
    """Turns off the sharing of gradients, and of buffers, in every wrapper inside `model`; `restore()` undoes it."""

    def __init__(self, model: nn.Module | None) -> None:
        modules = [] if model is None else list(model.modules())
        self._wrappers: list[Any] = [module for module in modules if hasattr(module, _SWITCH)]
        self._local = model is not None
        self._before = [(getattr(w, _SWITCH), getattr(w, _BUFFERS, True)) for w in self._wrappers]

    def start(self) -> None:
        """No more gradients are shared."""
        for wrapper in self._wrappers:
            setattr(wrapper, _SWITCH, False)
            setattr(wrapper, _BUFFERS, False)

    def restore(self) -> None:
        """Gradients are shared as they were."""
        self._put_back()

    @contextmanager
    def sharing(self, replicas: int) -> Iterator[None]:
        """Within it gradients are shared.

        Raises:
            ValueError: if nothing can share them.
        """
        if self._local and not self._wrappers and replicas > 1:
            raise ValueError(
                "to find the learning rate replicas must share their gradients for a moment: wrap the model in "
                "DistributedDataParallel, or call hdet.find_lr with such a wrapper before you make the ensemble (with "
                "a sharded model: on a copy that is placed on the whole mesh, with mesh=mesh)"
            )
        self._put_back()
        try:
            yield
        finally:
            self.start()

    def _put_back(self) -> None:
        for wrapper, (gradients, buffers) in zip(self._wrappers, self._before, strict=True):
            setattr(wrapper, _SWITCH, gradients)
            setattr(wrapper, _BUFFERS, buffers)
