from dataclasses import replace

import pytest
import torch
from torch import nn, optim

import hdet
from hdet._explore import slots
from hdet.controllers import Observation, Report
from hdet.controllers.report import check_state, plan

RUNGS = tuple(slots.multipliers(4, 2.0, "log"))
ONES = (1.0,) * 4
GROUPS = ["learning_rate/0", "learning_rate/1"]


def report(multipliers, total_steps, step=100):
    probe = (1.0, 0.9, 0.85, 0.9)
    seen = {name: Observation(1e-3, 1e-3, 0.0, m, 1e-3) for name, m in multipliers.items()}
    return Report(step, probe, seen, total_steps, probe, 1.1)


@pytest.mark.parametrize(
    ("names", "total_steps", "interval", "outer_step", "design", "until", "finds"),
    [
        (["learning_rate"], 400, 5, 1.0, "permutations", {"learning_rate": 400}, False),
        (["learning_rate"], 500, 5, 1.0, "permutations", {"learning_rate": 500}, False),
        (["learning_rate"], 501, 10, 1.0, "permutations", {"learning_rate": 0}, True),
        (["learning_rate"], None, 10, 1.0, "permutations", {"learning_rate": 0}, True),
        (["learning_rate", "momentum"], 400, 5, 1.0, "turns", {"learning_rate": 400}, False),
        (["learning_rate", "momentum"], 8000, 10, 1.0, "permutations", {"learning_rate": 0}, True),
        (["learning_rate", "a", "b"], 8000, 10, 1.0, "orthogonal", {"learning_rate": 0}, True),
        (GROUPS, 400, 5, 1.0, "turns", dict.fromkeys(GROUPS, 400), False),
        (GROUPS, 8000, 10, 1.0, "permutations", dict.fromkeys(GROUPS, 0), True),
        (["weight_decay"], 800, None, 1.0, "permutations", {}, False),
        (["weight_decay", "momentum"], 8000, None, 1.0, "orthogonal", {}, False),
        (["learning_rates_of_all_kinds"], 800, None, 1.0, "permutations", {}, False),
    ],
)  # fmt: skip
def test_the_plan(names, total_steps, interval, outer_step, design, until, finds):
    told = hdet.Auto().plan(names, total_steps)
    assert (told.interval, told.outer_step, told.design) == (interval, outer_step, design)
    assert (dict(told.until), told.finds) == (until, finds)
    assert set(told.why) == set(names)


def test_an_outer_step_is_asked_for_where_the_rate_was_found():
    auto = hdet.Auto(outer_step=0.5)
    assert [auto.plan(["learning_rate"], steps).outer_step for steps in (500, 501, None)] == [1.0, 0.5, 0.5]


def test_the_reasons_are_given_in_words():
    short = hdet.Auto().plan(["learning_rate", "weight_decay"], 400).why
    assert short["learning_rate"].startswith("line search (neutral)")
    assert "400 steps" in short["learning_rate"]
    assert short["weight_decay"].startswith("slopes")
    assert "8000 steps" in hdet.Auto().plan(["learning_rate"], 8000).why["learning_rate"]
    assert "unknown length" in hdet.Auto().plan(["learning_rate"], None).why["learning_rate"]
    assert "takes 0.5 of each" in hdet.Auto(outer_step=0.5).plan(["learning_rate"], 8000).why["learning_rate"]


def test_each_hyperparameter_is_moved_by_its_own_controller():
    auto, names = hdet.Auto(), ["weight_decay", "learning_rate"]
    seen = report(dict.fromkeys(names, RUNGS), 400)
    after = auto.update(auto.init(names), seen)
    assert list(after) == names
    for name, controller in (("learning_rate", auto.line_search), ("weight_decay", auto.slope)):
        alone = replace(seen, observations={name: seen.observations[name]})
        assert after[name] == controller.update(controller.init([name]), alone)[name]
        assert after[name]["scale"] != 1.0


def test_in_turns_only_the_one_that_varied_is_moved():
    auto, names = hdet.Auto(), ["learning_rate", "weight_decay"]
    state = auto.init(names)
    for turn, other in (names, names[::-1]):
        after = auto.update(state, report({turn: RUNGS, other: ONES}, 400))
        assert after[turn] != state[turn]
        kept = {key: value for key, value in after[other].items() if key != "highest"}
        assert kept == {key: value for key, value in state[other].items() if key != "highest"}


@pytest.mark.parametrize("total_steps", [8000, None])
def test_in_long_runs_learning_rates_are_left_to_the_schedule(total_steps):
    auto, names = hdet.Auto(), ["learning_rate/0", "momentum"]
    state = auto.init(names)
    after = auto.update(state, report(dict.fromkeys(names, RUNGS), total_steps))
    assert after["learning_rate/0"] == state["learning_rate/0"]
    assert after["momentum"]["scale"] != 1.0


