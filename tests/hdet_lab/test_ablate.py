"""The paper's ablation: every row is a run of its own kind, and a stopped one goes on."""

import json
import re

import pytest

from hdet_lab import ablate as ablation
from hdet_lab import cli, many_runs, run_start
from hdet_lab.errors import NoRateError, OptionError
from hdet_lab.folder import read
from hdet_lab.options import RunOptions
from hdet_lab.worker import Job

SMALL = ("ablate", "text", "--size", "smoke", "--steps", "6", "--replicas", "2", "--seeds", "1", "--in-process")


@pytest.fixture(scope="module")
def ablated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ablated") / "runs"
    chosen = ("--high-lr", "0.1", "--controllers", "softmax,auto", "--gradients", "shared")
    assert cli.main([*SMALL, *chosen, "--folder", str(folder)]) == 0
    return folder, chosen


def test_every_row_is_a_run_of_its_own(ablated):
    folder, _ = ablated
    result = read(folder / "ablate.json")
    rows = {(row["name"], row["controller"]): row for row in result["rows"]}
    assert len(rows) == 8
    made = {}
    for path in folder.glob("*-lr-*"):
        about = read(path / "options.json")["options"]
        made[about["controller"], about["warm_noise"], about["peak_lr"]] = about
        assert about["start"] == str(folder / "warm-seed-0")
    assert set(made) == {
        ("none", 0.0, 0.01), ("none", 0.0, 0.1), ("none", 0.01, 0.1), ("fixed", 0.01, 0.1),
        ("softmax", 0.0, 0.1), ("softmax", 0.01, 0.1), ("auto", 0.0, 0.1), ("auto", 0.01, 0.1),
    }  # fmt: skip
    assert made["auto", 0.01, 0.1]["charge"]
    assert made["softmax", 0.01, 0.1]["per_group"]
    losses = [row["losses"][0] for row in rows.values()]
    assert len(set(losses)) == len(losses)
    assert set(rows["full", "softmax"]["groups"]) == {"embedding", "no_decay", "dense"}
    assert not rows["full", "auto"]["groups"]


def test_a_second_call_runs_what_is_missing(ablated, monkeypatch, capsys):
    folder, chosen = ablated
    before = read(folder / "ablate.json")
    (folder / "softmax-shared-warm-lr-0.1-seed-0" / "result.json").unlink()
    launched = []
    launch = many_runs.launch
    monkeypatch.setattr(many_runs, "launch", lambda jobs, **how: (launched.extend(jobs), launch(jobs, **how)))
    assert cli.main([*SMALL, *chosen, "--folder", str(folder)]) == 0
    assert [(job.options.controller, job.options.warm_noise) for job in launched] == [("softmax", 0.01)]
    after = read(folder / "ablate.json")
    for row in (*before["rows"], *after["rows"]):
        del row["seconds"]
    assert json.dumps(after) == json.dumps(before)
    told = capsys.readouterr().out
    assert "without warm init" in told
    assert "fastest decay first" in told
    assert cli.main([*SMALL, "--high-lr", "0.2", "--folder", str(folder)]) == 1
    assert "other options" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (("--controllers", "slope"), "--controllers must be of softmax,auto, each once; got 'slope'"),
        (("--gradients", "shared,shared"), "--gradients must be of shared,local"),
        (("--high-lr", "-1"), "--high-lr must be positive, got -1.0"),
        (("--noise", "nan"), "--noise must be positive, got nan"),
        (("--seeds", "0"), "--seeds must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_one_line(wrong, said, tmp_path, capsys):
    assert cli.main([*SMALL, *wrong, "--folder", str(tmp_path / "x")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_the_first_rate_that_gives_half_back():
    losses = {0.01: 1.0, 0.03: 1.9, 0.09: 2.0, 0.27: 9.0}
    assert ablation.breaking_rate(0.01, lambda rate: (losses[rate], 3.0)) == 0.09
    losses[0.09] = float("nan")
    assert ablation.breaking_rate(0.01, lambda rate: (losses[rate], 3.0)) == 0.09
    with pytest.raises(OptionError, match="high_lr was not found: plain training works at all rates up to 590"):
        ablation.breaking_rate(0.01, lambda rate: (1.0, 3.0))


def test_what_became_of_the_groups(tmp_path):
    bases, scales = (0.2, 1.0, 0.6, 0.2, 0.01), (1.0, 1.0, 0.9, 0.5, 7.0)
    rounds = [
        {"round": k, "step": k, "full": True, "scores": [1.0], "hyperparameters": {"learning_rate/dense": {
            "base": base, "center": base * scale, "values": [base * scale], "scale": scale, "proposed_scale": scale}}}
        for k, (base, scale) in enumerate(zip(bases, scales, strict=True))
    ]  # fmt: skip
    (tmp_path / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rounds))
    assert ablation.scales_by_group([tmp_path]) == {"dense": {"half": 0.9, "tenth": 0.5}}


def test_a_row_that_diverges_is_a_row(tmp_path, capsys):
    sgd = ("--optimizer", "sgd", "--peak-lr", "0.01", "--high-lr", "1e20")
    chosen = ("--controllers", "softmax", "--gradients", "shared", "--folder", str(tmp_path / "runs"))
    assert cli.main([*SMALL, *sgd, *chosen]) == 0
    losses = {row["name"]: row["losses"] for row in read(tmp_path / "runs" / "ablate.json")["rows"]}
    assert losses["full"] == losses["without auto-LR"] == losses["baseline, high"] == [None]
    assert losses["baseline, low"][0] > 0
    assert "diverged" in capsys.readouterr().out
    told = read(tmp_path / "runs" / "softmax-shared-warm-lr-1e+20-seed-0" / "result.json")["diverged"]
    assert "the run has diverged" in told


def test_a_search_that_finds_nothing_is_a_row(tmp_path, monkeypatch):
    def nothing(*given):
        raise NoRateError("the probe's loss never fell")

    monkeypatch.setattr(run_start, "find", nothing)
    options = RunOptions("digits", size="smoke", steps=501, controller="auto", charge=True)
    jobs = [Job(options.replace(seed=seed), str(tmp_path / f"run-{seed}")) for seed in (0, 1)]
    results = many_runs.run_all_to_the_end(jobs, lambda size: True)
    assert [(one["held_out"], one["no_rate"]) for one in results] == [(None, "the probe's loss never fell")] * 2
    row = {"controller": "auto", "gradients": "shared", "peak_lr": 0.1, "train_losses": [None], "seconds": 1.0}
    low = {**row, "name": "baseline, low", "losses": [1.0], "train_losses": [1.0], "groups": {}, "no_rate": 0}
    full = {**row, "name": "full", "losses": [None], "groups": {}, "no_rate": 1}
    shown = ablation.show({"rows": [low, full], "seeds": [0], "noise": 0.01})
    assert re.search(r"full +auto, shared +0.1 +no rate found +1 of 1 seeds +-", shown)
