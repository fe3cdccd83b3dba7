"""Warm noisy initialisation: each replica starts from its own noisy copy of a trained model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from hdet._replicas import Where, find_replicas
from hdet._replicas.agreement import Agreement, claim
from hdet._replicas.fingerprint import fingerprint
from hdet._tensors.parameters import once
from hdet._tensors.shards import is_sharded

# An attribute of noisy parameters and of their modules, whose parameters FSDP2 replaces, until an ensemble takes them.
_NOISY = "_hdet_noisy"


@torch.no_grad()
def warm_init(
    model: nn.Module,
    noise: float = 0.01,
    *,
    per: Literal["tensor", "model"] = "tensor",
    seed: int = 0,
    replicas: Where | None = None,
    unwrapped: bool = False,
) -> None:
    """Add independent Gaussian noise to the trainable parameters of this replica, in place.

    Call it after wrapping the model in DistributedDataParallel, which broadcasts rank 0's weights and would
    wipe the noise out, and before the first step of an `Ensemble` or `OneCycleAutoLR`. Its first round ends in an
    average of the replicas, whatever is explored, which shrinks the noise to 1/sqrt(N) of its size. Without an ensemble
    nothing averages the replicas, and they stay different.

    Args:
        model: the wrapped model, with the weights of the checkpoint loaded.
        noise: the size of the noise relative to the weights; nu in the paper.
        per: "tensor": std = noise * ||p|| / sqrt(numel(p)) for each parameter (the published code);
            "model": one std from the norm of all parameters together (the paper).
        seed: the noise is a function of (seed, replica); the global random generators are left alone.
        replicas: as in `hdet.Ensemble`: a process group or a device mesh; by default all ranks.
        unwrapped: True if this model is never wrapped in DistributedDataParallel.

    Raises:
        ValueError: if the model is not wrapped yet, or is sharded already, or `noise` is negative or not finite.
    """
    with Agreement("hdet.warm_init", replicas):
        if isinstance(noise, bool) or not isinstance(noise, (int, float)) or not 0 <= noise < math.inf:
            raise ValueError(f"noise must be at least 0 and finite, got {noise!r}; write for example noise=0.01")
        if per not in ("tensor", "model"):
            raise ValueError(f'per must be "tensor" or "model", got {per!r}')
        everyone = find_replicas(replicas)
        if everyone.size > 1 and everyone.wrapping_broadcasts and not unwrapped and not _wrapped(model):
            raise ValueError(
                "warm_init must come after DistributedDataParallel, which broadcasts rank 0's weights and would wipe "
                "the noise out; write model = DistributedDataParallel(model); warm_init(model), or pass "
                "unwrapped=True if this model is never wrapped"
            )
        trained = [p for p in model.parameters() if p.requires_grad and p.numel()]
        if any(map(is_sharded, trained)):
            raise ValueError(
                "warm_init needs whole parameters, but these are sharded; call it before fully_shard, with the mesh "
                "of the replicas: warm_init(model, replicas=mesh)"
            )
        claim(fingerprint({"noise": noise, "per": per, "seed": seed}, model=model, followers=trained))
    squares = [_square(p) for p in trained]
    whole = sum(squares) / sum(p.numel() for p in trained) if per == "model" and trained else 0.0
    for number, (p, square) in enumerate(zip(trained, squares, strict=True)):
        mean_square = square / p.numel() if per == "tensor" else whole
        _add_noise(p, noise * math.sqrt(mean_square), _seed(seed, everyone.rank, number))
    torch.clear_autocast_cache()  # the caller's autocast keeps casts of the old weights until it ends
    if everyone.size > 1 and noise > 0:
        _mark(model, trained)


def _mark(model: nn.Module, noisy: Sequence[Tensor]) -> None:
    known = {id(p) for p in noisy}
    for p in noisy:
        setattr(p, _NOISY, True)
    for module in model.modules():
        if any(id(p) in known for p in module.parameters(recurse=False)):
            vars(module)[_NOISY] = True


def take_noise(model: nn.Module | None, parameters: Iterable[Tensor]) -> list[Tensor]:
    """The parameters with this replica's own noise, among `model`'s and these. Returns them once: the caller must
    average them.
    """
    modules = [] if model is None else [m for m in model.modules() if vars(m).pop(_NOISY, False)]
    held = [p for module in modules for p in module.parameters(recurse=False) if p.requires_grad]
    marked = [p for p in (*parameters, *([] if model is None else model.parameters())) if getattr(p, _NOISY, False)]
    found = once((*held, *marked))
    for p in found:
        vars(p).pop(_NOISY, None)
    return found


def _wrapped(model: nn.Module) -> bool:
    return any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules())


def _square(p: Tensor) -> float:
    """||p||^2, in at least single precision."""
    norm = torch.linalg.vector_norm(p.to(torch.promote_types(p.dtype, torch.float32)))
    return float(norm) ** 2


def _add_noise(p: Tensor, std: float, seed: int) -> None:
    generator = torch.Generator(p.device).manual_seed(seed)
    # Drawn in at least single precision, so that half precision is rounded once.
    dtype = torch.promote_types(p.dtype, torch.float32)
    drawn = torch.randn(p.shape, generator=generator, dtype=dtype, device=p.device)
    p.copy_(p.to(dtype) + std * drawn)


def _seed(seed: int, replica: int, number: int) -> int:
    counter = f"warm_init/{seed}/{replica}/{number}".encode()
    return int.from_bytes(hashlib.blake2b(counter, digest_size=8).digest(), "big") >> 1
