"""A learned schedule taken home: replayed to the last digit, stretched, resumed, refused where it does not fit."""

import itertools
import json
import math
import os
import warnings

import pytest
import torch
from processes import run
from torch import nn, optim

import hdet

STEPS, INTERVAL = 23, 5
pytestmark = pytest.mark.filterwarnings("ignore:the schedule was learned with")


def make(groups=2, lr=0.1):
    """A model and its optimizer; another rate for each group."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(groups)))
    parts = [{"params": layer.parameters(), "lr": lr / (k + 1)} for k, layer in enumerate(model)]
    return model, optim.AdamW(parts, lr=lr, weight_decay=0.1)


def learn(path, per_group):
    """Train on two replicas with a controller that moves everything; what each step was taken with."""
    model, o = make()
    ddp = hdet.data_parallel(model)
    rates = hdet.learning_rate(o, spread=0.3, per_group=per_group)
    explored = [rates, hdet.weight_decay(o, spread=0.3), hdet.momentum(o, spread=0.3)]
    scalar = hdet.scalar("temperature", 1.0, spread=0.1)
    ensemble = hdet.Ensemble(
        o, [*explored, scalar], total_steps=STEPS, interval=INTERVAL, model=ddp, gradients="local",
        averaging=hdet.Averaging(outer_step=0.5),
        controller=hdet.controllers.Softmax(temperature=1e-3, momentum=0.0), on_round=[hdet.JSONLines(path)],
    )  # fmt: skip
    schedule = optim.lr_scheduler.ExponentialLR(o, 0.97)
    seen = []
    for step in range(STEPS):
        scales = ensemble.scales
        rate = [scales[f"learning_rate/{k}"] if per_group else scales["learning_rate"] for k in range(2)]
        seen.append([group["lr"] * scale for group, scale in zip(o.param_groups, rate, strict=True)])
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(7 * step + hdet.find_replicas().rank))
        loss = (ddp(x) / scalar.value).square().mean()
        loss.backward()
        o.step()
        o.zero_grad()
        schedule.step()
        ensemble.step(loss)
    return seen


@pytest.fixture(scope="module", params=[False, True])
def learned(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("learned") / "rounds.jsonl"
    seen = run(learn, 2, path, request.param)[0]
    return hdet.records.read_records(path), seen


def replayed(scheduler, o, steps):
    """Learning rates by step, and everything else, as a plain loop sees them."""
    rates, others = [], []
    for _ in range(steps):
        rates.append([group["lr"] for group in o.param_groups])
        others.append([(group["weight_decay"], *group["betas"]) for group in o.param_groups])
        assert scheduler.get_last_lr() == rates[-1]
        o.step()
        scheduler.step()
    return rates, others


def test_the_replayed_values_are_the_recorded_centers_to_the_last_digit(learned, tmp_path):
    records, seen = learned
    (tmp_path / "schedule.json").write_text(json.dumps(hdet.records.make_schedule(records)))
    _, o = make()
    scheduler = hdet.records.ReplayLR(o, tmp_path / "schedule.json")
    rates, others = replayed(scheduler, o, STEPS)
    assert len({tuple(rate) for rate in rates}) == STEPS
    for record in records:
        for step in (record.step - record.steps, record.step - 1):
            assert rates[step] == seen[step]
        decay, beta = record.hyperparameters["weight_decay"], record.hyperparameters["beta1"]
        assert decay.scale_before != 1.0 or record.round == 0  # moved, so there is something to replay
        assert others[record.step - 1] == [(d, b, 0.999) for d, b in zip(decay.last, beta.last, strict=True)]
    for ours, theirs in zip(itertools.chain(*rates), itertools.chain(*seen), strict=True):
        assert ours == pytest.approx(theirs, rel=2e-3)  # straight lines between the first and last step of a round


def test_only_some_of_it_is_replayed_where_the_rest_does_not_fit(learned):
    schedule = hdet.records.make_schedule(learned[0])
    _, o = make()
    rates, _ = replayed(hdet.records.ReplayLR(o, schedule), o, STEPS)
    model, _ = make()
    sgd = optim.SGD([{"params": layer.parameters(), "momentum": 0.8} for layer in model], lr=0.1)
    scheduler = hdet.records.ReplayLR(sgd, schedule, only=["learning_rate"])
    for step in range(STEPS):
        assert [group["lr"] for group in sgd.param_groups] == rates[step]
        assert {group["momentum"] for group in sgd.param_groups} == {0.8}
        sgd.step()
        scheduler.step()
    assert all(name.startswith("learning_rate") for name in scheduler.values)


def test_a_schedule_of_another_way_to_train_is_replayed_with_a_warning(learned):
    records, _ = learned
    schedule = hdet.records.make_schedule(records)
    assert (schedule["outer_step"], schedule["gradients"]) == (0.5, "local")
    with pytest.warns(UserWarning, match="the schedule was learned with") as warned:
        hdet.records.ReplayLR(make()[1], schedule)
    first, second = (str(warning.message) for warning in warned)
    assert "learned with an outer step of 0.5" in first
    assert "hdet.Ensemble(..., averaging=hdet.Averaging(outer_step=0.5))" in first
    assert "learned with local gradients" in second
    nesterov = {"outer_step": 0.05, "outer_momentum": 0.9, "gradients": "shared"}
    with pytest.warns(UserWarning, match=r"outer_step=hdet.Nesterov\(0.05, 0.9\)"):
        hdet.records.ReplayLR(make()[1], {**schedule, **nesterov})
    plain = {"outer_step": 1.0, "gradients": "shared"}
    with pytest.warns(UserWarning, match=r"average them as well: hdet.Averaging\(tail=0.5\)"):
        hdet.records.ReplayLR(make()[1], {**schedule, **plain, "tail_average_taken": True})
    for known in ({**plain, "tail_average_taken": False}, {"outer_step": None, "gradients": None}):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            hdet.records.ReplayLR(make()[1], {**schedule, **known})


def test_a_tensor_rate_holds_what_fits_into_it(learned):
    model, _ = make()
    o = optim.SGD([{"params": layer.parameters(), "lr": torch.tensor(0.1)} for layer in model], lr=0.1)
    hdet.records.ReplayLR(o, hdet.records.make_schedule(learned[0]), only=["learning_rate"])
    _, plain = make()
    hdet.records.ReplayLR(plain, hdet.records.make_schedule(learned[0]))
    for rounded, exact in zip(o.param_groups, plain.param_groups, strict=True):
        assert isinstance(rounded["lr"], torch.Tensor)
        assert rounded["lr"] == torch.tensor(exact["lr"])


def test_what_the_forward_pass_reads_is_in_values(learned):
    records, _ = learned
    _, o = make()
    scheduler = hdet.records.ReplayLR(o, hdet.records.make_schedule(records))
    for step in range(STEPS):
        record = next(r for r in records if step < r.step)
        assert scheduler.values["temperature"] == pytest.approx(record.hyperparameters["temperature"].center)
        o.step()
        scheduler.step()


def test_it_stretches(learned):
    schedule = hdet.records.make_schedule(learned[0])
    _, o = make()
    plain, _ = replayed(hdet.records.ReplayLR(o, schedule), o, STEPS)
    _, o = make()
    long, _ = replayed(hdet.records.ReplayLR(o, schedule, total_steps=2 * STEPS - 1), o, 2 * STEPS + 5)
    assert long[0 : 2 * STEPS : 2] == [[pytest.approx(lr) for lr in rates] for rates in plain]
    for before, between, after in zip(long[0::2], long[1 : 2 * STEPS - 2 : 2], long[2::2], strict=False):
        assert between == [pytest.approx((a + c) / 2) for a, c in zip(before, after, strict=True)]
    assert long[-1] == long[2 * STEPS - 1] == plain[-1]  # held after the end


def test_it_resumes_like_any_scheduler(learned):
    schedule = hdet.records.make_schedule(learned[0])
    _, o = make()
    whole, _ = replayed(hdet.records.ReplayLR(o, schedule), o, STEPS)
    _, o = make()
    scheduler = hdet.records.ReplayLR(o, schedule)
    replayed(scheduler, o, 9)
    saved = json.loads(json.dumps(scheduler.state_dict())), o.state_dict()
    _, again = make()
    resumed = hdet.records.ReplayLR(again, schedule)
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    assert len(json.dumps(saved[0])) < 500
    assert replayed(resumed, again, STEPS - 9)[0] == whole[9:]


def test_it_sits_in_torchs_chains(learned):
    schedule = hdet.records.make_schedule(learned[0])
    _, o = make()
    chain = optim.lr_scheduler.SequentialLR(
        o, [hdet.records.ReplayLR(o, schedule), optim.lr_scheduler.ConstantLR(o, 0.5)], milestones=[10]
    )
    seen = []
    for _ in range(12):
        seen.append(o.param_groups[0]["lr"])
        o.step()
        chain.step()
    _, o = make()
    assert seen[:10] == [rates[0] for rates in replayed(hdet.records.ReplayLR(o, schedule), o, 10)[0]]


def test_a_run_that_was_cut_off_is_replayed_with_a_warning(learned):
    schedule = hdet.records.make_schedule(learned[0][:2])
    assert not schedule["complete"]
    assert schedule["total_steps"] == STEPS
    _, o = make()
    with pytest.warns(UserWarning, match=f"cut off before step {STEPS}; its values of step 9 are held"):
        scheduler = hdet.records.ReplayLR(o, schedule)
    rates, _ = replayed(scheduler, o, STEPS)
    assert rates[9] == rates[-1]


def test_what_does_not_fit_is_refused(learned, tmp_path):
    schedule = hdet.records.make_schedule(learned[0])
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="must be what `hdet export` writes"):
        hdet.records.ReplayLR(make()[1], tmp_path / "other.json")
    with pytest.raises(ValueError, match="optimizer has 1 groups; make the groups as in the run"):
        hdet.records.ReplayLR(make(groups=1)[1], schedule)
    with pytest.raises(ValueError, match=r"SGD has no 'betas' .* only=..learning_rate"):
        hdet.records.ReplayLR(optim.SGD([{"params": [p]} for p in make()[0].parameters()], lr=0.1), schedule)
    with pytest.raises(ValueError, match=r"only must be names that schedule has, got 'lr'; it has \['beta1'"):
        hdet.records.ReplayLR(make()[1], schedule, only=["lr"])
    with pytest.raises(ValueError, match="only must be a list of names"):
        hdet.records.ReplayLR(make()[1], schedule, only="learning_rate")
    with pytest.raises(ValueError, match="nothing for optimizer 1"):
        hdet.records.ReplayLR(make()[1], schedule, which=1)
    with pytest.raises(ValueError, match="upgrade hdet"):
        hdet.records.ReplayLR(make()[1], {**schedule, "version": 2})
    with pytest.raises(ValueError, match="total_steps must be at least 1"):
        hdet.records.ReplayLR(make()[1], schedule, total_steps=0)
    with pytest.raises(ValueError, match="no round to export"):
        hdet.records.make_schedule([])


PLAIN = {
    "kind": "hdet-schedule", "version": 1, "total_steps": 10, "complete": True, "hyperparameters": {"learning_rate": {
        "places": ["0/0/lr", "0/1/lr"], "steps": [0, 4, 9], "centers": [[0.1, 0.2], [0.3, 0.4], [0, 0.0]],
    }},
}  # fmt: skip


def spoiled(**changes):
    """The plain schedule with other entries at the top, or in its only hyperparameter."""
    row = PLAIN["hyperparameters"]["learning_rate"]
    inside = {key: value for key, value in changes.items() if key in row}
    outside = {key: value for key, value in changes.items() if key not in row}
    return {**PLAIN, "hyperparameters": {"learning_rate": {**row, **inside}}, **outside}


BAD_SCHEDULES = {
    "a negative rate": (spoiled(centers=[[0.1, 0.2], [0.3, -0.4], [0, 0]]), "at least 0, got -0.4 at step 4"),
    "a momentum beyond 1": (spoiled(places=["0/0/lr", "0/1/betas/0"], centers=[[1, 1.5]] * 3), "from 0 to 1, got 1.5"),
    "a rate that is no number": (spoiled(centers=[[0.1, math.nan], [1, 1], [1, 1]]), "not finite, the first at step 0"),
    "an infinite rate": (spoiled(centers=[[0.1, 0.1], [1, math.inf], [1, 1]]), "not finite, the first at step 4"),
    "null for a rate": (spoiled(centers=[[0.1, None], [1, 1], [1, 1]]), "not finite, the first at step 0"),
    "text for a rate": (spoiled(centers=[[0.1, "x"], [1, 1], [1, 1]]), r"centers\[0\]\[1\] must be a number, got 'x'"),
    "true for a rate": (spoiled(centers=[[0.1, True], [1, 1], [1, 1]]), "must be a number, got true"),
    "too few steps": (spoiled(steps=[0, 4]), "a center of learning_rate for each of its steps and places, got 2 steps"),
    "too few centers": (spoiled(centers=[[0.1, 0.2]]), "3 steps, 2 places and 1 rows"),
    "too few columns": (spoiled(centers=[[0.1]] * 3), "for each of its steps and places"),
    "a centers of numbers": (spoiled(centers=[0.1, 0.2, 0.3]), r"centers\[0\] must be a list, got 0.1"),
    "no steps": (spoiled(steps=[], centers=[]), "got 0 steps"),
    "no places": (spoiled(places=[], centers=[[]] * 3), "must have places of learning_rate, each once"),
    "a place twice": (spoiled(places=["0/0/lr"] * 2), "must have places of learning_rate, each once"),
    "places that are numbers": (spoiled(places=[0, 1]), r"places\[0\] must be text, got 0"),
    "steps that end early": (spoiled(steps=[0, 4, 7]), "must reach step 9, the last one, .* ends at step 7"),
    "steps that fall": (spoiled(steps=[0, 9, 4]), "steps of learning_rate that rise from 0 to at most 9"),
    "a step twice": (spoiled(steps=[0, 9, 9]), "that rise"),
    "steps below 0": (spoiled(steps=[-1, 4, 9]), "that rise from 0"),
    "steps beyond the end": (spoiled(steps=[0, 4, 12]), "at most 9, its total_steps less 1; got 0 to 12"),
    "half a step": (spoiled(steps=[0, 4.5, 9]), r"steps\[1\] must be a whole number, got 4.5"),
    "zero steps": (spoiled(total_steps=0), "must have steps and hyperparameters, got 0 steps"),
    "fewer than no steps": (spoiled(total_steps=-3), "total_steps must be at least 0, got -3"),
    "text for steps": (spoiled(total_steps="10"), "total_steps must be a whole number, got '10'"),
    "no total": ({key: value for key, value in PLAIN.items() if key != "total_steps"}, "an object with 'total_steps'"),
    "no hyperparameters": (spoiled(hyperparameters={}), "0 hyperparameters"),
    "a list of hyperparameters": (spoiled(hyperparameters=[1]), "hyperparameters must be an object, got a list of 1"),
    "a hyperparameter that is a number": (spoiled(hyperparameters={"lr": 5}), "hyperparameters.lr must be an object"),
    "text for a version": (spoiled(version="1"), "version must be a whole number, got '1'"),
    "no version": ({key: value for key, value in PLAIN.items() if key != "version"}, "an object with .version."),
    "text for complete": (spoiled(complete="yes"), "complete must be true or false, got 'yes'"),
    "text for an outer step": (spoiled(outer_step="1/2"), "outer_step must be a number, got '1/2'"),
    "an outer step below 0": (spoiled(outer_step=-0.5), "an outer_step of at least 0, got -0.5"),
    "an outer momentum below 0": (spoiled(outer_momentum=-1), "an outer_momentum of at least 0, got -1"),
    "a number for gradients": (spoiled(gradients=1), "gradients must be text, got 1"),
    "another kind": (spoiled(kind="other"), "must be what `hdet export` writes"),
    "no number of the optimizer's": (spoiled(places=["0/0/lr", "0/1/params"]), "has no 'params' in its groups that"),
    "no list of the optimizer's": (spoiled(places=["0/0/lr", "0/1/betas"], centers=[[0.1, 0.1]] * 3), "has no 'betas'"),
    "a third beta": (spoiled(places=["0/0/lr", "0/1/betas/7"], centers=[[0.1, 0.1]] * 3), "has no 'betas'"),
    "one place for two": (
        {**PLAIN, "hyperparameters": dict.fromkeys("ab", PLAIN["hyperparameters"]["learning_rate"])},
        "one curve for each place, got several for 'lr' of group 0",
    ),
}


@pytest.mark.parametrize("name", BAD_SCHEDULES)
def test_a_bad_schedule_is_refused_when_it_is_given(name, tmp_path):
    schedule, says = BAD_SCHEDULES[name]
    (tmp_path / "schedule.json").write_text(json.dumps(schedule))
    for given in (schedule, tmp_path / "schedule.json", str(tmp_path / "schedule.json")):
        _, o = make()
        before = [dict(group) for group in o.param_groups]
        with pytest.raises((TypeError, ValueError), match=says) as raised:
            hdet.records.ReplayLR(o, given)
        assert str(raised.value).startswith("schedule ")
        assert [dict(group) for group in o.param_groups] == before


def test_what_hangs_together_is_replayed():
    """From tuples and NumPy's numbers too, of versions that said less, or say more."""
    import numpy as np

    row = PLAIN["hyperparameters"]["learning_rate"]
    centers = tuple(map(tuple, np.array(row["centers"])))
    numpys = spoiled(centers=centers, steps=tuple(np.array(row["steps"])))
    for schedule in (PLAIN, numpys, spoiled(mood={"deep": [{}]})):
        _, o = make()
        assert replayed(hdet.records.ReplayLR(o, schedule), o, 1)[0] == [[0.1, 0.2]]
    _, o = make()
    rates, _ = replayed(hdet.records.ReplayLR(o, {key: PLAIN[key] for key in PLAIN if key != "complete"}), o, 12)
    assert rates[0] == [0.1, 0.2]
    assert rates[9] == rates[11] == [0.0, 0.0]
    with pytest.warns(UserWarning, match="begins at step 4, whose values are held before it"):
        hdet.records.ReplayLR(make()[1], spoiled(steps=[4, 5, 9]))
    with pytest.warns(UserWarning, match="cut off before step 10; its values of step 7"):
        hdet.records.ReplayLR(make()[1], spoiled(steps=[0, 4, 7], complete=False))


