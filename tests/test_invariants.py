"""One table of invariants that every optimizer goes through under every scheduler, on real processes."""

import copy
import random
from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import OPTIMIZERS, SCHEDULERS, STEPS, Net, batch, keeping_buffers
from processes import run
from torch.optim.lr_scheduler import ReduceLROnPlateau

import hdet

INTERVAL = 3
ROUND_ENDS = {3, 6, STEPS}


class Training:
    """A training run: plain DDP, or with an ensemble around it."""

    def __init__(self, optimizer, scheduler, spread=None, variant="softmax"):
        torch.manual_seed(3)
        self.model = keeping_buffers(Net(statistics=variant != "tail average"))
        self.optimizers = OPTIMIZERS[optimizer](self.model)
        make = SCHEDULERS[scheduler]
        self.schedulers = [make(o) for o in self.optimizers] if make else []
        self.ensemble = None
        if spread is not None:
            explored, options = VARIANTS[variant](self.optimizers, self.model, spread)
            common = {"total_steps": STEPS, "interval": INTERVAL, "model": self.model, "seed": 11}
            self.ensemble = hdet.Ensemble(self.optimizers, explored, **{**common, **options})
        self.bases = []

    def step(self, step):
        x, y = batch(dist.get_rank(), step)
        loss = ((self.model(x) - y) ** 2).mean()
        for o in self.optimizers:
            o.zero_grad()
        loss.backward()
        for o in self.optimizers:
            o.step()
        for s in self.schedulers:
            s.step(*([1.0 / (1 + step // 4)] if isinstance(s, ReduceLROnPlateau) else []))
        if self.ensemble is not None:
            self.ensemble.step(loss)
        self.bases.append([float(g["lr"]) for o in self.optimizers for g in o.param_groups])

    def tensors(self):
        """Weights, floating-point buffers and optimizer state, in a fixed order."""
        found = [p.detach() for p in self.model.parameters()]
        found += [b for b in self.model.buffers() if b.is_floating_point()]
        for o in self.optimizers:
            for g in o.param_groups:
                for p in g["params"]:
                    found += [v for _, v in sorted(o.state[p].items()) if isinstance(v, torch.Tensor)]
        return found

    def state(self):
        return copy.deepcopy(
            {
                "model": self.model.module.state_dict(),
                "optimizers": [o.state_dict() for o in self.optimizers],
                "schedulers": [s.state_dict() for s in self.schedulers],
                "ensemble": self.ensemble.state_dict(),
            }
        )

    def load(self, state):
        state = copy.deepcopy(state)
        self.model.module.load_state_dict(state["model"])
        for o, saved in zip(self.optimizers, state["optimizers"], strict=True):
            o.load_state_dict(saved)
        for s, saved in zip(self.schedulers, state["schedulers"], strict=True):
            s.load_state_dict(saved)
        self.ensemble.load_state_dict(state["ensemble"])


def probe_loss(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def a_probe(held_out=False):
    return hdet.Probe(lambda index: [batch(50 + index, part) for part in range(3)], probe_loss, held_out=held_out)


def joint(optimizers, spread):
    return [hdet.learning_rate(optimizers, spread=spread)]


VARIANTS = {
    "softmax": lambda o, m, s: (
        [hdet.learning_rate(o, spread=s, per_group=True)],
        {"controller": hdet.controllers.Softmax(temperature=0.1)},
    ),
    "line search": lambda o, m, s: (
        joint(o, s),
        {"controller": hdet.controllers.LineSearch(), "probe": a_probe()},
    ),
    "auto, decay and momentum": lambda o, m, s: (
        [*joint(o, s), hdet.weight_decay(o, spread=s), hdet.momentum(o, spread=s)],
        {"controller": hdet.Auto(), "probe": a_probe(held_out=True)},
    ),
    "slopes, orthogonal": lambda o, m, s: (
        [*joint(o, s), hdet.weight_decay(o, spread=s)],
        {"controller": hdet.controllers.Slope(), "probe": a_probe(held_out=True)},
    ),
    "outer step": lambda o, m, s: (
        joint(o, s),
        {"controller": hdet.controllers.Softmax(temperature=0.1), "averaging": hdet.Averaging(outer_step=0.5)},
    ),
    "tail average": lambda o, m, s: (
        joint(o, s),
        {"controller": hdet.controllers.LineSearch(), "probe": a_probe(), "averaging": hdet.Averaging(tail=1.0)},
    ),
    "rollback": lambda o, m, s: (
        joint(o, s),
        {"controller": hdet.controllers.Softmax(), "safety": hdet.Safety(rollback=hdet.Rollback())},
    ),
    "local and guarded": lambda o, m, s: (
        joint(o, s),
        {"gradients": "local", "safety": hdet.Safety(rollback=hdet.Rollback())},
    ),
    "guarded": lambda o, m, s: (
        joint(o, s),
        {"controller": hdet.controllers.Softmax(temperature=0.1), "safety": hdet.Safety(guard=True, atomic=True)},
    ),
    "outer momentum": lambda o, m, s: (
        joint(o, s),
        {"gradients": "local", "averaging": hdet.Averaging(outer_step=hdet.Nesterov())},
    ),
    "own state": lambda o, m, s: (
        joint(o, s),
        {"gradients": "local", "averaging": hdet.Averaging(outer_step=hdet.Nesterov(0.5, 0.5), state=False)},
    ),
    "local gradients": lambda o, m, s: (
        [*joint(o, s), hdet.attribute(m.module, "heat", spread=s)],
        {"controller": hdet.controllers.Slope(), "gradients": "local"},
    ),
}
LINE_SEARCHES = {"line search", "tail average"}
RESTS = "one_cycle"  # its second round ends below half of its peak: they move nothing there, nor in the first round
PLAIN_WITHOUT_SPREAD = {
    "softmax", "line search", "auto, decay and momentum", "slopes, orthogonal", "guarded",
}  # fmt: skip
MOVES = set(VARIANTS) - {"local and guarded", "outer momentum", "own state"}  # has a controller that moves something


def same(ours, theirs):
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def equal_on_all_ranks(tensors):
    flat = torch.cat([t.flatten().double() for t in tensors])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    return all(torch.equal(everyone[0], other) for other in everyone)


def random_states():
    numpy_state = np.random.get_state()
    return torch.get_rng_state().tolist(), (numpy_state[1].tolist(), numpy_state[2]), random.getstate()


def check_spread_zero(optimizer, scheduler, variant="softmax"):
    plain, zero = Training(optimizer, scheduler), Training(optimizer, scheduler, 0.0, variant)
    calls = Counter()
    originals = {name: getattr(dist, name) for name in ("all_reduce", "all_gather", "broadcast", "new_group")}
    for name, original in originals.items():
        setattr(dist, name, lambda *a, _n=name, _f=original, **k: (calls.update([_n]), _f(*a, **k))[1])
    for step in range(STEPS):
        plain.step(step)
        zero.step(step)
    for name, original in originals.items():
        setattr(dist, name, original)
    assert calls == Counter(), f"spread 0 issued {calls}"
    assert same(plain.tensors(), zero.tensors()), "spread 0 is not plain training"
    assert plain.bases == zero.bases
    return plain


def check_rounds(optimizer, scheduler, plain, variant="softmax"):
    training = Training(optimizer, scheduler, 0.3, variant)
    before = random_states()
    saved = None
    for step in range(1, STEPS + 1):
        training.step(step - 1)
        weights = [p.detach() for p in training.model.parameters() if p.requires_grad]
        if step in ROUND_ENDS:
            own = variant == "own state" and step < STEPS  # equal weights; the state is averaged when the run ends
            held = [*weights, *training.model.buffers()] if own else training.tensors()
            assert not training.ensemble.mid_round
            assert training.ensemble.replicas_differ == own
            assert equal_on_all_ranks(held), f"replicas differ at the end of a round, step {step}"
            assert equal_on_all_ranks(training.tensors()) == (not own)
        else:
            assert training.ensemble.mid_round
            assert not equal_on_all_ranks(weights), f"replicas are equal within a round, step {step}"
        if step == 5:
            saved = training.state()
    assert random_states() == before, "a global random generator was touched"
    assert training.bases == plain.bases, "the scheduler saw something else than the base"
    scales = torch.tensor(list(training.ensemble.scales.values()), dtype=torch.float64)
    assert equal_on_all_ranks([scales])
    moves = variant in MOVES and not (variant in LINE_SEARCHES and scheduler == RESTS)
    assert (scales != 1).any() == moves, "the controller moved, or did not, against what is expected of it"
    assert torch.equal(training.model.module.frozen, torch.full((2,), 0.5))
    return training, saved


def check_resume(optimizer, scheduler, uninterrupted, saved, variant="softmax"):
    resumed = Training(optimizer, scheduler, 0.3, variant)
    for _ in range(2):
        # DDP regroups its buckets after the first backward, which changes the order of summation at 4 ranks
        resumed.model(batch(0, 0)[0]).sum().backward()
    resumed.load(saved)
    for step in range(5, STEPS):
        resumed.step(step)
    assert same(resumed.tensors(), uninterrupted.tensors()), "resume in mid-round is not bitwise"
    assert str(resumed.ensemble.state_dict()) == str(uninterrupted.ensemble.state_dict())
    assert resumed.bases == uninterrupted.bases[5:]


def all_schedulers(optimizer, schedulers):
    for scheduler in schedulers:
        try:
            plain = check_spread_zero(optimizer, scheduler)
            uninterrupted, saved = check_rounds(optimizer, scheduler, plain)
            check_resume(optimizer, scheduler, uninterrupted, saved)
        except Exception as error:
            raise AssertionError(f"{optimizer} under {scheduler}: {error}") from error


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_replicas(optimizer):
    run(all_schedulers, 2, optimizer, list(SCHEDULERS), timeout=200)


@pytest.mark.parametrize("optimizer", ["sgd_coupled", "adamw", "muon_beside_adamw"])
def test_four_replicas(optimizer):
    run(all_schedulers, 4, optimizer, ["one_cycle", "cosine", "plateau"], timeout=200)


def all_invariants(optimizer, variant):
    for scheduler in ("one_cycle", "exponential" if variant in LINE_SEARCHES else "cosine"):
        if variant in PLAIN_WITHOUT_SPREAD:
            plain = check_spread_zero(optimizer, scheduler, variant)
        else:
            plain = Training(optimizer, scheduler)
            for step in range(STEPS):
                plain.step(step)
        uninterrupted, saved = check_rounds(optimizer, scheduler, plain, variant)
        check_resume(optimizer, scheduler, uninterrupted, saved, variant)


@pytest.mark.parametrize("optimizer", ["sgd_coupled", "adamw"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(optimizer, variant):
    run(all_invariants, 2, optimizer, variant, timeout=200)


def one_bad_replica(variant):
    """NaN weights on one replica, at one step: with rollback or guard all go on from good weights."""
    training = Training("adamw", "one_cycle", 0.3, variant)
    for step in range(STEPS):
        if step == 4 and dist.get_rank() == 1:
            with torch.no_grad():
                training.model.module.inner.weight.fill_(float("nan"))
        training.step(step)
    assert all(t.isfinite().all() for t in training.tensors())
    assert equal_on_all_ranks([p.detach() for p in training.model.parameters()])
    assert (training.ensemble.scales["learning_rate"] < 0.5) == (variant != "guarded"), "only a rollback cuts the rate"


@pytest.mark.parametrize("variant", ["rollback", "local and guarded", "guarded"])
def test_a_nan_on_one_replica_is_contained(variant):
    run(one_bad_replica, 2, variant)
