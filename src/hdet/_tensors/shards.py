"""Sharded models: which setups can be explored, and this rank's part of a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from hdet._replicas import ShardedReplicas, Where
from hdet._tensors.parameters import parameters_of

if TYPE_CHECKING:  # slow to import, and whoever has a DTensor has imported it
    from torch.distributed.tensor import DTensor, Placement

_ONE_MODEL = (
    "{} parameters over the ranks: there is one model, so replicas cannot diverge. Use spread 0, wrap the model in "
    "DistributedDataParallel instead, or shard it within replicas: mesh = init_device_mesh(device, (replicas, shards), "
    'mesh_dim_names=("replicate", "shard")); fully_shard(model, mesh=mesh); hdet.Ensemble(..., replicas=mesh)'
)


def part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: the tensor itself, or the local part of a DTensor, which shares its memory."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def reshard(model: nn.Module | None) -> None:
    """Free the whole weights that FSDP2 gathered for a forward pass without a backward pass.

    Otherwise the next forward pass would use them instead of the updated parts. Sends nothing.
    """
    for module in gathering(model):
        module.reshard()


def gathering(model: nn.Module | None) -> list[Any]:
    """The modules that FSDP2 gathers weights for."""
    return [module for module in model.modules() if is_a("FSDPModule", module)] if model is not None else []


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor."""
    return type(tensor) is not Tensor and type(tensor) is not nn.Parameter and is_a("DTensor", tensor)


def is_sharded(tensor: Tensor) -> bool:
    """Whether ranks hold parts of it."""
    return is_dtensor(tensor) or getattr(tensor, "_fsdp_flattened", False) or is_a("FlatParameter", tensor)


def is_a(class_name: str, thing: object) -> bool:
    """Whether `thing` is an instance of a class of that name, without importing its module."""
    return any(c.__name__ == class_name for c in type(thing).__mro__)


def check_shards(
    optimizers: Sequence[Optimizer],
    model: nn.Module | None,
    where: Where | None,
    gradients: Literal["shared", "local"],
) -> None:
    """Raise if a model is sharded across replicas, or does not share its gradients as requested."""
    parameters = parameters_of(*optimizers)
    modules = list(model.modules()) if model is not None else []
    if any(is_a("FullyShardedDataParallel", m) for m in modules) or any(
        is_sharded(p) and not is_dtensor(p) for p in parameters
    ):
        raise ValueError(_ONE_MODEL.format("FullyShardedDataParallel shards the"))
    spread = [p for p in parameters if is_dtensor(p)]
    if not isinstance(where, DeviceMesh):
        if spread:
            raise ValueError(_ONE_MODEL.format("the optimizer holds DTensors, which spread the"))
        return
    if spread and model is None:
        raise ValueError("a sharded model must be given, as FSDP2 may keep whole weights in it: write model=model")
    replicas = ShardedReplicas(where)
    if replicas.size == 1:
        return  # nothing can diverge, as the ensemble warns
    members = set(replicas.members)
    crossing = [list(_crossing(p, members)) for p in spread]
    if any(not placement.is_replicate() for row in crossing for placement in row):
        raise ValueError(_ONE_MODEL.format("the optimizer holds DTensors, which spread the"))
    if model is not None:
        _check_gradients(gradients, crossing, modules)


def _crossing(p: DTensor, members: Iterable[int]) -> Iterator[Placement]:
    """How `p` is placed along those dimensions of its mesh that reach other replicas."""
    mesh = p.device_mesh
    for dim, placement in enumerate(p.placements):
        if not set(dist.get_process_group_ranks(mesh.get_group(dim))) <= set(members):
            yield placement


def _check_gradients(gradients: str, crossing: Sequence[Sequence[Placement]], modules: Sequence[nn.Module]) -> None:
    sharing = any(crossing) or any(hasattr(m, "require_backward_grad_sync") for m in modules)
    if gradients == "local" and any(crossing):
        raise ValueError(
            "the model is placed on the whole mesh, whose replicas then share their gradients at every step; for "
            'gradients="local" shard it within replicas only: fully_shard(model, mesh=mesh["shard"])'
        )
    if gradients == "shared" and not sharing:
        raise ValueError(
            "nothing shares the gradients of different replicas: the model is not placed on the mesh, or on a part of "
            'it only. Write fully_shard(model, mesh=mesh) with the whole of it, or Ensemble(..., gradients="local")'
        )
