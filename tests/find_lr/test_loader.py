"""`find_lr(model, optimizer, loader, loss_fn)`: what it takes from a loader, and the loader as it was."""

import collections
import contextlib
import dataclasses
import io
import random
import tracemalloc
import typing

import numpy as np
import pytest
import torch
from processes import run
from test_find_lr import Net, batch, bits, everything, find, loss_fn, make, plain_net
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

import hdet
from hdet._find_lr import loader as loaders
from hdet._find_lr.loader import on_host, read, to_device
from hdet._find_lr.workload import spread_out
from hdet._tensors.attributes import Attributes

STEPS = 2000


class Samples(Dataset):
    """The samples of all batches of `test_find_lr`; counts how often it was read, and draws its own noise."""

    def __init__(self, size=64 * 80):
        pairs = [batch(index) for index in range(size // 64)]
        self.x, self.y = (torch.cat([pair[k] for pair in pairs]) for k in (0, 1))
        self.reads, self.noise, self.numpy = 0, torch.Generator().manual_seed(3), np.random.default_rng(4)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.reads += 1
        drawn = 1e-9 * (torch.rand((), generator=self.noise, dtype=torch.float64) + self.numpy.random())
        return self.x[index] + drawn, self.y[index]


def make_loader(**options):
    data = Samples()
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(5))
    return DataLoader(data, 64, sampler=sampler, drop_last=True, **options)


def state_of(loader):
    data = loader.dataset
    return [
        data.reads, data.noise.get_state().tolist(), str(data.numpy.bit_generator.state), id(loader._iterator),
        loader.sampler.generator.get_state().tolist(), torch.get_rng_state().tolist(), random.getstate(),
        str(np.random.get_state()), sorted(vars(loader)),
    ]  # fmt: skip


def adamw(model, lr=1e-5, **options):
    return optim.AdamW(model.parameters(), lr=lr, **options)


@pytest.mark.parametrize("kind", [Net, plain_net])
def test_it_agrees_with_a_step_function_of_ones_own(kind):
    model = make(kind=kind)
    expected = find(model, adamw(model), total_steps=STEPS)
    found = hdet.find_lr(model, adamw(model), make_loader(), loss_fn, total_steps=STEPS)
    assert found.rate == pytest.approx(expected.rate, rel=0.3)
    assert found.total_steps == STEPS


def test_everything_is_as_before_the_loader_too():
    torch.manual_seed(1)
    loader, model = make_loader(), make()
    optimizer = adamw(model)
    loss_fn(model, batch(0)).backward()
    before, loaders = everything(model, optimizer), state_of(loader)
    first = hdet.find_lr(model, optimizer, loader, loss_fn, total_steps=STEPS)
    assert everything(model, optimizer) == before
    assert state_of(loader) == loaders
    again = hdet.find_lr(model, optimizer, loader, loss_fn, total_steps=STEPS)
    assert first.fine == again.fine
    with_search = [b[0].sum().item() for b in loader]
    assert with_search == [b[0].sum().item() for b in make_loader()]  # training reads what it would have read


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("CUDA out of memory"), ValueError("odd")])
def test_everything_is_as_before_after_an_error(error):
    calls = 0

    def failing(model, pair):
        nonlocal calls
        calls += 1
        if calls == 40:
            raise error
        return loss_fn(model, pair)

    loader, model = make_loader(), make()
    optimizer = adamw(model)
    before, loaders = everything(model, optimizer), state_of(loader)
    with pytest.raises(error if isinstance(error, type) else type(error)):
        hdet.find_lr(model, optimizer, loader, failing, total_steps=STEPS)
    assert everything(model, optimizer) == before
    assert state_of(loader) == loaders


def test_workers_that_stay_and_an_iterator_under_way_go_on():
    loader = make_loader(num_workers=1, persistent_workers=True)
    plain = [pair[0].sum().item() for pair in make_loader()]
    under_way = iter(loader)
    seen = [next(under_way)[0].sum().item() for _ in range(3)]
    model = make()
    hdet.find_lr(model, adamw(model), loader, loss_fn, total_steps=STEPS)
    assert loader._iterator is under_way
    seen += [pair[0].sum().item() for pair in under_way]
    assert seen == pytest.approx(plain)
    under_way._shutdown_workers()


