"""What the lab's loop lets a user put in: an optimizer, weights to start from, noise, evaluations on the way."""

import contextlib

import pytest
import torch

import hdet
from hdet_lab.errors import OptionError
from hdet_lab.folder import read_lines
from hdet_lab.options import RunOptions
from hdet_lab.recipe import Recipe
from hdet_lab.train import train

SMOKE = RunOptions("text", size="smoke", steps=8, replicas=2, interval=2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    return folder, hdet.in_process(train, 2, SMOKE, folder)[0]


def weights(folder):
    return torch.load(folder / "weights.pt", weights_only=True)


def test_evaluations_on_the_way_change_nothing(trained, tmp_path):
    folder, result = trained
    again = hdet.in_process(train, 2, SMOKE.replace(evaluate_every=3), tmp_path / "run")[0]  # in mid-round too
    assert again["held_out"] == result["held_out"]
    assert all(torch.equal(p, weights(tmp_path / "run")[name]) for name, p in weights(folder).items())
    lines = read_lines(tmp_path / "run" / "held_out.jsonl")
    assert [line["step"] for line in lines] == [3, 6]
    assert lines[1]["loss"] < lines[0]["loss"]
    assert not (folder / "held_out.jsonl").exists()


def test_a_run_begins_with_the_weights_of_another(trained, tmp_path):
    folder, result = trained
    options = SMOKE.replace(controller="none", interval="auto", start=str(folder), peak_lr=1e-12, steps=1)
    begun = hdet.in_process(train, 2, options, tmp_path / "begun")[0]
    assert begun["held_out"]["loss"] == pytest.approx(result["held_out"]["loss"], abs=1e-6)
    noisy = hdet.in_process(train, 2, options.replace(warm_noise=0.05), tmp_path / "noisy")[0]
    moved = (weights(tmp_path / "noisy")["head.weight"] - weights(folder)["head.weight"]).std()
    expected = 0.05 * weights(folder)["head.weight"].square().mean().sqrt()
    assert moved == pytest.approx(float(expected), rel=0.05)
    assert noisy["held_out"]["loss"] != begun["held_out"]["loss"]


def test_weights_that_are_not_there_are_said_so(tmp_path):
    for start in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(hdet.ReplicaError) as raised:
            hdet.in_process(train, 2, SMOKE.replace(start=str(start)), tmp_path / "run")
        assert isinstance(raised.value.__cause__, OptionError)
        assert "start must be the folder of a finished run" in str(raised.value.__cause__)


def test_weights_of_another_task_are_said_so(trained, tmp_path):
    with pytest.raises(hdet.ReplicaError, match="start must be the folder of a run of the same task"):
        options = RunOptions("digits", size="smoke", steps=1, replicas=2, start=str(trained[0]))
        hdet.in_process(train, 2, options, tmp_path / "run")


class Still(Recipe):
    """A rate of 0, and weights that are gone after an evaluation."""

    def schedule(self, optimizer, peak_lr, steps):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)

    @contextlib.contextmanager
    def evaluating(self, task, model, optimizer):
        yield
        for p in model.parameters():
            p.data.zero_()


def test_a_recipe_has_its_own_schedule_and_evaluation(tmp_path):
    options = SMOKE.replace(controller="none", interval="auto", replicas=1, evaluate_every=8)
    result = train(options, tmp_path / "run", Still())
    untrained = options.make_task().evaluate(options.make_task().model())["loss"]
    assert read_lines(tmp_path / "run" / "held_out.jsonl")[0]["loss"] == untrained
    assert result["held_out"]["loss"] != untrained
