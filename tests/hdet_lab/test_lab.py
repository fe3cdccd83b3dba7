"""The command line, as users run it: real processes, real signals, real files."""

import contextlib
import dataclasses
import io
import itertools
import json
import multiprocessing
import re
import shutil
import socket
import subprocess
import sys
import time

import pytest
import torch
from commands import ENVIRONMENT, SMOKE, run
from torch import nn

import hdet
from hdet_lab import cli, ensemble_from_options, finder, pictures, run_log, run_start, summary
from hdet_lab import demo as demos
from hdet_lab import sweep as sweeps
from hdet_lab.errors import LabError, OptionError
from hdet_lab.folder import RunFolder, read, read_lines
from hdet_lab.lock import LOCK, locked
from hdet_lab.options import RunOptions

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def found_rate(rate, steps, samples=0, cost=0.0, seconds=0.0):
    interval = (rate / 3, rate * 3)
    return hdet.FoundRate(rate, 1.0, ((rate,),), interval, interval, 1.0, 2.0, [], [], steps, samples, cost, seconds)


def losses(folder):
    """What a run measured, without what it took."""
    result = read(folder / "result.json")
    return result["held_out"], result["train_loss"], read_lines(folder / "losses.jsonl")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of one run with two replicas; what was printed is in table.txt."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        assert cli.main(["train", "text", *SMOKE, "--folder", str(folder)]) == 0
    (folder / "table.txt").write_text(shown.getvalue())
    return folder


def test_train_ends_in_a_table_and_files(trained):
    folder, shown = trained, (trained / "table.txt").read_text()
    assert "held out" in shown
    assert "bits_per_byte" in shown
    assert f"Everything is in {folder}\nNext: " in shown
    assert RunOptions.from_json(read(folder / "options.json")["options"]).task == "text"
    rounds = read_lines(folder / "rounds.jsonl")
    assert [record["step"] for record in rounds] == list(range(1, 13))
    assert len(rounds[0]["hyperparameters"]["learning_rate"]["values"]) == 2
    assert [line["step"] for line in read_lines(folder / "losses.jsonl")] == list(range(1, 13))
    assert read(folder / "result.json")["held_out"]["loss"] > 0
    assert (folder / "fan.png").stat().st_size > 1000
    assert (folder / "losses.png").stat().st_size > 1000


def test_the_same_seed_gives_the_same_result_to_the_last_digit(trained, tmp_path):
    assert cli.main(["train", "text", *SMOKE, "--folder", str(tmp_path / "run")]) == 0
    assert losses(tmp_path / "run") == losses(trained)