class Counting(nn.Module):
    """Keeps what users keep in a module: outputs, counters, a running metric."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 1, dtype=torch.float64)
        self.outputs, self.calls = {"train": []}, 0
        self.total = torch.zeros(())

    def forward(self, x):
        out = self.net(x)
        self.calls += 1
        self.outputs["train"].append(out.detach())
        self.total += 1
        self.last = out
        return out


def test_what_a_module_keeps_in_attributes_is_as_before():
    model = Counting()
    with torch.no_grad():
        model(batch(0)[0])
    last, outputs = model.last, model.outputs["train"]
    hdet.find_lr(model, adamw(model), make_loader(), loss_fn, total_steps=STEPS)
    assert (model.calls, len(outputs), model.total.item()) == (1, 1, 1.0)
    assert model.last is last
    assert model.outputs["train"] is outputs


# What goes with a training loop


def by_hand(model, optimizer, loader, accumulate, norm):
    """The search with a step function that does by hand what the options do."""
    kept = list(loader)[: 68 * accumulate]
    chosen = spread_out(len(kept), 4 * accumulate)
    trained, scored = [b for n, b in enumerate(kept) if n not in chosen], [kept[n] for n in sorted(chosen)]

    def step(index):
        for number in range(accumulate):
            pair = trained[(index * accumulate + number) % len(trained)]
            (loss_fn(model, pair) / accumulate).backward()
        if norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), norm)

    torch.manual_seed(1)  # for the dropout
    return hdet.find_lr(model, optimizer, step, probe=hdet.Probe(lambda index: scored, loss_fn), total_steps=STEPS)


@pytest.mark.parametrize(("accumulate", "norm"), [(4, None), (1, 0.5), (4, 0.5)])
def test_accumulation_and_clipping_are_those_of_a_loop_by_hand(accumulate, norm):
    model = make()
    sgd = optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    options = {"accumulate": accumulate, "clip_grad_norm": norm, "total_steps": STEPS}
    torch.manual_seed(1)
    found = hdet.find_lr(model, sgd, make_loader(), loss_fn, **options)
    expected = by_hand(model, sgd, make_loader(), accumulate, norm)
    assert found.rate == pytest.approx(expected.rate, rel=1e-6)
    if norm is not None:
        plain = hdet.find_lr(model, sgd, make_loader(), loss_fn, total_steps=STEPS)
        assert found.rate != pytest.approx(plain.rate, rel=0.3)  # it matters here


@pytest.mark.parametrize("where", ["around", "inside"])
def test_bf16_autocast_gives_about_the_answer_of_fp32(where):
    loader = [tuple(t.float() for t in batch(index)) for index in range(68)]
    model = make(torch.float32)
    expected = hdet.find_lr(model, adamw(model), loader, loss_fn, total_steps=STEPS)

    def cast(model, pair):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_fn(model, pair)

    around = torch.autocast("cpu", torch.bfloat16) if where == "around" else contextlib.nullcontext()
    with around:
        found = hdet.find_lr(
            model, adamw(model), loader, cast if where == "inside" else loss_fn, total_steps=STEPS
        )  # fmt: skip
    assert found.rate == pytest.approx(expected.rate, rel=0.3)


@pytest.mark.parametrize("used", [False, True])
def test_a_grad_scaler_scales_and_is_as_before(used):
    loader = [tuple(t.float() for t in batch(index)) for index in range(68)]
    model = make(torch.float32)
    expected = hdet.find_lr(model, adamw(model), loader, loss_fn, total_steps=STEPS, clip_grad_norm=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=7)
    optimizer = adamw(model)
    if used:  # before the first call it has no scale yet
        scaler.scale(loss_fn(model, loader[0])).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        model, optimizer = make(torch.float32), adamw(model)
        optimizer = adamw(model)
    scale = scaler._scale
    state = (scaler.state_dict(), dict(scaler._per_optimizer_states), set(vars(scaler)))
    scales = []

    def watching(model, pair):
        scales.append(scaler.get_scale())
        return loss_fn(model, pair)

    found = hdet.find_lr(model, optimizer, loader, watching, total_steps=STEPS, clip_grad_norm=1.0, scaler=scaler)
    assert found.rate == pytest.approx(expected.rate, rel=0.05)
    assert max(scales) > 2.0**12  # it was in use: it grew
    assert (scaler.state_dict(), dict(scaler._per_optimizer_states), set(vars(scaler))) == state
    assert scaler._scale is scale


def test_a_held_out_probe_may_be_given():
    model, seen = make(), []

    def held_out(index):
        seen.append(index)
        return [batch(-1), batch(-2)]

    probe = hdet.Probe(held_out, loss_fn, held_out=True)
    found = hdet.find_lr(model, adamw(model), make_loader(), loss_fn, probe=probe, total_steps=STEPS)
    assert seen == [0]
    assert found.samples % 128 == 0


# On several replicas


def on_replicas(wrap):
    here = hdet.find_replicas()
    model = wrap(make(kind=plain_net))
    loader = [tuple(t[here.rank :: here.size] for t in batch(index)) for index in range(60 + 3 * here.rank)]
    found = hdet.find_lr(model, adamw(model), loader, loss_fn, total_steps=STEPS)
    return dataclasses.astuple(found), bits(model.state_dict())


def test_replicas_score_their_own_batches_and_find_the_same():
    model = make(kind=plain_net)
    alone = hdet.find_lr(model, adamw(model), [batch(k) for k in range(60)], loss_fn, total_steps=STEPS)
    for each in (run(on_replicas, 2, DistributedDataParallel), hdet.in_process(on_replicas, 2, hdet.data_parallel)):
        assert each[0] == each[1]
        assert each[0][0][0] == pytest.approx(alone.rate, rel=1e-6)


def accumulated(size):
    here, syncs = hdet.find_replicas(), []
    model = DistributedDataParallel(make())
    model.register_comm_hook(None, lambda state, bucket: _counted(syncs, bucket, size))
    loader = [tuple(t[here.rank :: here.size] for t in batch(index)) for index in range(68)]
    found = hdet.find_lr(model, adamw(model), loader, loss_fn, total_steps=STEPS, accumulate=4)
    assert model.require_backward_grad_sync
    return found.rate, len(syncs) / found.steps


def _counted(syncs, bucket, size):
    syncs.append(1)
    work = torch.distributed.all_reduce(bucket.buffer().div_(size), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def test_gradients_travel_once_per_step_with_accumulation():
    (rate, each), (other, _) = run(accumulated, 2, 2)
    assert rate == other
    assert each == 1.0


def bad_on_one(what):
    here = hdet.find_replicas()
    model = DistributedDataParallel(make())
    optimizer = adamw(model)
    before = everything(model, optimizer)
    good = [batch(k) for k in range(8)]
    loader = {"empty": [], "iterator": iter(good), "number": 3}[what] if here.rank == 1 else good
    try:
        hdet.find_lr(model, optimizer, loader, loss_fn, total_steps=STEPS)
    except Exception as error:
        assert everything(model, optimizer) == before
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    ("what", "text"),
    [("empty", "at least 1 batch"), ("iterator", "can be read again"), ("number", "must be an iterable of batches")],
)
def test_a_bad_loader_on_one_replica_is_an_error_on_all(what, text):
    first, second = run(bad_on_one, 2, what)
    assert first == second
    assert text in first
    assert "raised by hdet.find_lr on replica 1 of 2" in first


# Batches


class Pair(typing.NamedTuple):
    x: torch.Tensor
    name: str


@dataclasses.dataclass(frozen=True)
class Record:
    x: torch.Tensor


class Graph:
    """What libraries of graphs have: an object that moves itself."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        return Graph(self.x.to(device))