def test_its_options_reach_their_controllers():
    auto = hdet.Auto(
        hdet.controllers.LineSearch(interval=7),
        hdet.controllers.Slope(step_size=0.0),
        short=50,
        outer_step=0.7,
        interval=20,
    )
    names = ["learning_rate", "momentum"]
    assert auto.plan(names, 50).interval == 7
    long = auto.plan(names, 51)
    assert (long.interval, long.outer_step) == (20, 0.7)
    assert auto.update(auto.init(names), report(dict.fromkeys(names, RUNGS), 51))["momentum"]["scale"] == 1.0


def test_its_state_is_checked_against_its_own():
    auto = hdet.Auto()
    state = auto.init(["learning_rate", "momentum"])
    assert check_state(state, auto.init(["learning_rate", "momentum"])) == state
    with pytest.raises(ValueError, match="saved"):
        check_state(hdet.controllers.Slope().init(["learning_rate", "momentum"]), state)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"line_search": hdet.controllers.Slope()}, TypeError),
        ({"slope": None}, TypeError),
        ({"short": -1}, ValueError),
        ({"outer_step": 0.0}, ValueError),
        ({"tail_average": 1.1}, ValueError),
        ({"interval": 0}, ValueError),
    ],
)
def test_bad_options(bad, error):
    with pytest.raises(error, match=f"{next(iter(bad))} must"):
        hdet.Auto(**bad)


def test_one_replica_searches_first_in_a_short_run_too():
    auto = hdet.Auto()
    assert auto.plan(["learning_rate"], 400, 1) == replace(
        auto.plan(["learning_rate"], 501), tail_average=0.0, why=auto.plan(["learning_rate"], 400, 1).why
    )
    assert "one replica" in auto.plan(["learning_rate"], 400, 1).why["learning_rate"]
    assert not auto.plan(["learning_rate"], 400, 2).finds
    assert not hdet.Auto(finds=False).plan(["learning_rate"], 400, 1).finds
    assert auto.plan(["momentum"], 400, 1) == auto.plan(["momentum"], 400, 2)


def test_plans_with_and_without_the_number_of_replicas():
    class Told(hdet.controllers.Fixed):
        def plan(self, names, total_steps, replicas=None):
            return hdet.controllers.Plan(interval=replicas)

    class Untold(hdet.controllers.Fixed):
        def plan(self, names, total_steps):
            return hdet.controllers.Plan(interval=7)

    assert [plan(told(), ["a"], 10, 3).interval for told in (Told, Untold, hdet.controllers.Fixed)] == [3, 7, None]


def problem(prepared, steps=400, rate=1e-4):
    """A short run from a rate 30 times too low; how many replicas, whether a search is planned, and the last loss."""
    torch.manual_seed(0)
    model = hdet.data_parallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    o = optim.Adam(model.parameters(), lr=rate)
    schedule = optim.lr_scheduler.OneCycleLR(o, max_lr=rate, total_steps=steps)

    def batch(index):
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(index))
        return x, (x[:, :4] * x[:, 4:]).sum(1, keepdim=True) / 2

    def loss_of(model, given):
        return (model(given[0]) - given[1]).square().mean()

    probe = hdet.Probe(lambda index: [batch(10_000 + index)], loss_of)
    events = []
    ensemble = hdet.Ensemble(
        o, [hdet.learning_rate(o, spread=2.0, ladder="log")], total_steps=steps, model=model, probe=probe,
        on_round=[lambda record: events.extend(record.events)],
    )  # fmt: skip
    if prepared:
        ensemble.find_lr(lambda index: loss_of(model, batch(index)).backward(), scheduler=schedule)
    for step in range(steps):
        loss = loss_of(model, batch(step))
        loss.backward()
        o.step()
        o.zero_grad()
        schedule.step()
        ensemble.step(loss)
    ensemble.close()
    return events, loss_of(model, batch(99_999)).item()


@pytest.mark.parametrize("in_process", [False, True])
def test_a_short_run_in_one_process_ends_well(in_process):
    events, found = hdet.in_process(lambda: problem(True), 1)[0] if in_process else problem(True)
    assert "to be found before the first step" in events[0]
    assert any(event.startswith("found: ") for event in events)
    assert found < 0.15


def test_a_search_that_was_not_made_is_missed():
    with pytest.warns(UserWarning, match="one replica, but find_lr"):
        _, lost = problem(False)
    assert lost > 0.5
