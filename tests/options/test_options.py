"""The options of an ensemble: small objects that check themselves and tell themselves to the other replicas."""

import inspect
from dataclasses import dataclass, fields

import pytest
import torch
from torch import nn, optim

import hdet
from hdet.integrations.hosted import Hosted

ELSEWHERE = {
    "guard": "safety=hdet.Safety(guard=...)",
    "rollback": "safety=hdet.Safety(rollback=...)",
    "limits": "safety=hdet.Safety(limits=...)",
    "atomic": "safety=hdet.Safety(atomic=...)",
    "outer_step": "averaging=hdet.Averaging(outer_step=...)",
    "tail": "averaging=hdet.Averaging(tail=...)",
    "tail_average": "averaging=hdet.Averaging(tail=...)",
    "average_state": "averaging=hdet.Averaging(state=...)",
    "also": "averaging=hdet.Averaging(followers=...)",
    "process_group": "replicas=process_group",
    "mesh": "replicas=mesh",
    "act": "observe_only=True",
    "start_step": "ensemble.start_from(start_step)",
}


def optimizer():
    return optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)


def test_the_number_of_arguments():
    ensemble, one_cycle = (list(inspect.signature(c).parameters) for c in (hdet.Ensemble, hdet.OneCycleAutoLR))
    assert len(ensemble) == 15
    assert len(one_cycle) <= 28
    assert one_cycle[23:] == ["model", "loader", "loss_fn", "decay", "ensemble"]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_option_that_is_elsewhere_is_answered_with_where(name):
    with pytest.raises(TypeError, match="has no argument") as raised:
        hdet.Ensemble(optimizer(), total_steps=10, **{name: 1})
    assert f"hdet.Ensemble has no argument {name!r}; write {ELSEWHERE[name]}" in str(raised.value)


def test_a_name_that_nobody_knows_is_left_to_python():
    with pytest.raises(TypeError, match="unexpected keyword argument 'gard'"):
        hdet.Ensemble(optimizer(), total_steps=10, gard=True)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("guard", r'ensemble=\{"safety": hdet\.Safety\(guard=\.\.\.\)\}'),
        ("outer_step", r'ensemble=\{"averaging": hdet\.Averaging\(outer_step=\.\.\.\)\}'),
        ("mesh", r'ensemble=\{"replicas": mesh\}'),
        ("seed", r'ensemble=\{"seed": \.\.\.\}'),
        ("start_step", "last_epoch="),
        ("auto_lr_decay", "decay="),
        ("auto_lr_max_scale", "max_scale="),
        ("interval", "model_sync_interval="),
        ("controller", "enable_auto_lr=True"),
        ("hyperparameters", "ensemble_lr_spread_ratio="),
        ("probe", "hdet.Ensemble"),
    ],
)
def test_one_cycle_says_what_to_write(name, write):
    with pytest.raises(TypeError, match=f"{name}'; write .*{write}"):
        hdet.OneCycleAutoLR(optimizer(), 0.1, 10, **{name: 1})
    if name != "seed":
        with pytest.raises(
            TypeError, match=f"ensemble= of hdet.OneCycleAutoLR has no argument '{name}'; write .*{write}"
        ):
            hdet.OneCycleAutoLR(optimizer(), 0.1, 10, ensemble={name: 1})


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"sead": 1}, "'sead' is no argument of ensemble= of hdet.OneCycleAutoLR, which takes averaging, safety"),
        ({"total_steps": 9}, "write total_steps="),
        ({"model": None}, "write model=model"),
        ([("seed", 1)], r'ensemble must be a dict .*write for example ensemble=\{"seed": 1\}'),
    ],
)
def test_the_ensemble_of_one_cycle_is_checked(given, match):
    with pytest.raises(TypeError, match=match):
        hdet.OneCycleAutoLR(optimizer(), 0.1, 10, ensemble=given)