def test_batches_of_any_kind_are_copied():
    x = torch.ones(3)
    ordered = collections.OrderedDict(x=x, n=1)
    batch = {"a": [x, (x, "s")], "b": Pair(x, "n"), "c": ordered, "d": Record(x), "e": None}
    kept = on_host(batch)
    x.fill_(7)
    assert kept["a"][0].sum() == kept["a"][1][0].sum() == kept["b"].x.sum() == kept["d"].x.sum() == 3
    assert type(kept["b"]) is Pair
    assert type(kept["c"]) is collections.OrderedDict
    moved = to_device({**kept, "g": Graph(x)}, torch.device("meta"))
    assert {moved[k].x.device.type for k in "bdg"} == {"meta"}
    assert moved["c"]["x"].is_meta
    assert moved["c"]["n"] == 1


def test_a_batch_of_transformers_keeps_its_class():
    transformers = pytest.importorskip("transformers")
    batch = transformers.BatchEncoding({"input_ids": torch.ones(2, 3, dtype=torch.long)})
    moved = to_device(on_host(batch), torch.device("meta"))
    assert type(moved) is transformers.BatchEncoding
    assert moved["input_ids"].is_meta
    assert not batch["input_ids"].is_meta


def test_a_loss_may_take_a_batch_apart():
    model = make()
    loader = [{"x": x, "y": y} for x, y in map(batch, range(9))]

    def popping(model, given):
        return nn.functional.mse_loss(model(given.pop("x")), given.pop("y"))

    found = hdet.find_lr(model, adamw(model), loader, popping, total_steps=STEPS)
    assert found.steps > 50


