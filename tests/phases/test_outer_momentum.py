"""Nesterov's momentum as the outer step: against a float64 twin and torch's SGD, saved, resumed, rolled back."""

import re
import warnings

import pytest
import torch
import torch.distributed as dist
from processes import run
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet._phases.outer_step import OuterStep
from hdet._phases.recording import Recording

TOTAL, INTERVAL = 23, 4


def flat(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def batch(rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True).sin()


def parts(seed=0, optimizer=optim.AdamW, wrap=True, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    model = DistributedDataParallel(model) if wrap and dist.is_initialized() else model
    optimizer = optimizer(model.parameters(), lr=0.02)
    explored = [hdet.learning_rate(optimizer, spread=options.pop("spread", 0.0))]
    common = {"total_steps": TOTAL, "interval": INTERVAL, "gradients": "local", "model": model}
    ensemble = hdet.Ensemble(optimizer, explored, **{**common, **options})
    return {"model": model, "optimizer": optimizer, "ensemble": ensemble}


def train(run, steps):
    rank = run["ensemble"].replicas.rank
    for step in steps:
        x, y = batch(rank, step)
        loss = (run["model"](x) - y).square().mean()
        loss.backward()
        run["optimizer"].step()
        run["optimizer"].zero_grad()
        run["ensemble"].step(loss)
    return flat(run["model"])


def twin(size, lr, momentum, average_state):
    """Every formula written out: AdamW on each replica, the outer step on their mean; all weights at each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    theta = [flat(model) for _ in range(size)]
    first = [torch.zeros_like(t) for t in theta]
    second = [torch.zeros_like(t) for t in theta]
    start, m = theta[0], torch.zeros_like(theta[0])
    course = []
    for step in range(TOTAL):
        for r in range(size):
            nn.utils.vector_to_parameters(theta[r].clone(), model.parameters())
            x, y = batch(r, step)
            model.zero_grad()
            (model(x) - y).square().mean().backward()
            g = torch.cat([p.grad.flatten() for p in model.parameters()])
            first[r] = 0.9 * first[r] + 0.1 * g
            second[r] = 0.999 * second[r] + 0.001 * g**2
            t = step + 1
            direction = (first[r] / (1 - 0.9**t)) / ((second[r] / (1 - 0.999**t)).sqrt() + 1e-8)
            theta[r] = theta[r] - 0.02 * 0.01 * theta[r] - 0.02 * direction
        if (step + 1) % INTERVAL == 0 or step + 1 == TOTAL:
            mean = sum(theta) / size
            if step + 1 < TOTAL:
                g = start - mean
                m = momentum * m + g
                start = start - lr * (g + momentum * m)
            else:
                start = mean
            theta = [start.clone() for _ in range(size)]
            if average_state:
                first, second = [sum(first) / size] * size, [sum(second) / size] * size
        course.append(list(theta))
    return course


def in_processes(average_state):
    ensemble = parts(averaging=hdet.Averaging(outer_step=hdet.Nesterov(0.7, 0.9), state=average_state))
    return [train(ensemble, [step]) for step in range(TOTAL)]


@pytest.mark.parametrize(("size", "average_state"), [(2, True), (3, False)])
def test_it_is_the_twin_to_the_last_digits(size, average_state):
    found = run(in_processes, size, average_state)
    for step, expected in enumerate(twin(size, 0.7, 0.9, average_state)):
        for rank in range(size):
            torch.testing.assert_close(found[rank][step], expected[rank], rtol=1e-12, atol=1e-12)


def recorded():
    records = []
    train(parts(averaging=hdet.Averaging(outer_step=hdet.Nesterov(0.7, 0.9)), on_round=[records.append]), range(TOTAL))
    return {(record.outer_step, record.outer_momentum) for record in records}


def test_records_say_which_outer_optimizer_it_was():
    assert hdet.in_process(recorded, 2) == [{(0.7, 0.9)}] * 2


def test_it_is_the_step_of_torchs_sgd():
    torch.manual_seed(0)
    ours = [torch.randn(3, 2, dtype=torch.float64), torch.randn(4, dtype=torch.float64)]
    theirs = [nn.Parameter(t.clone()) for t in ours]
    sgd = optim.SGD(theirs, lr=0.7, momentum=0.9, nesterov=True)
    outer = OuterStep(hdet.Nesterov(0.7, 0.9))
    for _ in range(6):
        outer.begin(ours)
        for p, q in zip(ours, theirs, strict=True):
            way = torch.randn(p.shape, dtype=torch.float64)
            p.add_(way)
            q.grad = -way
        outer.take()
        sgd.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q.detach(), rtol=1e-13, atol=1e-13)


def plain_twice():
    same = [train(parts(averaging=hdet.Averaging(outer_step=o)), range(TOTAL)) for o in (hdet.Nesterov(1.0, 0.0), 1.0)]
    half = [train(parts(averaging=hdet.Averaging(outer_step=o)), range(TOTAL)) for o in (hdet.Nesterov(0.5, 0.0), 0.5)]
    return same, half


def test_without_momentum_it_is_the_part_of_the_way_bit_for_bit():
    for same, half in run(plain_twice, 2):
        assert torch.equal(*same)
        assert torch.equal(*half)
        assert not torch.equal(same[0], half[0])


def test_momenta_of_half_precision_are_single():
    p = [torch.full((4,), 100.0, dtype=torch.bfloat16)]
    outer = OuterStep(hdet.Nesterov(1.0, 0.5))
    for _ in range(3):
        outer.begin(p)
        p[0].add_(1.0)
        outer.take()
    # ways of 1: m = 1, 1.5, 1.75 and theta = 100 + 1.5 + 1.75 + 1.875, rounded to the nearest half each time
    assert outer.state_dict(begun=False)["momenta"][0].dtype == torch.float32
    assert p[0].tolist() == [105.0] * 4


def test_layers_that_are_frozen_and_thawed_have_their_own_momenta():
    a, b = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    outer = OuterStep(hdet.Nesterov(1.0, 0.5))
    for trained in ([a], [a, b], [b]):
        outer.begin(trained)
        for p in trained:
            p.add_(1.0)
        outer.take()
    assert a.tolist() == [1.5 + 1.75] * 2
    assert b.tolist() == [1.5 + 1.75] * 2


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"lr": 0.0}, ValueError, "lr of Nesterov must be positive, got 0.0; write for example 0.7"),
        ({"lr": float("inf")}, ValueError, "lr of Nesterov must be positive"),
        ({"momentum": 1.0}, ValueError, r"momentum of Nesterov must lie in \[0, 1\), got 1.0"),
        ({"momentum": "0.9"}, TypeError, "momentum of Nesterov must be a number"),
    ],
)
def test_what_cannot_work_is_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        hdet.Nesterov(**arguments)


def test_own_state_is_for_local_gradients():
    optimizer = optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r'state=False is for local gradients.*write gradients="local"'):
        hdet.Ensemble(optimizer, total_steps=10, averaging=hdet.Averaging(state=False))
    with pytest.raises(TypeError, match="state must be True or False, got 0"):
        hdet.Ensemble(optimizer, total_steps=10, averaging=hdet.Averaging(state=0))


def saves(path, steps, average_state):
    made = parts(averaging=hdet.Averaging(outer_step=hdet.Nesterov(), state=average_state))
    train(made, range(steps))
    folder = hdet.save(path, made)
    state = made["ensemble"].state_dict()["weights"]["outer step"]
    held = {file.name: file.stat().st_size for file in folder.iterdir()}
    moment = [entry["exp_avg"].clone() for entry in made["optimizer"].state.values()]
    end = train(made, range(steps, TOTAL))
    return state.get("start"), state["momenta"], held, moment, end


def goes_on(path, steps, average_state):
    with warnings.catch_warnings(record=True):
        made = parts(seed=9, averaging=hdet.Averaging(outer_step=hdet.Nesterov(), state=average_state))
        loaded = hdet.load(path, made)
        state = made["ensemble"].state_dict()["weights"]["outer step"]
    moment = [entry["exp_avg"].clone() for entry in made["optimizer"].state.values()]
    end = train(made, range(steps, TOTAL))
    return loaded.exact, state.get("start"), state["momenta"], moment, end


@pytest.mark.parametrize(("steps", "average_state"), [(8, True), (10, True), (8, False), (10, False)])
def test_it_is_saved_and_resumed_on_two_and_on_three_replicas(tmp_path, steps, average_state):
    saved = run(saves, 2, str(tmp_path), steps, average_state)
    mid_round = steps % INTERVAL > 0
    start, momenta, held, _, end = saved[0]
    same = run(goes_on, 2, str(tmp_path), steps, average_state)
    assert all(exact and torch.equal(again, end) for exact, *_, again in same), "resume is not bitwise"
    mean = [(a + b) / 2 for a, b in zip(saved[0][3], saved[1][3], strict=True)]
    others = run(goes_on, 3, str(tmp_path), steps, average_state)
    for exact, began, again, moment, last in others:
        assert not exact
        assert all(torch.equal(a, b) for a, b in zip(momenta, again, strict=True))
        assert (began is not None) == mid_round
        assert not mid_round or all(torch.equal(a, b) for a, b in zip(start, began, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(moment, mean, strict=True))
        assert torch.equal(last, others[0][4])
        assert not torch.equal(last, end)
    shared = [name for name in held if not name.startswith("replica-") and name.endswith(".pt")]
    assert len(shared) == 1, "momenta are the same on all replicas and are to be stored once"


def rolls_back():
    made = parts(
        averaging=hdet.Averaging(outer_step=hdet.Nesterov(), state=False),
        safety=hdet.Safety(rollback=hdet.Rollback(window=4, every=4), guard=True),
        optimizer=optim.SGD,
    )  # fmt: skip
    ensemble, records = made["ensemble"], []
    ensemble.engine.phase(Recording).on_round = (records.append,)
    before = {step + 4: train(made, range(step, step + 4)) for step in (0, 4)}
    with torch.no_grad():
        for p in made["model"].parameters():
            p.fill_(float("nan"))
    train(made, range(8, 12))
    after, momenta = flat(made["model"]), ensemble.state_dict().get("outer_momentum")
    train(made, range(12, TOTAL))
    said = [event for record in records for event in record.events]
    return before, after, momenta, said, flat(made["model"])


def test_a_rollback_begins_with_new_momenta():
    first, second = run(rolls_back, 2)
    (event,) = [event for event in first[3] if "rolled back" in event]
    kept_at = int(re.search(r"at step 12 to the weights of step (\d+)", event)[1])
    assert torch.equal(first[0][kept_at], first[1])
    assert first[2] is None, "momenta of the way that has diverged"
    assert first[4].isfinite().all()
    assert torch.equal(first[4], second[4])


def quarantined():
    made = parts(averaging=hdet.Averaging(outer_step=hdet.Nesterov()), safety=hdet.Safety(guard=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(TOTAL):
            if step == 9 and dist.get_rank() == 1:
                with torch.no_grad():
                    made["model"].module[0].weight.fill_(float("nan"))
            train(made, [step])
    return flat(made["model"]), made["optimizer"].state_dict()["state"][0]["exp_avg"]


def test_a_replica_that_is_left_out_takes_the_outer_step_of_the_others():
    first, second = run(quarantined, 2)
    assert first[0].isfinite().all()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def sees_consensus():
    made = parts(averaging=hdet.Averaging(outer_step=hdet.Nesterov()))
    train(made, range(10))
    own = flat(made["model"])
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    momenta = made["ensemble"].state_dict()["weights"]["outer step"]["momenta"]
    with made["ensemble"].consensus():
        inside = flat(made["model"])
    same = all(map(torch.equal, momenta, made["ensemble"].state_dict()["weights"]["outer step"]["momenta"]))
    return torch.equal(own, flat(made["model"])), same, (inside - sum(gathered) / len(gathered)).abs().max().item()


def test_consensus_is_the_mean_and_moves_nothing():
    for back, same, off in run(sees_consensus, 2):
        assert back
        assert same
        assert off < 1e-15


def ends_early():
    """`finish()` right after a converge: optimizer state of one's own is averaged, and plain training can follow."""
    made = parts(averaging=hdet.Averaging(outer_step=hdet.Nesterov(), state=False), total_steps=None)
    train(made, range(8))
    differ = made["ensemble"].replicas_differ
    made["ensemble"].finish()
    moment = made["optimizer"].state_dict()["state"][0]["exp_avg"].clone()
    left = made["ensemble"].state_dict()
    train(made, range(8, 12))  # plain DDP from here on
    return differ, moment, flat(made["model"]), sorted(left)


def test_plain_training_can_follow():
    first, second = run(ends_early, 2)
    assert first[0]
    assert torch.equal(first[1], second[1])
    assert torch.equal(first[2], second[2])
    assert "outer_momentum" not in first[3]


def joins():
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1).double())
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    rates = [hdet.learning_rate(optimizer, spread=0.0)]
    ensemble = hdet.Ensemble(
        optimizer, rates, total_steps=9, interval=3, averaging=hdet.Averaging(outer_step=hdet.Nesterov()), model=model
    )
    with pytest.raises(ValueError, match="join\\(\\) cannot be used with outer_step=Nesterov"), ensemble.join():
        pass
    made = parts(averaging=hdet.Averaging(outer_step=hdet.Nesterov(), state=False))
    with made["ensemble"].join():
        train(made, range(9 if dist.get_rank() else 14))
    made["ensemble"].finish()
    return flat(made["model"])


