"""The phases of a round's end: their order, one that a test brings along, and what is left when one is taken out."""

import copy
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from processes import run
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet._phases.outer_step import TakeOuterStep
from hdet._phases.phase import Phase
from hdet._phases.rollback.phase import GoBack
from hdet._phases.tail_average.phase import TailAverage

STEPS, INTERVAL = 24, 4


class Tally(Phase):
    """Adds up what every replica tells in the gather of each round; a rollback takes the round's sum back."""

    name = "tally"

    def __init__(self, rank):
        self.rank, self.total, self.rounds, self.undone_at = rank, 0.0, 0, []

    def tell(self, rnd):
        rnd.tell(self.name, [self.rank + 1.0, rnd.step])

    def after(self, rnd):
        self.rounds += 1
        self.total += sum(mine for mine, _ in rnd.heard(self.name))
        rnd.events.append(f"tally: {self.total:g}")

    def undone(self, rnd):
        self.undone_at.append(rnd.step)
        rnd.events.append("tally: taken back")

    def state_dict(self):
        return {"total": self.total, "rounds": self.rounds}

    def load_state_dict(self, state, own):
        self.total, self.rounds = state["total"], state["rounds"]


def make(tally=True, without=(), **options):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = optim.AdamW(model.parameters(), lr=0.05)
    records = []
    ensemble = hdet.Ensemble(
        optimizer, [hdet.learning_rate(optimizer, spread=0.3)], total_steps=STEPS, interval=INTERVAL, model=model,
        on_round=[records.append], **options,
    )  # fmt: skip
    kept = [phase for phase in ensemble.engine.phases if not isinstance(phase, tuple(without))]
    mine = [Tally(dist.get_rank())] if tally else []
    ensemble.engine.use([*kept[:-1], *mine, *kept[-1:]])  # the last one records what the others have told
    return model, optimizer, ensemble, records


def train(made, steps, spoil=None):
    model, optimizer, ensemble, _ = made
    for step in steps:
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ensemble.step(loss.detach() * float("nan") if step == spoil else loss)


def told(records):
    return [event for record in records for event in record.events if event.startswith("tally")]


def brought_along():
    whole = make()
    train(whole, range(10))
    saved = copy.deepcopy([part.state_dict() for part in whole[:3]])
    train(whole, range(10, STEPS))
    again = make()
    for part, state in zip(again[:3], saved, strict=True):
        part.load_state_dict(state)
    train(again, range(10, STEPS))
    tallies = [made[2].engine.phase(Tally) for made in (whole, again)]
    plain = make(tally=False)
    train(plain, range(STEPS))
    weights = [torch.cat([p.detach().flatten() for p in made[0].parameters()]) for made in (whole, again, plain)]
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])
    return [(t.total, t.rounds) for t in tallies], told(whole[3]), told(again[3])


def test_a_phase_of_ones_own_gathers_records_saves_and_resumes():
    first, second = run(brought_along, 2)
    assert first == second
    tallies, events, after = first
    assert tallies == [(18.0, 6), (18.0, 6)]
    assert events == [f"tally: {3 * k}" for k in range(1, 7)]
    assert after == events[2:]


def rolled_back():
    made = make(safety=hdet.Safety(rollback=hdet.Rollback()))
    train(made, range(STEPS), spoil=9)
    tally = made[2].engine.phase(Tally)
    return tally.undone_at, tally.total, told(made[3])


def test_a_phase_of_ones_own_reacts_to_a_rollback():
    first, second = run(rolled_back, 2)
    assert first == second
    undone_at, total, events = first
    assert (undone_at, total) == ([12], 15.0)
    assert events == ["tally: 3", "tally: 6", "tally: taken back", "tally: 9", "tally: 12", "tally: 15"]


def test_the_order_of_the_phases_is_part_of_the_algorithm():
    model = nn.Linear(2, 1)
    ensemble = hdet.Ensemble(optim.SGD(model.parameters(), lr=0.1), total_steps=4, model=model)
    assert [phase.name for phase in ensemble.engine.phases] == [
        "uneven data", "agreement", "local gradients", "scores", "averaging", "guard", "control", "outer step",
        "rollback", "tail average", "descent", "recording",
    ]  # fmt: skip


PROBE = {"probe": lambda index: torch.tensor(1.0)}
TAKEN_OUT = {
    "tail average": (
        TailAverage,
        {"averaging": hdet.Averaging(tail=0.5), **PROBE},
        {"averaging": hdet.Averaging(tail=0.0), **PROBE},
    ),
    "outer step": (TakeOuterStep, {"averaging": hdet.Averaging(outer_step=0.5)}, {}),
    "rollback": (GoBack, {"safety": hdet.Safety(rollback=hdet.Rollback())}, {}),
}


def trained(phase, options):
    made = make(tally=False, without=[phase] if phase else [], controller=hdet.controllers.Softmax(), **options)
    train(made, range(STEPS))
    return torch.cat([p.detach().flatten() for p in made[0].parameters()]).tolist(), made[2].scales


def with_and_without(name):
    phase, options, plain = TAKEN_OUT[name]
    return trained(phase, options), trained(None, plain), trained(None, options)


@pytest.mark.parametrize("name", TAKEN_OUT)
def test_what_is_taken_out_takes_its_feature_with_it_and_nothing_else(name):
    first, second = run(with_and_without, 2, name)
    assert first == second
    taken_out, plain, whole = first
    assert taken_out == plain
    assert (whole == plain) == (name != "outer step")  # the others had nothing to do in this run


OWN = {  # tests that need the phase that is taken out
    "TailAverage": r"test_tail\.py",
    "TakeOuterStep": r"test_outer_|what_auto_picks",
    "GoBack": r"test_rollback\.py|roll(s_)?back|snapshot|moments_that_overflow|nan_on_one_replica",
}
FILES = ("outer_step", "outer_momentum", "rollback", "tail", "quarantine", "judge", "invariants", "twin", "ensemble")


@pytest.mark.soak
@pytest.mark.parametrize("name", OWN)
def test_without_it_the_tests_of_all_others_pass(name):
    here = pathlib.Path(__file__).parents[1]
    files = [str(next(here.rglob(f"test_{stem}.py"))) for stem in FILES]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, "HDET_TEST_WITHOUT": name, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    assert failed, done.stdout[-3000:]
    assert not [test for test in failed if not re.search(OWN[name], test)]
