import functools
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import run
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import hdet


class Numbers(Dataset):
    """Sample i is i, and a random number."""

    def __init__(self, size=100):
        self.size, self.asked = size, []

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        self.asked.append(i)
        return torch.tensor([float(i)]), torch.rand(1) + random.random() + np.random.rand()


def make(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)).to(dtype)


def data(size=48):
    x = torch.randn(size, 3, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True))


def loss_fn(model, batch):
    return mse_loss(model(batch[0]), batch[1])


def everything(model):
    """Whatever a probe could disturb, as bits."""
    return (
        [t.detach().numpy().tobytes() for t in (*model.parameters(), *model.buffers())],
        [None if p.grad is None else p.grad.numpy().tobytes() for p in model.parameters()],
        [module.training for module in model.modules()],
        [id(t) for t in model.buffers()],
        torch.get_rng_state().tolist(),
        random.getstate(),
        str(np.random.get_state()),
        (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
    )


def test_it_draws_different_samples_for_each_index_and_the_same_for_the_same():
    def seen(seed, index):
        numbers = Numbers()
        batches = []
        probe = hdet.Probe(numbers, lambda model, b: batches.append(b) or b[0].mean(), size=20, chunk=7, seed=seed)
        probe.score(nn.Identity(), index)
        assert [len(x) for x, _ in batches] == [6, 7, 7]
        assert len(set(numbers.asked)) == 20
        return torch.cat([torch.cat(b, 1) for b in batches])

    first = seen(0, 0)
    assert torch.equal(first, seen(0, 0))  # with what the data set draws at random, too
    assert not torch.equal(first, seen(0, 1))
    assert not torch.equal(first, seen(1, 0))


def test_a_huge_data_set_is_not_listed():
    class Huge(Numbers):
        def __len__(self):
            return 2**60

    huge = Huge()
    hdet.Probe(huge, lambda model, b: b[0].mean(), size=50).score(nn.Identity(), 3)
    assert len(set(huge.asked)) == 50


def test_the_score_is_the_mean_over_samples_with_batch_statistics():
    model = make()
    probe = hdet.Probe(data(), loss_fn, size=20, chunk=8)
    chunks = []
    hdet.Probe(data(), lambda m, b: chunks.append(b) or loss_fn(m, b), size=20, chunk=8).score(model, 5)
    twin = nn.Sequential(model[0], model[1], nn.Identity(), model[3])
    with torch.no_grad():
        expected = sum(loss_fn(twin, b).item() * len(b[0]) for b in chunks) / 20
    found = probe.score(model, 5)
    assert found.dtype == torch.float64
    assert found.shape == ()
    assert found.item() == pytest.approx(expected, rel=1e-6)
    assert (probe.samples, probe.held_out) == (20, False)
    assert probe.seconds > 0


def test_frozen_norms_use_their_running_statistics():
    model = make()
    probe = hdet.Probe(data(), loss_fn)
    batch = probe.score(model, 0)
    model[1].eval()
    frozen = probe.score(model, 0)
    assert frozen != batch
    model.eval()  # the whole model: nothing is frozen, it is just not in training
    assert probe.score(model, 0) == batch


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d, nn.SyncBatchNorm, lambda n: nn.InstanceNorm1d(n, track_running_stats=True)]
)
def test_norms(norm):
    model = nn.Sequential(nn.Unflatten(1, (1, 3)), norm(1)).train()
    before = everything(model)
    score = hdet.Probe(data(), lambda m, b: m(b[0]).square().mean()).score(model, 0)
    assert score.item() == pytest.approx(1, abs=1e-3)  # unit variance: the statistics are the batch's
    assert everything(model) == before