def test_uneven_data():
    first, second = run(joins, 2)
    assert torch.equal(first, second)


def test_the_drop_in_takes_it_too():
    _, model = torch.manual_seed(0), nn.Linear(3, 1)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scheduler = hdet.OneCycleAutoLR(
        optimizer,
        0.1,
        total_steps=10,
        model_sync_interval=5,
        ensemble={"averaging": hdet.Averaging(outer_step=hdet.Nesterov(0.5, 0.5))},
    )
    start = flat(model)
    for _ in range(5):
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        end = flat(model)
        scheduler.step()
    torch.testing.assert_close(flat(model), start + 0.75 * (end - start))


def sends(shared, steps):
    """Bytes that one replica gives to collectives, DDP's included."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    counted = []
    originals = {name: getattr(dist, name) for name in ("all_reduce", "all_gather", "broadcast")}
    options = (
        {"gradients": "shared"} if shared else {"averaging": hdet.Averaging(outer_step=hdet.Nesterov(), state=False)}
    )
    made = parts(interval=200, total_steps=401, **options)
    made["model"].register_comm_hook(None, allreduce_hook)  # through Python
    for name, original in originals.items():
        setattr(dist, name, _counting(original, counted))
    train(made, range(steps))
    for name, original in originals.items():
        setattr(dist, name, original)
    made["ensemble"].close()
    return sum(counted)


def _counting(original, counted):
    def call(*args, **options):
        counted.append(next(a for a in reversed(args) if isinstance(a, torch.Tensor)).nbytes)
        return original(*args, **options)

    return call


def test_it_sends_a_two_hundredth_of_what_ddp_does():
    ddp, local = run(sends, 2, True, 20)[0] / 20, run(sends, 2, False, 400)[0] / 400
    weights = 26 * 8
    assert ddp == weights
    assert weights / 200 <= local <= weights / 200 + 2  # and a small vector for each round
