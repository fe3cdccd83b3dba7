"""Local gradients: replicas train on their own between converges, and nothing is sent for a step.

DistributedDataParallel has a switch for it, the one that its `no_sync()` turns for the length of a block.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

Gradients = Literal["shared", "local"]
_SWITCH, _BUFFERS = "require_backward_grad_sync", "require_forward_param_sync"


class LocalGradients:
    """Turns off the sharing of gradients, and of buffers, in every wrapper inside `model`; `restore()` turns it on."""

    def __init__(self, model: nn.Module | None) -> None:
        modules = [] if model is None else list(model.modules())
        self._wrappers: list[Any] = [module for module in modules if hasattr(module, _SWITCH)]

    def start(self) -> None:
        """No more gradients are shared."""
        for wrapper in self._wrappers:
            setattr(wrapper, _SWITCH, False)
            setattr(wrapper, _BUFFERS, False)

    def restore(self) -> None:
        """Gradients are shared again."""
        for wrapper in self._wrappers:
            setattr(wrapper, _SWITCH, True)
            setattr(wrapper, _BUFFERS, True)
        self._wrappers = []
