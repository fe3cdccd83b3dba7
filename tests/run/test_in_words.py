"""An ensemble in one line: right at any time, and never an error."""

import pytest
import torch
from processes import run
from torch import nn, optim

import hdet


def make(**options):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    explored = [hdet.learning_rate(optimizer, spread=0.5), hdet.weight_decay(optimizer, spread=0.5)]
    defaults = {"total_steps": 6, "interval": 3, "model": model}
    return model, optimizer, hdet.Ensemble(optimizer, explored, **(defaults | options))


def step(model, optimizer, ensemble):
    model(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    ensemble.step(1.0)


def whole_run():
    model, optimizer, ensemble = make()
    said, inside = [repr(ensemble)], []
    hook = optimizer.register_step_pre_hook(lambda *_: inside.append(repr(ensemble)))  # after the ensemble's own
    for number in range(6):
        step(model, optimizer, ensemble)
        if number == 1:
            with ensemble.consensus():
                said.append(repr(ensemble))
    hook.remove()
    said.append(repr(ensemble))
    ensemble.close()
    return [*said, repr(ensemble)], inside, ensemble.replicas.rank, ensemble.multipliers


def test_from_the_first_step_to_the_last():
    for said, inside, rank, _ in run(whole_run, 2):
        begun, held, ended, closed = said
        assert begun.startswith(f"Ensemble(replica {rank} of 2, step 0 of 6, learning_rate 0.01 x ")
        assert begun.endswith(", interval 3, Fixed)")
        assert "step 2 of 6" in held
        assert held.endswith(", Fixed, holds the consensus)")
        assert ended == (
            f"Ensemble(replica {rank} of 2, step 6 of 6, learning_rate 0.01, weight_decay 0.01, interval 3, Fixed, "
            "finished)"
        )
        assert closed == ended.replace("finished", "closed")
        assert all("learning_rate 0.01 x " in text for text in inside)  # though the groups hold values then


def test_in_a_run_of_unknown_length_with_many_hyperparameters_and_a_rate_on_a_device():
    parameters = [nn.Parameter(torch.zeros(2, device="meta")) for _ in range(5)]
    optimizer = optim.SGD([{"params": [p]} for p in parameters], lr=0.1)
    rates = hdet.learning_rate(optimizer, spread=0.2, per_group=True)
    ensemble = hdet.Ensemble(optimizer, rates, interval=2)
    for group in optimizer.param_groups[:1]:
        group["lr"] = torch.zeros((), device="meta")  # nobody waits for what it is
    assert repr(ensemble) == (
        "Ensemble(replica 0 of 1, step 0, learning_rate/0 schedule, learning_rate/1 0.1, learning_rate/2 0.1, 2 more, "
        "interval 2, Fixed)"
    )


def test_the_drop_in_scheduler_shows_its_ensemble():
    optimizer = optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
    scheduler = hdet.OneCycleAutoLR(optimizer, 0.5, total_steps=10)
    assert repr(scheduler) == f"OneCycleAutoLR({scheduler.ensemble!r})"
    assert "learning_rate/0 0.02, interval" in repr(scheduler)


@pytest.mark.parametrize("kind", [hdet.Ensemble, hdet.OneCycleAutoLR])
def test_of_one_that_was_never_made(kind):
    assert repr(kind.__new__(kind)).startswith("<hdet.")


def test_of_one_in_a_broken_state():
    _, optimizer, ensemble = make()
    optimizer.param_groups.clear()
    assert "learning_rate schedule" in repr(ensemble)
    ensemble.engine.run.settings = None
    assert repr(ensemble).startswith("<hdet.ensemble.Ensemble object")
