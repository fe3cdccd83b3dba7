"""Averaging against its plain definition, for every kind of tensor, on real processes."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from cases import drawn
from processes import run
from torch import nn, optim

from hdet._replicas import Replicas
from hdet._tensors import converge, optimizer_state


def kinds(rank):
    """One tensor of each kind, different on every rank."""
    draw = drawn(100 + rank)
    return {
        "float32": draw(3, 4),
        "float64": draw(5, dtype=torch.float64),
        "bfloat16": draw(7, 3, dtype=torch.bfloat16),
        "float16": draw(9, dtype=torch.float16),
        "complex64": draw(4, 2, dtype=torch.complex64),
        "scalar": draw(),
        "transposed": draw(6, 5).t(),
        "strided": draw(10, 10)[::2, 1::3],
        "channels_last": draw(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded_storage": draw(20)[5:15],
        "largest": torch.full((3,), torch.finfo(torch.float32).min),
        "largest_bfloat16": torch.full((3,), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16),
        "larger_than_a_bucket": draw(70, 50),
        "non_contiguous_larger_than_a_bucket": draw(50, 70).t(),
    }


def average_kinds(bucket_bytes):
    replicas = Replicas()
    mine = kinds(replicas.rank)
    everyone = [kinds(r) for r in range(replicas.size)]
    storages = {name: (id(t), t.data_ptr(), t.stride()) for name, t in mine.items()}
    surroundings = mine["strided"]._base.clone()
    converge.average(list(mine.values()), replicas, bucket_bytes=bucket_bytes)
    for name, tensor in mine.items():
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        expected = sum(other[name].to(wide) for other in everyone) / replicas.size
        tolerance = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float64: 1e-15}.get(tensor.dtype, 1e-6)
        torch.testing.assert_close(tensor.to(wide), expected, rtol=tolerance, atol=tolerance, msg=name)
        if tensor.dtype in (torch.bfloat16, torch.float16):
            # averaged in single precision and rounded once: the nearest representable number
            exact = sum(o[name].float() / replicas.size for o in everyone)
            assert torch.equal(tensor, exact.to(tensor.dtype)) or replicas.size == 3, name
        assert storages[name] == (id(tensor), tensor.data_ptr(), tensor.stride()), f"{name} was replaced"
    around = torch.ones_like(surroundings, dtype=torch.bool)
    around[::2, 1::3] = False
    assert torch.equal(mine["strided"]._base[around], surroundings[around]), "memory outside the view was written"
    return mine


@pytest.mark.parametrize(("size", "bucket_bytes"), [(2, 1024), (2, 2**24), (3, 4096), (4, 1024)])
def test_every_kind_of_tensor(size, bucket_bytes):
    results = run(average_kinds, size, bucket_bytes)
    for other in results[1:]:
        for name, tensor in other.items():
            assert torch.equal(tensor, results[0][name]), f"{name} differs between replicas"


def count_collectives(tensors, total):
    calls = Counter()
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda *a, **k: (calls.update(["all_reduce"]), all_reduce(*a, **k))[1]
    sizes = [total // tensors] * tensors
    converge.average([torch.ones(n) for n in sizes], Replicas())
    return calls["all_reduce"]


def test_the_number_of_collectives_depends_on_bytes_not_on_tensors():
    few, many = (run(count_collectives, 2, n, 1_000_000)[0] for n in (4, 2000))
    assert few == many == 1
    assert run(count_collectives, 2, 5, 10_000_000)[0] == run(count_collectives, 2, 1000, 10_000_000)[0] == 3


def gone_wrong():
    mine = [torch.full((2,), float(dist.get_rank()))]
    with pytest.raises(RuntimeError, match="on purpose"), converge.averaged(mine, Replicas()):
        assert mine[0].tolist() == [0.5, 0.5]
        raise RuntimeError("on purpose")
    return mine[0].tolist()


def test_averaged_restores_after_an_exception():
    assert run(gone_wrong, 2) == [[0.0, 0.0], [1.0, 1.0]]


def test_one_replica_averages_to_itself():
    t = torch.randn(4)
    before = t.clone()
    converge.average([t], Replicas())
    assert torch.equal(t, before)


def test_parameters_are_found_once_and_frozen_ones_are_left_alone():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "empty": nn.Linear(0, 3, bias=False)})
    model["b"].weight = model["a"].weight
    model["b"].bias.requires_grad_(False)
    optimizer = optim.SGD([{"params": list(model.parameters())}], lr=0.1)
    found = converge.parameters([optimizer])
    assert {id(p) for p in found} == {id(model["a"].weight), id(model["a"].bias)}
    later = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [later]})
    assert any(p is later for p in converge.parameters([optimizer]))


def test_expanded_buffers_are_averaged_once():
    module = nn.Module()
    module.register_buffer("mask", torch.ones(1, 2).expand(3, 2))
    found = converge.buffers(module)
    assert [tuple(t.shape) for t in found] == [(1, 2)]
    with converge.averaged(found, Replicas(), kept=list(module.buffers())):
        module.mask[0].zero_()
    assert module.mask.tolist() == [[1.0, 1.0]] * 3


def test_buffers_and_followers():
    norm = nn.BatchNorm1d(3)
    assert [b.dtype for b in converge.buffers(norm)] == [torch.float32] * 2
    assert converge.buffers(None) == []
    ema = optim.swa_utils.AveragedModel(norm)
    extra = torch.ones(2)
    found = converge.module_tensors([ema, extra])
    assert len(found) == 5
    assert all(t.is_floating_point() for t in found)


@pytest.mark.parametrize(
    ("make", "differs"),
    [
        (lambda p: optim.SGD(p, lr=0.1, momentum=0.9), False),
        (lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1), True),
        (lambda p: optim.Adam(p), False),
        (lambda p: optim.Adam(p, weight_decay=0.1), True),
        (lambda p: optim.AdamW(p, weight_decay=0.1), False),
        (lambda p: optim.NAdam(p, weight_decay=0.1, decoupled_weight_decay=True), False),
        (lambda p: optim.NAdam(p, weight_decay=0.1), True),
        (lambda p: optim.ASGD(p), True),
        (lambda p: optim.Rprop(p), True),
        (lambda p: type("Custom", (optim.Adam,), {})(p), True),
    ],
)
def test_optimizer_state_is_averaged_where_it_can_differ(make, differs):
    p = nn.Parameter(torch.ones(4))
    optimizer = make([p])
    p.grad = torch.ones(4)
    optimizer.step()
    assert optimizer_state.can_differ(optimizer, {"lr"}) is differs
    found = optimizer_state.that_differs([optimizer], {"lr"})
    assert bool(found) is differs
    assert not any(t is optimizer.state[p].get("step") for t in found)
    assert optimizer_state.can_differ(optimizer, {"lr", "betas"})


def test_layout_tells_shapes_and_dtypes_apart():
    a, b = torch.ones(2, 3), torch.ones(3, 2)
    assert converge.layout([a, b]) == converge.layout([b.T.contiguous(), a.T.contiguous()])
    assert len({converge.layout(x) for x in ([a], [b], [a, b], [b, a], [a.double()])}) == 5
