"""Local gradients: replicas train on their own between converges, and nothing is sent for a step.

DistributedDataParallel has a switch for it, the one that its `no_sync()` turns for the length of a block.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hdet.replicas import Replicas
from hdet.shards import part

Gradients = Literal["shared", "local"]
_SWITCH, _BUFFERS = "require_backward_grad_sync", "require_forward_param_sync"


class LocalGradients:
    """Turns off the sharing of gradients, and of buffers, in every wrapper inside `model`; `restore()` undoes it."""

    def __init__(self, model: nn.Module | None) -> None:
        modules = [] if model is None else list(model.modules())
        self._wrappers: list[Any] = [module for module in modules if hasattr(module, _SWITCH)]
        self._local = model is not None
        self._before = [(getattr(w, _SWITCH), getattr(w, _BUFFERS, True)) for w in self._wrappers]
        self._unsure = self._local and not self._wrappers  # a wrapper around the model would go on sharing
        self._sum: Tensor | None = None

    def start(self) -> None:
        """No more gradients are shared."""
        for wrapper in self._wrappers:
            setattr(wrapper, _SWITCH, False)
            setattr(wrapper, _BUFFERS, False)

    def restore(self) -> None:
        """Gradients are shared as they were."""
        self._put_back()

    @torch.no_grad()
    def note(self, parameters: Iterable[Tensor]) -> None:
        """Before the first step: keep the sum of its gradients. No host read."""
        if not self._unsure or self._sum is not None:
            return
        gradients = [part(p.grad) for p in parameters if p.grad is not None]
        sums = [(g.coalesce().values() if g.is_sparse else g).sum(dtype=torch.float64) for g in gradients]
        if sums:
            self._sum = torch.stack([total.to(sums[0].device) for total in sums]).sum()

    def warn_if_shared(self, replicas: Replicas, device: torch.device) -> None:
        """At the first converge: warn if the first step's gradients were the same on all replicas. Collective."""
        if not self._unsure or replicas.size == 1:
            return
        self._unsure = False
        mine = torch.zeros(1, dtype=torch.float64, device=device) if self._sum is None else self._sum.to(device).view(1)
        everyone = [row[0] for row in replicas.gather(mine)]
        if everyone[0] != 0 and all(total == everyone[0] for total in everyone):
            warnings.warn(
                "gradients are to be local, but in the first step they were the same on all replicas: if a wrapper "
                "around the model shares them, pass the wrapper, Ensemble(..., model=ddp); if all replicas were given "
                "the same batch, give each its own",
                stacklevel=6,
            )

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