def test_torchrun_gives_the_same_result(trained, tmp_path):
    """Two agents on loopback, as on two machines."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        endpoint = f"localhost:{probe.getsockname()[1]}"
    meet = ("--nnodes", 2, "--nproc-per-node", 1, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint)
    command = (*TORCHRUN, *meet, "--rdzv-id", "7", "-m", "hdet_lab.train", "text", *SMOKE)
    words = [str(part) for part in (*command, "--folder", tmp_path / "run")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    agents = [subprocess.Popen(words, env=ENVIRONMENT, text=True, **pipes) for _ in range(2)]
    shown = ""
    for agent in agents:
        said, errors = agent.communicate(timeout=100)
        assert agent.returncode == 0, errors
        shown += said
    assert losses(tmp_path / "run") == losses(trained)
    assert shown.count("loss of the marginals") == 1  # the table that `hdet train` ends in, from one replica
    assert f"Everything is in {tmp_path / 'run'}" in shown
    assert (tmp_path / "run" / "fan.png").exists()


def test_one_process_gives_the_same_losses(trained, tmp_path, capsys):
    assert cli.main(["train", "text", *SMOKE, "--in-process", "--folder", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr()
    assert "held out" in shown.out
    assert re.search(r"step 12/12, loss .*, 0 s left\n", shown.err)  # lines, for this is no terminal
    (_, _, ours), (_, _, theirs) = losses(tmp_path / "run"), losses(trained)
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], rel=1e-4)
    mine, other = (read(folder / "result.json")["held_out"]["loss"] for folder in (tmp_path / "run", trained))
    assert mine == pytest.approx(other, rel=1e-4)


def test_a_sweep_finds_the_optimum_and_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "sweep"
    words = ["sweep", "digits", "--size", "smoke", "--steps", "20", "--seeds", "1", "--in-process"]
    assert cli.main([*words, "--folder", str(folder), "--peak-lr", "0.02"]) == 0
    table = capsys.readouterr().out
    assert re.search(r"0\.\d{4}   -  0\.\d{4}  0\.\d{4}  <- best", table)  # one seed has no standard deviation
    assert "One seed, so small differences mean nothing" in table
    assert "Held-out loss: of all samples" in table
    found = read(folder / "sweep.json")
    rates = [row["peak_lr"] for row in found["rates"]]
    assert all(b / a <= 2.001 for a, b in itertools.pairwise(rates))
    assert found["inside"]
    assert min(rates) < found["best_peak_lr"] < max(rates)
    assert (folder / "sweep.png").stat().st_size > 1000
    monkeypatch.setattr("hdet_lab.many_runs.launch", lambda jobs, one_process: pytest.fail("nothing is left to run"))
    assert cli.main([*words, "--folder", str(folder), "--peak-lr", "0.02"]) == 0
    assert read(folder / "sweep.json") == found
    assert cli.main([*words, "--folder", str(folder), "--peak-lr", "0.04"]) == 1
    assert "holds runs with other options" in capsys.readouterr().err


def test_a_sweep_widens_and_says_when_it_gave_up(tmp_path, monkeypatch):
    """Held-out losses that fall with the rate, diverging beyond `limit`."""

    def pretend(limit):
        def run_all(jobs, one_process):
            rates = [job.options.peak_lr for job in jobs]
            return [
                {"held_out_unseen": {"loss": 0.0}, "held_out": {"loss": None if rate > limit else 1 / rate}}
                for rate in rates
            ]

        monkeypatch.setattr(sweeps, "run_all", run_all)

    options = RunOptions("digits", controller="none", size="smoke", peak_lr=0.01)
    pretend(limit=0.2)
    found = sweeps.sweep(options, tmp_path / "inside", seeds=[0, 1])
    assert found["inside"]
    assert found["best_peak_lr"] == 0.16
    assert "diverged" in sweeps.show(found)
    assert "inside the grid" in sweeps.show(found)
    pretend(limit=1e9)
    found = sweeps.sweep(options, tmp_path / "edge", seeds=[0], most_rates=8)
    assert not found["inside"]
    assert len(found["rates"]) == 8
    assert "it was not found" in sweeps.show(found)


def test_returns_against_the_number_of_replicas(tmp_path, capsys):
    words = ["returns", "digits", "--size", "smoke", "--steps", "6", "--sizes", "2,8", "--in-process"]
    assert cli.main([*words, "--folder", str(tmp_path / "returns")]) == 0
    table = capsys.readouterr().out
    assert len(re.findall(r"^[28] .* (?:plain|softmax) ", table, re.MULTILINE)) == 4
    rows = read(tmp_path / "returns" / "returns.json")["rows"]
    assert [(row["replicas"], row["controller"]) for row in rows] == [
        (2, "none"), (2, "softmax"), (8, "none"), (8, "softmax"),
    ]  # fmt: skip


def test_what_to_type_next_is_found_by_the_shell(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "rounds.jsonl").touch()
    program = tmp_path / "venv" / "bin" / "hdet"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(program.with_name("python")))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert summary.what_next([folder]) == f"Next: {program} report {folder}\n      {program} export {folder}"
    monkeypatch.chdir(tmp_path)
    assert summary.what_next([folder]).startswith("Next: venv/bin/hdet report ")
    monkeypatch.setenv("PATH", str(program.parent))
    assert summary.what_next([folder]) == f"Next: hdet report {folder}\n      hdet export {folder}"


def test_the_demo_ends_in_five_rows_and_pictures(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "demo"
    assert cli.main(["demo", "--steps", "6", "--replicas", "2", "--in-process", "--folder", str(folder)]) == 0
    report = capsys.readouterr().out
    rows = r"^(OneCycleLR, best rate|(OneCycleLR|HDET) from too (low|high)) +\d\.\de-\d\d +\d\.\de-\d\d +\d"
    assert len(re.findall(rows, report, re.MULTILINE)) == 5
    assert len(re.findall(r"^From \d\.\de-\d\d: ", report, re.MULTILINE)) == 2
    runs = [folder / name for name in ("hdet-high", "hdet-low", "plain-best", "plain-high", "plain-low")]
    assert re.search(rf"Next: \S*hdet report {' '.join(map(str, runs))}\n +\S*hdet export {runs[0]}\n$", report)
    for words in report.partition("Next: ")[2].splitlines():
        assert cli.main(words.split()[1:]) == 0
    assert (runs[0] / "report.html").stat().st_size > 50_000
    assert {path.name for path in folder.iterdir()} >= {
        "fan-hdet-low.png",
        "fan-hdet-high.png",
        "losses.png",
        "hdet-low",
    }
    peaks = [read(folder / f"plain-{name}" / "result.json")["peak_lr"] for name in ("low", "best", "high")]
    assert peaks == pytest.approx([peaks[1] / 10, peaks[1], peaks[1] * 10])


def test_the_demo_says_what_was_found_and_what_it_cost(tmp_path, monkeypatch):
    result = {"finder_steps": 290, "finder_cost": 411.0, "peak_lr": 0.012}
    said = "It found 0.012, 12 times your rate, 0.001. The search cost as much as 411 steps."
    assert demos.search_cost(tmp_path, result, 0.001) == said
    monkeypatch.setattr(demos, "read_lines", lambda path: [{"step": 7, "probe": 1}])
    assert demos.search_cost(tmp_path, {}, 0.001) == "Its seconds include probes after every 7 steps."


@pytest.mark.parametrize(
    ("arguments", "explored"),
    [
        (["text", "--controller", "line_search"], {"learning_rate"}),
        (["text", "--controller", "auto", "--steps", "4"], {"learning_rate"}),
        (["digits", "--controller", "slope", "--explore", "learning_rate=0.2,weight_decay=2"],
         {"learning_rate", "weight_decay"}),
        (["digits", "--controller", "slope", "--gradients", "local", "--dropout", "0.1", "--label-smoothing", "0.1",
          "--explore", "dropout=0.2,label_smoothing=0.2"], {"dropout", "label_smoothing"}),
        (["digits", "--optimizer", "sgd", "--explore", "momentum=0.2", "--controller", "slope"], {"momentum"}),
        (["text", "--controller", "fixed", "--outer-momentum", "0.9", "--gradients", "local", "--no-average-state"],
         {"learning_rate"}),
        (["flights", "--controller", "fixed", "--outer-step", "0.5", "--gradients", "local"],
         {"learning_rate/embedding", "learning_rate/no_decay", "learning_rate/dense"}),
    ],
)  # fmt: skip
def test_every_controller_and_everything_explored_can_be_had_from_the_command_line(tmp_path, arguments, explored):
    folder = tmp_path / "run"
    words = ["train", *arguments, "--size", "smoke", "--in-process", "--replicas", "2", "--folder", str(folder)]
    assert cli.main([*words, "--interval", "2", *([] if "--steps" in words else ["--steps", "4"])]) == 0
    rounds = read_lines(folder / "rounds.jsonl")
    assert set(rounds[0]["hyperparameters"]) == explored
    assert set(read(folder / "result.json")["scales"]) == explored


def test_a_run_with_a_held_out_probe_reports_what_the_probe_has_not_seen(tmp_path, capsys):
    words = ["train", "digits", "--size", "smoke", "--steps", "4", "--in-process", "--folder", str(tmp_path / "run")]
    assert cli.main([*words, "--controller", "slope", "--explore", "weight_decay=2", "--interval", "2"]) == 0
    result, shown = read(tmp_path / "run" / "result.json"), capsys.readouterr().out
    assert result["held_out_probe"]
    assert result["held_out_unseen"]["loss"] != result["held_out"]["loss"]
    assert re.search(rf"held out, unseen half\s+loss +{result['held_out_unseen']['loss']:.4f}\n", shown)
    plain = summary.reported(result | {"held_out_probe": False})
    assert plain == result["held_out"]


def test_scales_are_those_of_the_schedule_before_it_is_annealed(tmp_path):
    words = ["train", "digits", "--size", "smoke", "--steps", "40", "--controller", "line_search", "--in-process"]
    assert cli.main([*words, "--interval", "2", "--peak-lr", "1e-3", "--folder", str(tmp_path / "run")]) == 0
    rounds = {record["step"]: record for record in read_lines(tmp_path / "run" / "rounds.jsonl")}
    result = read(tmp_path / "run" / "result.json")
    step = result["scales_step"]
    assert result["scales"]["learning_rate"] == rounds[step]["hyperparameters"]["learning_rate"]["scale"]
    high = [s for s, record in rounds.items() if record["hyperparameters"]["learning_rate"]["base"] > 0.5e-3]
    assert step in (max(high), max(high) - 2)  # the base of a record is its round's last, the half is passed after it
    assert result["scales"]["learning_rate"] != rounds[40]["hyperparameters"]["learning_rate"]["scale"]


def test_returns_with_something_explored(tmp_path, capsys):
    words = ["returns", "digits", "--size", "smoke", "--steps", "2", "--sizes", "2", "--in-process", "--interval", "1"]
    explored = ["--controller", "slope", "--explore", "weight_decay=0.3"]
    assert cli.main([*words, *explored, "--folder", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "slope" in shown
    assert "Held-out loss: of the half of the samples that no probe has seen" in shown
    for row in read(tmp_path / "run" / "returns.json")["rows"]:  # the plain row too, or they could not be compared
        result = read(tmp_path / "run" / f"2-{row['controller']}-seed-0" / "result.json")
        assert row["losses"] == [result["held_out_unseen"]["loss"]]


def test_what_is_charged_shortens_the_run(tmp_path):
    folder = tmp_path / "run"
    words = ["train", "digits", "--size", "smoke", "--controller", "line_search", "--charge", "--in-process"]
    assert cli.main([*words, "--folder", str(folder)]) == 0
    # a round of 5 steps costs 3 probes of 4 global batches, forward only: 4 steps
    assert read(folder / "result.json")["steps"] == int(60 / (1 + 4 / 5))


def test_after_a_search_a_charged_run_is_the_plain_run_of_the_steps_that_are_left(tmp_path, monkeypatch, capsys):
    told = found_rate(3e-3, 960, 1280, 970.0, 1234.0)
    monkeypatch.setattr(run_start, "find", lambda *given: told)
    words = ["train", "flights", "--size", "smoke", "--in-process", "--folder"]
    auto = ["--steps", "1001", "--controller", "auto", "--charge", "--checkpoint-every", "10"]
    assert cli.main([*words, str(tmp_path / "auto"), *auto]) == 0
    alone = ["--steps", "39", "--peak-lr", "3e-3", "--controller", "none"]
    assert cli.main([*words, str(tmp_path / "plain"), *alone]) == 0
    auto, plain = (read(tmp_path / name / "result.json") for name in ("auto", "plain"))
    assert auto["steps"] == plain["steps"] == 1001 - 960 - 2
    assert auto["held_out"] == plain["held_out"]
    assert read(tmp_path / "auto" / "find_lr.json")["rate"] == 3e-3
    assert cli.main(["report", str(tmp_path / "auto")]) == 0
    assert "0.003, 1 times your rate, 0.003. The search took 21 min, as much as 970 steps." in capsys.readouterr().out
    whole = losses(tmp_path / "auto")
    stop_at(tmp_path / "auto", 20)
    assert cli.main(["resume", str(tmp_path / "auto"), "--in-process"]) == 0
    assert read(tmp_path / "auto" / "result.json")["resumed_at"] == [20]
    assert losses(tmp_path / "auto") == whole


def test_flights_explores_each_parameter_group(tmp_path):
    words = ["train", "flights", *SMOKE, "--steps", "4", "--in-process"]
    assert cli.main([*words, "--folder", str(tmp_path / "run")]) == 0
    names = set(read_lines(tmp_path / "run" / "rounds.jsonl")[0]["hyperparameters"])
    assert names == {"learning_rate/embedding", "learning_rate/no_decay", "learning_rate/dense"}
    assert pictures.fan(tmp_path / "run", tmp_path / "fan.png") == tmp_path / "fan.png"


def test_options_round_trip_and_refuse_what_they_do_not_know():
    options = RunOptions("flights", "smoke", seed=3, peak_lr=1e-2, interval=7, per_group=False)
    assert RunOptions.from_json(json.loads(json.dumps(options.to_json()))) == options
    with pytest.raises(OptionError, match="there is no option colour"):
        RunOptions.from_json({"task": "text", "colour": "red"})


def test_files_are_strict_json(tmp_path):
    start = run_start.RunStart(1e-3, 5)
    RunFolder(tmp_path).write("some.json", {"a": (float("nan"), 1.0), "b": float("inf"), "c": start})
    told = {"peak_lr": 1e-3, "steps": 5, "finder_steps": 0, "finder_cost": 0.0, "seconds": 0.0}
    assert read(tmp_path / "some.json") == {"a": [None, 1.0], "b": None, "c": told}
    (tmp_path / "lines.jsonl").write_text('{"step": 1}\n{"ste')
    assert read_lines(tmp_path / "lines.jsonl") == [{"step": 1}]


def test_find_lr_writes_what_it_found(tmp_path, capsys):
    words = ["find-lr", "flights", "--size", "smoke"]
    assert cli.main([*words, "--folder", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    result = read(tmp_path / "run" / "find_lr.json")
    assert f"{result['rate']:.3g}" in shown
    assert f"Picture: {tmp_path / 'run' / 'find_lr.png'}" in shown
    words_next = f"hdet train flights --size smoke --steps {result['total_steps']} --seed 0 --replicas 2"
    assert words_next in shown.partition("\nNext: ")[2]
    assert f"hdet report {tmp_path / 'run'}\n" in shown
    (low, high), (lower, _) = result["interval"], result["whole"]
    assert lower <= low < high
    assert ("narrow, so counted as" in shown) is (lower < low)
    assert result["cost"] > result["steps"] > 50
    assert result["peak_lr"] == pytest.approx(result["rate"] / result["scale"])
    assert result["sure"] is (result["doubts"] == []) is ("Not sure" not in shown)
    assert (tmp_path / "run" / "find_lr.png").stat().st_size > 1000
    assert cli.main([*words, "--in-process", "--folder", str(tmp_path / "threads")]) == 0
    assert read(tmp_path / "threads" / "find_lr.json")["rate"] == pytest.approx(result["rate"], rel=1e-3)
    assert cli.main(["report", str(tmp_path / "run")]) == 0
    told = capsys.readouterr()
    assert words_next in told.out
    assert f"--peak-lr {result['rate']:.3g}\n" in told.out
    assert "A search for the learning rate, and no run." in told.out
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    last = 10 * (result["steps"] // 10)
    progress = told.err + capsys.readouterr().err
    assert re.search(rf"^flights, find-lr, seed 0: step {last}, loss \d.*, lr \d", progress, re.MULTILINE)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("doubts", [(), ("the loss fell by only 1.3 %, from 1 to 0.987",)])
def test_find_lr_says_what_to_do_next(tmp_path, capsys, monkeypatch, doubts, replicas):
    told = dataclasses.replace(found_rate(0.01, 100), doubts=doubts)
    monkeypatch.setattr(finder, "find_lr", lambda *given, **named: told)
    options = ["flights", "--size", "smoke", "--replicas", str(replicas), "--seed", "3", "--steps", "20"]
    assert cli.main(["find-lr", *options, "--in-process", "--folder", str(tmp_path / "find")]) == 0
    shown = capsys.readouterr().out
    result = read(tmp_path / "find" / "find_lr.json")
    assert (result["sure"], result["doubts"]) == (not doubts, list(doubts))
    assert [line for line in shown.splitlines() if line.startswith("Not sure")] == [f"Not sure: {d}" for d in doubts]
    *others, train, report = [line.partition("hdet ")[2] for line in shown.partition("Next: ")[2].splitlines()]
    assert report == f"report {tmp_path / 'find'}"
    given = f"flights --size smoke --steps 20 --seed 3 --replicas {replicas} --optimizer adamw --peak-lr 0.01"
    assert train == f"train {given}{' --controller none' * (replicas == 1)}"
    assert others == [f"sweep {given} --seeds 1"] * bool(doubts)
    for number, words in enumerate((train, *others)):
        assert cli.main([*words.split(), "--in-process", "--folder", str(tmp_path / str(number))]) == 0


def test_find_lr_from_a_hopeless_start_says_so(tmp_path, capsys):
    words = ["find-lr", "flights", "--size", "smoke", "--replicas", "1", "--in-process", "--peak-lr", "1e9"]
    assert cli.main([*words, "--folder", str(tmp_path / "run")]) == 1
    assert "never fell at learning rates from" in capsys.readouterr().err


def stop_at(folder, step):
    """Leave of a run that has ended what is there when it is killed after a checkpoint."""
    (folder / "result.json").unlink()
    for later in (folder / "checkpoints").glob("*-step-*"):
        if int(later.name.rpartition("-")[2]) > step:
            shutil.rmtree(later)


def test_a_run_that_was_stopped_goes_on(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "run"
    monkeypatch.setattr(run_log, "LINES_PER_RUN", 8)  # a line every third step: a checkpoint is between two
    options = ("--interval", "4", "--dropout", "0.2", "--checkpoint-every", "10", "--in-process")
    assert cli.main(["train", "digits", *SMOKE, "--steps", "24", *options, "--folder", str(folder)]) == 0
    whole, rounds, result = losses(folder), read_lines(folder / "rounds.jsonl"), read(folder / "result.json")
    assert result["resumed_at"] == []
    stop_at(folder, 10)  # in mid-round
    capsys.readouterr()
    assert cli.main(["resume", str(folder), "--in-process"]) == 0
    assert losses(folder) == whole
    assert [r["scores"] for r in read_lines(folder / "rounds.jsonl")] == [r["scores"] for r in rounds]
    resumed, shown = read(folder / "result.json"), capsys.readouterr().out
    assert re.search(r"^resumed at step +10$", shown, re.MULTILINE)
    for name in ("scales", "scales_step"):
        assert resumed[name] == result[name]
    assert cli.main(["resume", str(tmp_path)]) == 1
    assert "train with --checkpoint-every" in capsys.readouterr().err
    stop_at(folder, 20)  # after the last round with a high rate, and then at the very end
    saved = next((folder / "checkpoints").glob("*-step-20"))
    seconds = torch.load(saved / "shared.pt", weights_only=True)["entries"]["clock"]["state"]["seconds"]
    assert cli.main(["resume", str(folder), "--in-process"]) == 0
    again = read(folder / "result.json")
    assert again["resumed_at"] == [10, 20]
    assert again["seconds"] > seconds > 0
    assert {**again, "seconds": 0, "resumed_at": 0} == {**result, "seconds": 0, "resumed_at": 0}


def test_a_run_whose_rate_was_found_goes_on_with_it(tmp_path, monkeypatch):
    """Its length too, which was charged for the number of replicas that it began with."""
    told = found_rate(3e-3, 960, 1280, 970.0, 1234.0)
    monkeypatch.setattr(run_start, "find", lambda *given: told)
    folder = tmp_path / "run"
    words = ["train", "digits", "--size", "smoke", "--steps", "1001", "--controller", "auto", "--charge"]
    explore = ["--explore", "learning_rate=2,weight_decay=0.3", "--checkpoint-every", "10", "--in-process"]
    assert cli.main([*words, *explore, "--folder", str(folder)]) == 0
    result = read(folder / "result.json")
    left = 1001 - 960 - 1280 / 3 / RunOptions("digits", size="smoke").make_task().global_batch
    assert result["steps"] == int(left / (1 + 3 * 4 / 3 / 10))  # rounds of 10 steps: the long run's plan, as charged
    rounds = read_lines(folder / "rounds.jsonl")
    assert [record["steps"] for record in rounds][:2] == [10, 10]
    assert len(set(rounds[0]["hyperparameters"]["learning_rate"]["values"])) == 1  # it was found: not fanned out
    stop_at(folder, 10)
    monkeypatch.setattr(run_start, "find", lambda *given: pytest.fail("it was found"))
    assert cli.main(["resume", str(folder), "--replicas", "4", "--in-process"]) == 0
    again = read(folder / "result.json")
    for name in ("steps", "peak_lr", "finder_steps", "finder_cost"):
        assert again[name] == result[name]
    assert again["replicas"] == 4
    assert again["seconds"] > 1234


@pytest.mark.parametrize(
    ("controller", "steps", "found"), [("slope", 2000, 0), ("auto", 1300, 0), ("auto", 1400, 300), ("auto", 500, 0)]
)
def test_what_is_charged_is_what_the_run_that_is_left_costs(controller, steps, found):
    explore = "learning_rate=2" if found or steps == 500 else "weight_decay=0.3"
    options = RunOptions("digits", controller=controller, steps=steps, charge=True, explore=explore, replicas=4)
    told = found_rate(1e-3, found) if found else None
    left = ensemble_from_options.charged_steps(options, options.make_task(), nn.Identity(), told)
    plan = ensemble_from_options.make_controller(options, left, bool(found)).plan(list(options.explored()), left)

    def cost(length):
        probing = 0 if found else 5 * 4 / 3 / plan.auto_interval(left)
        return length * (1 + probing) + found

    assert cost(left) <= steps < cost(left + 1)
    assert plan.until == ({} if explore == "weight_decay=0.3" else {"learning_rate": 0 if found else left})


def test_a_search_that_ends_is_charged_while_it_lasts(monkeypatch):
    options = RunOptions("digits", controller="line_search", steps=1000, charge=True, replicas=4)
    monkeypatch.setattr(
        ensemble_from_options, "make_controller", lambda *given: hdet.controllers.LineSearch(active=0.25)
    )
    left = ensemble_from_options.charged_steps(options, options.make_task(), nn.Identity(), None)
    assert left == pytest.approx(1000 / (1 + 0.25 * 5 * 4 / 3 / 5), abs=2)


@pytest.mark.parametrize(
    ("given", "charged"), [({}, 43), ({"tail_average": 0.0}, 0), ({"explore": "learning_rate=0"}, 0)]
)
def test_the_tail_average_is_charged(given, charged):
    options = RunOptions("text", controller="auto", steps=4000, charge=True, **given)
    found = found_rate(1e-3, 200)
    left = ensemble_from_options.charged_steps(options, options.make_task(), nn.Identity(), found)
    assert left == 3800 - charged


def test_a_tail_average_that_costs_the_whole_run_is_refused():
    options = RunOptions("text", controller="auto", steps=40, charge=True, tail_average=0.5)
    with pytest.raises(LabError, match="the comparison at the end of the run costs all of the 40 steps"):
        ensemble_from_options.charged_steps(options, options.make_task(), nn.Identity(), None)


def test_a_search_that_costs_the_whole_run_is_refused():
    options = RunOptions("digits", controller="auto", steps=600, charge=True, replicas=4)
    found = found_rate(1e-3, 600)
    with pytest.raises(LabError, match="finding the rate costs all of the 600 steps; take a longer run"):
        ensemble_from_options.charged_steps(options, options.make_task(), nn.Identity(), found)


def hold(folder, is_in):
    """Be in a folder until killed."""
    with locked(folder):
        is_in.set()
        time.sleep(600)


def test_a_folder_in_which_a_run_is_alive_is_refused(tmp_path, capsys):
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    options = RunOptions("digits", checkpoint_every=5)
    (folder / "options.json").write_text(json.dumps({"options": options.to_json()}))
    context = multiprocessing.get_context("forkserver")
    is_in = context.Event()
    other = context.Process(target=hold, args=(folder, is_in), daemon=True)
    other.start()
    assert is_in.wait(60)
    for words in (["resume", str(folder)], ["train", "digits", "--folder", str(folder)]):
        assert cli.main([*words, "--in-process"]) == 1
        assert f"a run is alive in {folder} (process {other.pid} on " in capsys.readouterr().err
    other.kill()  # leaves the file, which nobody holds any more
    other.join()
    assert (folder / LOCK).exists()
    with locked(folder):
        pass
    assert not (folder / LOCK).exists()
    with locked(tmp_path / "new" / "run"):
        assert (tmp_path / "new" / "run" / LOCK).exists()
    assert not (tmp_path / "new").exists()  # nothing was written there


def test_the_version_without_importing_torch():
    script = (
        "import sys, hdet_lab.entry_point as c; sys.argv[1:] = ['--version']; c.main(); print('torch' in sys.modules)"
    )
    done = run(sys.executable, "-c", script)
    assert done.stdout == f"hdet {hdet.__version__}\nFalse\n", done.stderr


def test_the_version_of_sources_that_are_not_installed():
    script = (
        "import sys, importlib.metadata as m\n"
        "def version(name): raise m.PackageNotFoundError(name)\n"
        "m.version = version\n"
        "import hdet_lab.entry_point as c; sys.argv[1:] = ['--version']; c.main()"
    )
    done = run(sys.executable, "-c", script)
    assert done.stdout == "hdet unknown\n", done.stderr


def test_the_version_from_the_module(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out == f"hdet {hdet.__version__}\n"