def test_memory_stays_within_what_is_stated():
    """Batches of 4 MB in place of 200 MB, and the bound in proportion."""
    made = 0

    class Large:
        def __iter__(self):
            nonlocal made
            for _ in range(100):
                made += 1
                yield np.ones(1 << 20, np.float32)

    class Loader:
        def __iter__(self):
            return (torch.from_numpy(array) for array in Large())

    tracemalloc.start()
    kept = read(Loader(), 100, 24 << 20)
    _, peak = tracemalloc.get_traced_memory()  # NumPy tells it what it takes; torch's copies come on top
    tracemalloc.stop()
    assert len(kept) == made == 6
    assert sum(entry.batch.numel() * 4 for entry in kept) <= 24 << 20
    assert peak < 10 << 20  # one batch at a time is the loader's
    assert len(read(Loader(), 100, 1)) == 2


@pytest.mark.parametrize("batches", [1, 2, 5])
def test_a_loader_that_ends_early_is_used_in_turn(batches):
    model = make()
    found = hdet.find_lr(model, adamw(model), [batch(k) for k in range(batches)], loss_fn, total_steps=STEPS)
    assert 1e-3 < found.rate < 1


# What cannot work


class Stream(IterableDataset):
    def __init__(self, again):
        self.again, self.data = again, iter([batch(k) for k in range(90)])

    def __iter__(self):
        return (batch(k) for k in range(90)) if self.again else self.data


class Again(IterableDataset):
    def __iter__(self):
        return (batch(k) for k in range(90))


class Itself(IterableDataset):
    def __iter__(self):
        return self

    def __next__(self):
        return batch(0)


class File(IterableDataset):
    """Reads on in a file that is open."""

    def __init__(self):
        self.file = io.StringIO("".join(f"{k}\n" for k in range(200)))

    def __iter__(self):
        return (batch(int(line)) for line in self.file)


def generated():
    yield batch(0)


@pytest.mark.parametrize(
    ("loader", "kind", "text"),
    [
        ([], ValueError, "loader must give at least 1 batch, got none"),
        (3, TypeError, "loader must be an iterable of batches, got int"),
        ("abc", TypeError, "loader must be an iterable of batches, got str"),
        (generated(), ValueError, r"got generator, an iterator: the batches that the search takes would be missing"),
        (DataLoader(Stream(again=False), None), ValueError, "but Stream cannot be: its data is an iterator"),
        (DataLoader(Itself(), None), ValueError, "but Itself cannot be: it is its own iterator"),
    ],
)
def test_a_loader_that_cannot_be_read_is_refused(loader, kind, text):
    model = make()
    optimizer = adamw(model)
    before = everything(model, optimizer)
    with pytest.raises(kind, match=text):
        hdet.find_lr(model, optimizer, loader, loss_fn, total_steps=STEPS)
    assert everything(model, optimizer) == before


@pytest.mark.parametrize("data", [Again(), File()])
def test_a_stream_that_can_be_read_again_is_taken_and_goes_back(data):
    model = make()
    loader = DataLoader(data, None)
    hdet.find_lr(model, adamw(model), loader, loss_fn, total_steps=STEPS)
    assert torch.equal(next(iter(loader))[0], batch(0)[0])