@pytest.mark.parametrize("failing", [False, True])
def test_everything_is_left_as_it_was(failing):
    model = make()
    loss_fn(model, (torch.ones(4, 3), torch.ones(4, 1))).backward()
    model[3].eval()

    def disturbing(inner, batch):
        assert not torch.is_grad_enabled()
        assert not inner[2].training
        torch.rand(3), random.random(), np.random.rand()
        inner[1].train()
        loss = loss_fn(inner, batch)
        if failing:
            raise KeyError("on purpose")
        return loss

    probe = hdet.Probe(data(), disturbing)
    before = everything(model)
    if failing:
        with pytest.raises(KeyError):
            probe.score(model, 0)
    else:
        probe.score(model, 0)
    assert everything(model) == before


def test_random_losses_are_paired():
    probe = hdet.Probe(data(), lambda m, b: torch.rand(()))
    assert probe.score(make(0), 0) == probe.score(make(1), 0)
    assert probe.score(make(0), 0) != probe.score(make(0), 1)


def test_autocast_keeps_no_casts_without_gradients():
    model = nn.Linear(3, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hdet.Probe(data(), lambda m, b: m(b[0]).float().mean()).score(model, 0)
        loss = model(torch.ones(2, 3)).float().mean()
    loss.backward()
    assert model.weight.grad is not None


def test_a_graph_that_waits_for_backward_survives():
    model = make()
    loss = loss_fn(model, (torch.ones(4, 3), torch.ones(4, 1)))
    hdet.Probe(data(), loss_fn).score(model, 0)
    loss.backward()


def test_the_samples_are_kept_until_another_index_is_asked_for():
    numbers = Numbers()
    probe = hdet.Probe(numbers, lambda model, b: b[0].mean(), size=10)
    probe.score(nn.Identity(), 0)
    probe.score(nn.Identity(), 0)
    assert len(numbers.asked) == 10
    probe.score(nn.Identity(), 1)
    assert len(numbers.asked) == 20


def test_a_function_of_the_index():
    calls = []

    def batches(index):
        calls.append(index)
        return [torch.full((2, 1), index + 1.0), torch.full((6, 1), torch.rand(()).item())]

    probe = hdet.Probe(batches, lambda model, b: b.mean())
    first = probe.score(nn.Identity(), 2)
    assert probe.score(nn.Identity(), 2) == first
    assert calls == [2]
    with pytest.raises(TypeError, match="list of batches"):
        hdet.Probe(lambda index: torch.ones(2), loss_fn).score(nn.Identity(), 0)


def test_an_iterable_goes_on_and_starts_again():
    loader = DataLoader(torch.arange(6.0), batch_size=2)
    probe = hdet.Probe(loader, lambda model, b: b.mean(), batches=2)
    assert [probe.score(nn.Identity(), i).item() for i in (0, 0, 1, 2)] == [1.5, 1.5, 2.5, 3.5]
    exhausted = hdet.Probe(iter([torch.ones(1)]), lambda model, b: b.mean(), batches=2)
    with pytest.raises(ValueError, match="started again"):
        exhausted.score(nn.Identity(), 0)


def test_a_loader_of_samples_without_a_length():
    probe = hdet.Probe(DataLoader(Samples(), batch_size=1), lambda model, b: b.mean(), batches=2)
    assert probe.score(nn.Identity(), 0).item() == 1


def test_a_list_is_of_samples_or_with_batches_of_batches():
    listed = [torch.full((3,), float(i)) for i in range(6)]
    of_samples = hdet.Probe(listed, lambda model, b: b.mean() + 10 * b.dim(), size=6)
    assert of_samples.score(nn.Identity(), 0).item() == 22.5
    for kind in (list, tuple):
        of_batches = hdet.Probe(kind(listed), lambda model, b: b.mean() + 10 * b.dim(), batches=2)
        assert [of_batches.score(nn.Identity(), i).item() for i in range(4)] == [10.5, 12.5, 14.5, 10.5]
    with pytest.raises(ValueError, match="is empty or has ended"):
        hdet.Probe([], loss_fn, batches=2).score(nn.Identity(), 0)


def test_the_shuffling_of_a_loader_does_not_touch_the_generator():
    probe = hdet.Probe(DataLoader(torch.arange(8.0), batch_size=2, shuffle=True), lambda m, b: b.mean(), batches=1)
    before = torch.get_rng_state()
    probe.score(nn.Identity(), 0)
    assert torch.equal(before, torch.get_rng_state())


NESTED = {
    "x": (torch.arange(6).view(3, 2), [torch.tensor([True, False, True]), "name", None, 1.5]),
    3: torch.tensor(2j),
}


class Again:
    """An iterable and nothing more."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def stream(wrong=None):
    """The first replica's batches, as every replica sees them."""
    rank = hdet.find_replicas().rank
    seen = []
    batches = [NESTED, {"x": torch.full((2, 3), 7.0).bfloat16().T, "empty": torch.empty(0, 2)}]
    source = batches if wrong is None else [wrong]
    probe = hdet.Probe(Again(source if rank == 0 else []), lambda m, b: seen.append(b) or torch.zeros(()), batches=2)
    if wrong is not None:
        with pytest.raises(RuntimeError, match="replica 0 could not draw the probe: TypeError: batches that one"):
            probe.score(nn.Identity(), 0)
    else:
        probe.score(nn.Identity(), 0, hdet.find_replicas())
        probe.score(nn.Identity(), 0)
    return seen


@pytest.mark.parametrize("runner", [run, hdet.in_process])
def test_an_iterable_on_several_replicas(runner):
    for seen in runner(stream, 2):
        first, second = seen[:2]
        assert list(first) == ["x", 3]
        assert isinstance(first["x"], tuple)
        assert isinstance(first["x"][1], list)
        assert first["x"][1][1:] == ["name", None, 1.5]
        assert torch.equal(first["x"][0], NESTED["x"][0])
        assert torch.equal(first["x"][1][0], NESTED["x"][1][0])
        assert torch.equal(first[3], NESTED[3])
        assert second["x"].dtype == torch.bfloat16
        assert second["x"].shape == (3, 2)
        assert second["empty"].shape == (0, 2)


@pytest.mark.parametrize("runner", [run, hdet.in_process])
def test_what_cannot_travel_is_an_error_on_every_replica(runner):
    runner(stream, 2, slice(3))


def different_weights(size=40):
    """Replicas with their own weights: the loss at those, while DDP would give all of them rank 0's buffers."""
    rank = dist.get_rank()
    model = DistributedDataParallel(make(dtype=torch.float64))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + rank)
        model.module[1].running_mean.fill_(5.0 + rank)
    probe = hdet.Probe(TensorDataset(*(t.double() for t in data().tensors)), loss_fn, size=size, chunk=8)
    before = everything(model)
    if rank == 0:  # alone: a collective would hang
        probe.score(model, 1)
    score = probe.score(model, 0)
    assert everything(model) == before
    alone = make(dtype=torch.float64)
    with torch.no_grad():
        for p in alone.parameters():
            p.mul_(1 + rank)
    assert (
        hdet.Probe(TensorDataset(*(t.double() for t in data().tensors)), loss_fn, size=size, chunk=8).score(
            torch.compile(alone), 0
        )
        == score
    )
    return score.item()