@pytest.mark.parametrize(
    ("schedule", "error", "says"),
    [
        ([PLAIN], TypeError, "schedule must be a file that `hdet export` wrote, or its content as a dict, got list"),
        (None, TypeError, "got NoneType"),
        (5, TypeError, "got int"),
        (b"[" * 100_000, ValueError, "it is nested too deeply|it is no JSON"),
        (b'{"kind": "hdet-schedule", "version": 1, "total_steps": 1e999}', TypeError, "whole number, got inf"),
        (b"\xff\xfe", ValueError, "it is not UTF-8"),
        (b"[1, 2]", ValueError, "must be what `hdet export` writes"),
        (b"", ValueError, "it is no JSON"),
    ],
)
def test_a_file_that_is_no_schedule_is_refused(schedule, error, says, tmp_path):
    if isinstance(schedule, bytes):
        (tmp_path / "schedule.json").write_bytes(schedule)
        schedule = tmp_path / "schedule.json"
    with pytest.raises(error, match=says):
        hdet.records.ReplayLR(make()[1], schedule)


def test_a_pipe_is_no_schedule(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="a named pipe, not a file"):
        hdet.records.ReplayLR(make()[1], tmp_path / "pipe")
    with pytest.raises(FileNotFoundError):
        hdet.records.ReplayLR(make()[1], tmp_path / "none.json")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"which": True}, "which must be an int"),
        ({"which": -1}, "which must be at least 0"),
        ({"only": 5}, "only must be a list of names"),
        ({"only": [1]}, "only must be a list of names"),
        ({"total_steps": True}, "total_steps must be an int"),
        ({"total_steps": 2.5}, "total_steps must be an int"),
    ],
)
def test_bad_arguments_are_refused(options, says):
    with pytest.raises((TypeError, ValueError), match=says):
        hdet.records.ReplayLR(make()[1], PLAIN, **options)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"last_epoch": "9"}, "last_epoch of state_dict must be an int"),
        ({"last_epoch": -1}, "last_epoch of state_dict must be at least 0"),
        ({"last_epoch": ...}, "last_epoch of state_dict must be an int"),
        ({"base_lrs": [0.1]}, "base_lrs of state_dict must have a rate for each of the 2 parameter groups"),
        ({"_last_lr": None}, "_last_lr of state_dict must have a rate for each"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(changes, says):
    scheduler = hdet.records.ReplayLR(make()[1], PLAIN)
    state = {key: value for key, value in {**scheduler.state_dict(), **changes}.items() if value is not ...}
    with pytest.raises((TypeError, ValueError), match=says):
        scheduler.load_state_dict(state)
    with pytest.raises(TypeError, match="must be what ReplayLR"):
        scheduler.load_state_dict([state])
    scheduler.load_state_dict(
        {**hdet.records.ReplayLR(make()[1], PLAIN).state_dict(), "_curves": None, "total_steps": 3}
    )
    assert scheduler.total_steps == 10
    assert len(scheduler.values) == 2


def test_a_schedule_does_not_write_into_the_parameters():
    model = nn.Linear(2, 1)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    row = {"places": ["0/0/params/0"], "steps": [0, 9], "centers": [[0.1], [0.1]]}
    about = {"kind": "hdet-schedule", "version": 1, "total_steps": 10}
    with pytest.raises(ValueError, match="'params' in its groups that takes a number"):
        hdet.records.ReplayLR(optimizer, {**about, "hyperparameters": {"learning_rate": row}})
    assert optimizer.param_groups[0]["params"][0] is model.weight
