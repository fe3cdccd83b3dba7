"""What is saved comes back bit for bit, from shares of 1/N, on real processes and in one."""

from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from cases import drawn
from processes import run
from torch import nn, optim

from hdet._replicas import Replicas, find_replicas
from hdet._tensors.snapshot import Snapshot
from hdet.in_process import in_process


def kinds(seed, large=(70, 50)):
    """One tensor of each kind, the same on every replica."""
    draw = drawn(seed)
    return {
        "float32": draw(3, 4),
        "float64": draw(5, dtype=torch.float64),
        "bfloat16": draw(7, 3, dtype=torch.bfloat16),
        "float16": draw(9, dtype=torch.float16),
        "float8": draw(5).to(torch.float8_e4m3fn),
        "complex64": draw(4, 2, dtype=torch.complex64),
        "complex128": draw(3, 2, dtype=torch.complex128).t(),
        "bool": draw(6) > 0,
        "uint8": (draw(6) * 100).to(torch.uint8),
        "int16": (draw(6) * 100).to(torch.int16),
        "int64": (draw(2) * 1e6).long(),
        "scalar": draw(),
        "step": torch.tensor(float(seed)),
        "empty": draw(0, 3),
        "transposed": draw(6, 5).t(),
        "strided": draw(10, 10)[::2, 1::3],
        "strided_3d": draw(4, 6, 10)[:, ::2, 1::3],
        "channels_last": draw(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "expanded": draw(1, 4).expand(3, 4),
        "odd": torch.tensor([-0.0, 0.0, torch.nan, -torch.nan, torch.inf, 1e-45, -1e-45]),
        "parameter": nn.Parameter(draw(3)),
        "larger_than_a_bucket": draw(*large),
        "non_contiguous_larger_than_a_bucket": draw(*reversed(large)).t(),
    }


def bits(tensor):
    tensor = tensor.detach().contiguous()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten().view(torch.uint8)


def kinds_for(bucket_bytes):
    """The same, of which two are larger than a bucket, but small where each element is a bucket and a collective."""
    return partial(kinds, large=(70, 50) if bucket_bytes > 1 else (3, 2))


def save_and_restore(bucket_bytes):
    replicas, kinds = find_replicas(), kinds_for(bucket_bytes)
    mine, saved = kinds(1), kinds(1)
    snapshot = Snapshot(replicas, bucket_bytes)
    assert not snapshot.saved
    snapshot.save([torch.ones(3)])  # another layout, given up
    snapshot.save(list(kinds(2).values()))
    held = [t.data_ptr() for t in snapshot.shares]
    snapshot.save(list(mine.values()))
    assert snapshot.saved
    assert held == [t.data_ptr() for t in snapshot.shares], "buffers are reused"
    around = mine["strided"]._base.clone()
    places = {name: (id(t), t.data_ptr(), t.stride()) for name, t in mine.items()}
    for again in range(2):
        with torch.no_grad():
            for name, other in kinds(100 + replicas.rank + again).items():
                (mine[name][:1] if name == "expanded" else mine[name]).copy_(other[:1] if name == "expanded" else other)
        snapshot.restore(list(mine.values()))
        for name, tensor in mine.items():
            assert torch.equal(bits(tensor), bits(saved[name])), name
            assert places[name] == (id(tensor), tensor.data_ptr(), tensor.stride()), f"{name} was replaced"
    outside = torch.ones_like(around, dtype=torch.bool)
    outside[::2, 1::3] = False
    assert torch.equal(mine["strided"]._base[outside], around[outside]), "memory outside the view was written"
    return [t.numel() for t in snapshot.shares], snapshot.nbytes


@pytest.mark.parametrize("start", [run, in_process])
@pytest.mark.parametrize(("size", "bucket_bytes"), [(1, 1024), (2, 1024), (3, 2**24), (4, 1000), (4, 1)])
def test_everything_comes_back_bit_for_bit(start, size, bucket_bytes):
    kept = start(save_and_restore, size, bucket_bytes)
    # an expanded tensor has 4 elements, not 12; complex ones are two reals each
    tensors = [t[:1] if name == "expanded" else t for name, t in kinds_for(bucket_bytes)(1).items()]
    assert sum(nbytes for _, nbytes in kept) == sum(t.nbytes for t in tensors)
    for shares in zip(*(shares for shares, _ in kept), strict=True):
        assert max(shares) - min(shares) <= 1


def count_collectives(tensors, total):
    calls = Counter()
    names = ("all_gather_single", "all_gather_into_tensor", "all_reduce", "all_gather", "broadcast")
    for name in filter(partial(hasattr, dist), names):
        original = getattr(dist, name)
        setattr(dist, name, lambda *a, f=original, n=name, **k: (calls.update([n]), f(*a, **k))[1])
    snapshot = Snapshot(Replicas())
    mine = [torch.ones(total // tensors) for _ in range(tensors)]
    snapshot.save(mine)
    assert not calls, "saving takes no traffic"
    snapshot.restore(mine)
    return calls.total()


def test_the_number_of_collectives_depends_on_bytes_not_on_tensors():
    few, many = (run(count_collectives, 2, n, 1_000_000)[0] for n in (4, 2000))
    assert few == many == 1
    assert run(count_collectives, 2, 1000, 10_000_000)[0] == 3


def test_a_training_run_goes_on_as_it_did():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
    x = torch.randn(64, 4)

    def tensors():
        state = [v for s in optimizer.state.values() for v in s.values()]
        return [*model.parameters(), *model.buffers(), *state]

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return [t.detach().clone() for t in tensors()]

    train(3)
    snapshot = Snapshot(Replicas())
    snapshot.save(tensors())
    first = train(5)
    with torch.no_grad():
        for t in tensors():
            t.fill_(7) if not t.is_floating_point() else t.fill_(torch.nan)
    snapshot.restore(tensors())
    assert all(torch.equal(a, b) for a, b in zip(first, train(5), strict=True))


class Faked(Replicas):
    def __init__(self, rank, size):
        self.rank, self.size = rank, size


def test_each_replica_keeps_cpu_tensors_whole_where_they_cannot_travel():
    weights, step = torch.empty(1000, device="meta"), torch.tensor(3.0)
    snapshot = Snapshot(Faked(1, 4))
    snapshot.save([weights, step])
    assert [t.numel() for t in snapshot.shares] == [250]
    assert [t.view(torch.float32).item() for t in snapshot.whole] == [3.0]
    snapshot.save([step])  # nothing but CPU tensors: shared out like all others
    assert ([t.numel() for t in snapshot.shares], snapshot.whole) == ([0], [])


def test_tied_tensors_are_saved_once():
    t = torch.ones(4)
    snapshot = Snapshot(Replicas())
    snapshot.save([t, t])
    assert snapshot.nbytes == 16


def test_nothing_to_restore_and_other_tensors_are_refused():
    snapshot = Snapshot(Replicas())
    with pytest.raises(RuntimeError, match=r"no snapshot to restore; call save\(\) first"):
        snapshot.restore([torch.ones(2)])
    snapshot.save([torch.ones(2)])
    for others in ([torch.ones(3)], [torch.ones(2).double()], [torch.ones(2), torch.ones(2)], []):
        with pytest.raises(RuntimeError, match="must be those that were saved"):
            snapshot.restore(others)


def test_nothing_at_all():
    snapshot = Snapshot(Replicas())
    snapshot.save([torch.ones(0)])
    snapshot.restore([torch.ones(0)])
    assert snapshot.nbytes == 0