def test_one_cycle_gives_its_ensemble_what_it_is_told():
    records, ema = [], nn.Linear(2, 1)
    scheduler = hdet.OneCycleAutoLR(
        optimizer(), 0.1, 10, model_sync_interval=2,
        ensemble={
            "averaging": hdet.Averaging(outer_step=0.5, followers=[ema]), "safety": hdet.Safety(atomic=True),
            "seed": 7, "on_round": [records.append],
        },
    )  # fmt: skip
    for _ in range(2):
        scheduler.optimizer.step()
        scheduler.step()
    assert (scheduler.ensemble.seed, len(records), records[0].outer_step) == (7, 1, 0.5)


def test_the_callbacks_take_the_same_objects():
    Hosted(None, {"safety": hdet.Safety(guard=True), "averaging": hdet.Averaging(tail=0.5), "replicas": None})
    with pytest.raises(TypeError, match=r"no argument 'guard'; write safety=hdet\.Safety\(guard"):
        Hosted(None, {"guard": True})
    with pytest.raises(TypeError, match="start_step is given by the trainer; leave it out"):
        Hosted(None, {"start_step": 3})


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: hdet.Averaging(outer_step=0.0), ValueError, r"outer_step must lie in \(0, 1\].* outer_step=0.5"),
        (lambda: hdet.Averaging(outer_step="half"), TypeError, "outer_step must be a number"),
        (lambda: hdet.Averaging(tail=1.5), ValueError, r"tail must lie in \[0, 1\].* tail=0.5"),
        (lambda: hdet.Averaging(tail=True), TypeError, "tail must be a number"),
        (lambda: hdet.Averaging(state=0), TypeError, "state must be True or False, got 0"),
        (
            lambda: hdet.Averaging(followers=[3]),
            TypeError,
            r"followers must hold modules or tensors.*followers=\[ema\]",
        ),
        (lambda: hdet.Averaging(followers=7), TypeError, r"followers must be a list, got int; write followers=\[ema\]"),
        (lambda: hdet.Averaging(followers=nn.Linear(1, 1)), TypeError, "followers must be a list, got Linear"),
        (lambda: hdet.Averaging(followers=torch.ones(3)), TypeError, "followers must be a list, got Tensor"),
        (lambda: hdet.Safety(guard="yes"), TypeError, "guard must be True or False, got 'yes'"),
        (lambda: hdet.Safety(atomic=1), TypeError, "atomic must be True or False, got 1"),
        (
            lambda: hdet.Safety(rollback=3),
            TypeError,
            r"rollback must be an hdet\.Rollback.*rollback=hdet\.Rollback\(\)",
        ),
        (lambda: hdet.Safety(limits=2.0), TypeError, r"limits must be an hdet\.Limits.*hdet\.Limits\(per_round"),
    ],
)
def test_options_check_themselves(make, error, match):
    with pytest.raises(error, match=match):
        make()


def test_what_is_left_out_is_filled_in():
    assert hdet.Safety(rollback=True) == hdet.Safety(rollback=hdet.Rollback(), limits=hdet.Limits())
    assert hdet.Safety(rollback=False) == hdet.Safety() == hdet.Safety(limits=hdet.Limits())
    assert hdet.Averaging(outer_step=1) == hdet.Averaging(outer_step=1.0, followers=[nn.Linear(1, 1)])


def test_every_option_is_told_but_for_the_followers_which_are_compared_as_tensors():
    assert list(hdet.Averaging().told()) == ["averaging.outer_step", "averaging.tail", "averaging.state"]
    assert list(hdet.Safety().told()) == [f"safety.{option.name}" for option in fields(hdet.Safety)]


def test_a_new_option_is_told_by_its_field_alone():
    @dataclass(frozen=True)
    class More(hdet.Averaging):
        more: int = 3

    ensemble = hdet.Ensemble(optimizer(), total_steps=10, averaging=More(more=5))
    assert ensemble.engine.run.settings.told()["averaging.more"] == 5
    assert ensemble.engine.run.settings.averaging.outer_step == 1.0  # filled in, and still of its class