def test_the_loss_at_a_replicas_own_weights_under_ddp():
    first, second = run(different_weights, 2)
    assert first != second


def shares(wrap):
    replicas = hdet.find_replicas()
    model = hdet.data_parallel(make(dtype=torch.float64)) if wrap else make(dtype=torch.float64)
    probe = hdet.Probe(TensorDataset(*(t.double() for t in data().tensors)), loss_fn, size=40, chunk=6)
    rows = replicas.gather(probe.share(model, 0, replicas))
    assert probe.samples < 40 or replicas.size == 1
    assert sum(row[1] for row in rows) == 40
    return sum(row[0] for row in rows) / 40, probe.score(model, 0).item()


@pytest.mark.parametrize(("runner", "size"), [(run, 2), (hdet.in_process, 2), (hdet.in_process, 9)])
def test_shares_add_up_to_the_score(runner, size):
    alone = shares(False)[0]
    for shared, score in runner(shares, size, True):
        assert shared == pytest.approx(alone, rel=1e-12)
        assert score == pytest.approx(alone, rel=1e-12)


class Samples(IterableDataset):
    def __iter__(self):
        return iter([torch.ones(1)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": 3}, "data must be a data set"),
        ({"data": Samples()}, "pass DataLoader"),
        ({"data": []}, "data must have at least 1 sample"),
        ({"loss_fn": None}, "loss_fn must be a function"),
        ({"size": 0}, "size must be at least 1 samples"),
        ({"size": 49}, "size must be at most the 48 samples"),
        ({"size": 2.0}, "size must be an int"),
        ({"chunk": -1}, "chunk must be at least 1"),
        ({"batches": 0}, "batches must be at least 1"),
        ({"batches": 2}, "batches must be None unless data is an iterable"),
        ({"data": lambda index: [], "batches": 2}, "batches must be None unless data is an iterable"),
        ({"seed": "a"}, "seed must be an int"),
        ({"data": lambda index: [], "size": 4}, "size must be None unless data is a data set"),
        ({"data": iter([]), "collate_fn": list}, "collate_fn must be None unless"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        hdet.Probe(**{"data": data(), "loss_fn": loss_fn, **arguments})


def of_outputs_and_targets(outputs, targets):
    return outputs.sub(targets).square().mean()


def half_squares(outputs, targets):
    return (outputs - targets).square().mean() / 2


@pytest.mark.parametrize(
    "wrong",
    [
        None, 64, torch.ones(()), nn.MSELoss(), mse_loss, functools.partial(mse_loss, reduction="sum"), make(),
        nn.Bilinear(1, 1, 1), lambda batch: 0, lambda model, batch, more: 0, of_outputs_and_targets, half_squares,
        lambda batch, model: model(batch[0]).mean(),
    ],
)  # fmt: skip
def test_what_is_no_function_of_a_model_and_a_batch_is_refused_with_what_to_write(wrong):
    with pytest.raises(
        TypeError, match=r"loss_fn (must be|is called).*\(model, batch\).*write for example Probe\(data, "
    ):
        hdet.Probe(data(), wrong).score(make(), 0)


class Judge:
    def mean(self, model, batch, scale=1.0):
        return scale * loss_fn(model, batch)

    def __call__(self, *given):
        return self.mean(*given)


@functools.wraps(nn.functional.mse_loss)  # and so its name, its module and what inspect takes for its arguments
def squares(model, batch):
    return loss_fn(model, batch)


@functools.wraps(loss_fn)
def logged(*given):
    return loss_fn(*given)


@functools.wraps(lambda outputs, targets, weight: 0)
def weighted(model, batch):
    return loss_fn(model, batch)


@pytest.mark.parametrize(
    "right",
    [
        Judge(), Judge().mean, functools.partial(Judge().mean, scale=1.0), lambda *a: loss_fn(*a), squares, logged,
        weighted,
    ],
)  # fmt: skip
def test_whatever_can_be_called_with_a_model_and_a_batch_is_taken(right):
    assert hdet.Probe(data(), right).score(make(), 0) == hdet.Probe(data(), loss_fn).score(make(), 0)


def test_an_error_of_the_users_own_in_loss_fn_stays_as_it_is():
    with pytest.raises(TypeError, match=r"^mine$"):
        hdet.Probe(data(), lambda model, batch: (_ for _ in ()).throw(TypeError("mine"))).score(make(), 0)


@pytest.mark.parametrize("loss", [torch.ones(2), torch.ones((), dtype=torch.long), None, 3.0])
def test_a_loss_that_is_none(loss):
    with pytest.raises(TypeError, match="loss_fn must return the mean loss"):
        hdet.Probe(data(), lambda model, b: loss).score(nn.Identity(), 0)
    with pytest.raises(TypeError, match="first dimension counts the samples"):
        hdet.Probe(lambda index: ["text"], loss_fn).score(nn.Identity(), 0)
    with pytest.raises(ValueError, match="index must be at least 0"):
        hdet.Probe(data(), loss_fn).score(nn.Identity(), -1)
