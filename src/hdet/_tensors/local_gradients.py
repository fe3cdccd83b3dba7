"""Local gradients: replicas train on their own between converges, and steps send nothing.

DistributedDataParallel has a switch for it, which `no_sync()` sets for the duration of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hdet._tensors.shards import part
from hdet._user_warning import warn

Gradients = Literal["shared", "local"]
_SWITCH, _BUFFERS = "require_backward_grad_sync", "require_forward_param_sync"


class LocalGradients:
    """Turns off the sharing of gradients, and of buffers, in every wrapper inside `model`; `restore()` undoes it."""

    def __init__(self, model: nn.Module | None) -> None:
        modules = [] if model is None else list(model.modules())
        self._wrappers: list[Any] = [module for module in modules if hasattr(module, _SWITCH)]
        self._local = model is not None
        self._before = [(getattr(w, _SWITCH), getattr(w, _BUFFERS, True)) for w in self._wrappers]
        self._unsure = self._local and not self._wrappers  # a wrapper around the model would keep sharing
        self._sum: Tensor | None = None

    def start(self) -> None:
        """Stop sharing gradients."""
        for wrapper in self._wrappers:
            setattr(wrapper, _SWITCH, False)
            setattr(wrapper, _BUFFERS, False)

    def restore(self) -> None:
        """Share gradients as before."""
        self._put_back()

    @torch.no_grad()
    def note(self, parameters: Iterable[Tensor]) -> None:
        """Before the first step, keep the sum of its gradients to compare with other replicas. No host read."""
        if not self._unsure or self._sum is not None:
            return
        sums = [_sum(p.grad) for p in parameters if p.grad is not None]
        if sums:
            self._sum = torch.stack([total.to(sums[0].device) for total in sums]).sum()

    def told(self, device: torch.device) -> Tensor:
        """The number to send to the others at the end of a round."""
        if not self._unsure or self._sum is None:
            return torch.full((1,), math.nan, dtype=torch.float64, device=device)
        return self._sum.to(device).view(1)

    def read(self, everyone: Sequence[float]) -> None:
        """Warn if all replicas send the same number: something shares the gradients."""
        seen = [total for total in everyone if math.isfinite(total) and total != 0]
        self._sum = None  # no replica has a usable one: look at the next round's first step
        if not self._unsure or not seen:
            return
        self._unsure = False
        if len(everyone) > 1 and len(seen) == len(everyone) and len(set(seen)) == 1:
            warn(
                "gradients are to be local, but in the first step they were the same on all replicas: if a wrapper "
                "around the model shares them, pass the wrapper, Ensemble(..., model=ddp); if all replicas were given "
                "the same batch, give each its own"
            )

    @contextmanager
    def sharing(self, replicas: int) -> Iterator[None]:
        """Share gradients within this context.

        Raises:
            ValueError: if there is no wrapper that can share them.
        """
        if self._local and not self._wrappers and replicas > 1:
            raise ValueError(
                "to find the learning rate replicas must share their gradients for a moment: wrap the model in "
                "DistributedDataParallel, or call hdet.find_lr with such a wrapper before you make the ensemble (with "
                "a sharded model: on a copy that is placed on the whole mesh, with replicas=mesh)"
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


def _sum(gradient: Tensor) -> Tensor:
    """Its elements added up, as a double, without a copy of it."""
    gradient = part(gradient)
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient.resolve_conj())
    return gradient.sum(dtype=torch.promote_types(gradient.dtype, torch.float32)).double()
