"""Checks on the device whether tensors are finite."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from hdet._tensors.converge import has_numbers, widened


def not_finite(gradients: Sequence[Tensor]) -> Tensor | None:
    """1.0 if any of these is not finite, else 0.0, on their device; None if there are none. No host read."""
    devices: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for value in map(_real, gradients):
        if has_numbers(value):
            devices.setdefault((value.device, value.dtype), []).append(value)
    found: Tensor | None = None
    for (device, dtype), members in devices.items():
        bad = torch.zeros((), device=device)
        if dtype == torch.float64 or dtype.itemsize == 1 or any(not m.is_contiguous() for m in members):
            bad = 1.0 - _all_finite(members).all().float()
        else:  # GradScaler's kernel, one launch for many tensors; it multiplies by 1, which changes nothing
            torch._amp_foreach_non_finite_check_and_unscale_(members, bad, torch.ones((), device=device))
        found = bad if found is None else torch.maximum(found, bad.to(found.device))
    return found


def looked_at(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that may be not finite, in the order of `flags()`: by dtype and device."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for t in tensors:
        if has_numbers(t):
            kinds.setdefault((t.device, t.dtype), []).append(t)
    return [t for members in kinds.values() for t in members]


@torch.no_grad()
def flags(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Whether each of `looked_at(tensors)` is finite: a vector on `device`. No host read."""
    found = []
    for _, members in itertools.groupby(looked_at(tensors), lambda t: (t.device, t.dtype)):
        found.append(_all_finite([_real(t) for t in members]).to(device))
    return torch.cat(found) if found else torch.ones(0, dtype=torch.bool, device=device)


def finite(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """1.0 if all of these are finite, else 0.0: a scalar on `device`. No host read."""
    return flags(tensors, device).all().double()


def _all_finite(members: Sequence[Tensor]) -> Tensor:
    """Whether each is finite, by its smallest and largest element: a sum could overflow."""
    return torch.stack([end for m in map(widened, members) for end in m.aminmax()]).isfinite().view(-1, 2).all(1)


def _real(tensor: Tensor) -> Tensor:
    """Its elements as real numbers, without a copy where that is possible."""
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