def frozen():
    model = make()
    model.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("changed", "kind", "text"),
    [
        ({"loss_fn": lambda model, pair: {"loss": loss_fn(model, pair)}}, TypeError, r'got dict; write return loss\["'),
        ({"loss_fn": lambda model, pair: (loss_fn(model, pair), 1)}, TypeError, "got tuple; return the loss alone"),
        ({"loss_fn": lambda model, pair: (model(pair[0]) - pair[1]).square()}, TypeError, r"got shape \(64, 1\)"),
        ({"loss_fn": lambda model, pair: loss_fn(model, pair).item()}, TypeError, "with one element, got float"),
        ({"loss_fn": lambda model, pair: loss_fn(model, pair).detach()}, ValueError, "none of them has a gradient"),
        ({"loss_fn": nn.functional.mse_loss}, TypeError, "got torch's mse_loss, which takes tensors"),
        ({"loss_fn": None}, TypeError, "loss_fn must be given beside a loader"),
        ({"model": frozen}, ValueError, "none of them has a gradient"),
        ({"accumulate": 0}, ValueError, "accumulate must be at least 1 batches"),
        ({"clip_grad_norm": -1.0}, ValueError, "clip_grad_norm must be positive and finite"),
        ({"scaler": 3}, TypeError, "scaler must be a torch.amp.GradScaler, got int"),
        ({"probe": 3}, TypeError, "probe must be an hdet.Probe, got int"),
        ({"max_norm": 1.0}, TypeError, "write clip_grad_norm=max_norm"),
        ({"step_fn": print}, TypeError, "step_fn replaces loader and loss_fn"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_and_nothing_changes(changed, kind, text):
    model = changed.pop("model", make)()
    optimizer, loader = adamw(model), make_loader()
    before, loaders = everything(model, optimizer), state_of(loader)
    given = {"loss_fn": loss_fn, "total_steps": STEPS, **changed}
    with pytest.raises(kind, match=text):
        hdet.find_lr(model, optimizer, loader, **given)
    assert everything(model, optimizer) == before
    assert state_of(loader) == loaders


def test_what_is_no_training_is_refused_or_warned_of():
    model = make()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"call it outside of torch.no_grad\(\)"):
        hdet.find_lr(model, adamw(model), make_loader(), loss_fn, total_steps=STEPS)
    schedule = optim.lr_scheduler.ConstantLR(adamw(model))
    with pytest.raises(TypeError, match="optimizer must be an optimizer, got a ConstantLR; pass its optimizer"):
        hdet.find_lr(model, schedule, make_loader(), loss_fn, total_steps=STEPS)
    with pytest.warns(UserWarning, match=r"Net is in evaluation mode, .*; call model.train\(\) before it"):
        hdet.find_lr(model.eval(), adamw(model), make_loader(), loss_fn, total_steps=STEPS)
    assert not model.training
    meta = Net().to("meta")
    with pytest.raises(ValueError, match=r"first\.weight is on the meta device"):
        hdet.find_lr(meta, adamw(meta), make_loader(), loss_fn, total_steps=STEPS)


def test_few_batches_are_a_doubt():
    model = make(kind=plain_net)
    with pytest.warns(UserWarning, match="the loader gave only 3 batches; they are trained on over and over"):
        few = hdet.find_lr(model, adamw(model), [batch(k) for k in range(3)], loss_fn, total_steps=STEPS)
    assert not few.sure
    assert hdet.find_lr(model, adamw(model), [batch(k) for k in range(30)], loss_fn, total_steps=STEPS).sure


def test_large_tensors_of_a_data_set_are_not_copied():
    data = Samples()
    data.x = torch.zeros(3 << 20, 6, dtype=torch.float64)  # 144 MB
    noise = data.noise.get_state()
    tracked = Attributes([data])
    data.x[0] = 1.0
    data.reads = 5
    data.noise.manual_seed(9)
    tracked.restore()
    assert data.x[0].sum() == 6  # taken for data
    assert data.reads == 0
    assert torch.equal(data.noise.get_state(), noise)


def test_accumulation_does_not_go_with_a_step_function():
    model = make()
    with pytest.raises(TypeError, match="accumulate goes with loader and loss_fn; with step_fn, do it there"):
        find(model, adamw(model), accumulate=2)


def test_what_it_says_of_itself_is_so():
    said = " ".join(hdet.find_lr.__doc__.split())
    assert f"batches of {loaders.TRAINED} steps are taken and used in turn, and those of {loaders.SCORED} more" in said
    assert f"{loaders.MEMORY >> 30} GiB" in said


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_line_on_the_terminal_shows_how_far_it_is(monkeypatch):
    model = make()
    for shown in (True, False):
        terminal = Terminal()
        monkeypatch.setattr("sys.stderr", terminal)
        hdet.find_lr(model, adamw(model), make_loader(), loss_fn, total_steps=STEPS, progress=shown)
        assert ("finding the learning rate: step 1 of at most" in terminal.getvalue()) == shown
        assert terminal.getvalue().endswith("\r\x1b[2K" if shown else "")
