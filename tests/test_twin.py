"""The library beside its float64 twin: 4 replicas, AdamW, 4 groups, spread 0.3, auto-LR on."""

import itertools

import pytest
import torch
import torch.distributed as dist
from processes import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from twin import Twin

import hdet

SIZE, TOTAL, INTERVAL, WARMUP, SPREAD, SEED = 4, 66, 7, 20, 0.3, 5
MAX_LRS = [0.02, 0.005, 0.01, 0.03]
DECAYS = [0.1, 0.0, 0.01, 0.3]


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(replica, step):
    generator = torch.Generator().manual_seed(1000 * replica + step)
    x = torch.randn(12, 6, generator=generator, dtype=torch.float64)
    y = torch.sin(x[:, :3]) + 0.3 * torch.randn(12, 3, generator=generator, dtype=torch.float64)
    return x, y


def functional_loss(weights, data):
    x, y = data
    hidden = torch.tanh(x @ weights[0].T + weights[1])
    return ((hidden @ weights[2].T + weights[3] - y) ** 2).mean()


def with_library(decay):
    model = DistributedDataParallel(make_model())
    groups = [{"params": [p], "weight_decay": d} for p, d in zip(model.parameters(), DECAYS, strict=True)]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = hdet.OneCycleAutoLR(
        optimizer,
        MAX_LRS,
        total_steps=TOTAL,
        auto_lr_warmup_steps=WARMUP,
        ensemble_lr_spread_ratio=SPREAD,
        model_sync_interval=INTERVAL,
        enable_auto_lr=True,
        loss_scale=0.1,
        decay=decay,
        ensemble={"seed": SEED},
        model=model,
    )
    trace = []
    for step in range(TOTAL):
        x, y = batch(dist.get_rank(), step)
        loss = ((model(x) - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(loss)
        trace.append(([p.detach().clone() for p in model.parameters()], scheduler.get_last_lr()))
    return trace


@pytest.mark.parametrize("decay", ["one_cycle", "geometric"])
def test_the_library_follows_its_twin_to_1e9(decay):
    traces = run(with_library, SIZE, decay)
    twin = Twin(
        [p.detach() for p in make_model().parameters()],
        functional_loss,
        SIZE,
        TOTAL,
        INTERVAL,
        WARMUP,
        MAX_LRS,
        DECAYS,
        spread=SPREAD,
        seed=SEED,
        geometric=decay == "geometric",
    )
    worst = 0.0
    for step in range(TOTAL):
        twin.train_step([batch(r, step) for r in range(SIZE)])
        for r, trace in enumerate(traces):
            weights, centers = trace[step]
            for ours, theirs in zip(weights, twin.replicas[r], strict=True):
                worst = max(worst, (ours - theirs).abs().max().item())
            assert centers == pytest.approx([twin.center(g, twin.step) for g in range(4)], rel=1e-9)
    assert worst < 1e-9
    # the controller moved, so the comparison says something
    assert all(abs(s - 1) > 1e-3 for s in twin.scale)
    for by_group in twin.all_slots:
        assert all(sorted(dealt) == list(range(SIZE)) for dealt in by_group)


EXACT = {
    "sgd": {},
    "momentum": {"momentum": 0.9},
    "adam": {},
    "rmsprop": {},
    "adagrad": {},
}
KINDS = {"adam": torch.optim.Adam, "rmsprop": torch.optim.RMSprop, "adagrad": torch.optim.Adagrad}


@pytest.mark.parametrize("name", EXACT)
def test_a_round_lies_on_a_line(name):
    """With shared gradients, theta_r - theta_0 = rho_r (theta_mean - theta_0) within a round."""
    for ours in run(one_round_on_a_line, SIZE, name):
        assert ours < 1e-12


def one_round_on_a_line(name):
    model = DistributedDataParallel(make_model())
    optimizer = KINDS.get(name, torch.optim.SGD)(model.parameters(), lr=0.01, **EXACT[name])
    ensemble = hdet.Ensemble(optimizer, [hdet.learning_rate(optimizer, spread=SPREAD)], interval=50)
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    for step in range(10):
        x, y = batch(dist.get_rank(), step)
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
        ensemble.step()
    own = torch.cat([p.detach().flatten() for p in model.parameters()])
    with ensemble.consensus():
        mean = torch.cat([p.detach().flatten() for p in model.parameters()])
    again = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert torch.equal(own, again)
    assert not torch.equal(own, mean)
    ensemble.finish()
    return (own - start - ensemble_multiplier(ensemble) * (mean - start)).abs().max().item()


def ensemble_multiplier(ensemble):
    from hdet._explore.slots import deal

    return deal(SIZE, ensemble.seed, 0, "learning_rate", SPREAD, "linear")[dist.get_rank()]


def test_slots_of_different_groups_are_uncorrelated():
    from hdet._explore.slots import slots

    rounds = 2000
    dealt = torch.tensor(
        [[slots(SIZE, SEED, k, f"learning_rate/{g}") for g in range(4)] for k in range(rounds)], dtype=torch.float64
    )
    centred = dealt - (SIZE - 1) / 2
    variance = (SIZE**2 - 1) / 12
    for a, b in itertools.combinations(range(4), 2):
        correlation = (centred[:, a] * centred[:, b]).mean() / variance
        # one round's correlation has variance 1/(N-1) = 1/3; allow four standard errors
        assert abs(correlation.item()) < 4 * (1 / 3 / rounds) ** 0.5
