"""The benchmark against peers: every row comes from a real run of its method, and every figure from rows."""

import json
import math
from importlib import metadata

import dadaptation
import evidence
import peers.hypergradient
import prodigyopt
import pytest
import quality
import quality_report
import schedulefree
import torch
from peers.population import make_member
from peers.range_test import suggest
from quality_methods import METHODS, one
from torch.optim import lr_scheduler

from hdet_lab.options import RunOptions

STEPS = 20  # of `quality.py --smoke`, on digits: with BatchNorm all methods but a population have four replicas
CLASSES = {
    "prodigy": "prodigyopt.Prodigy",
    "d-adaptation": "dadaptation.DAdaptAdam",
    "schedule-free": "schedulefree.AdamWScheduleFree",
}
# What probes and scores cost is taken from the steps.
FEWER = {"auto": 8, "line search": 8, "population, batch": 9, "population, steps": 2}
STILL = ["plain", "auto", "hypergradient", "population, batch", "range test", *CLASSES]


@pytest.fixture(scope="module")
def rows():
    """`quality.py --smoke`."""
    return {row["method"]: row for row in quality.smoke()}


def test_every_method_has_a_row_of_its_own(rows):
    assert set(rows) == set(METHODS)
    losses = {name: row["held_out"] for name, row in rows.items() if name != "line search"}  # `auto` is one here
    assert len(set(losses.values())) == len(losses)
    assert all(loss < math.log(10) for loss in losses.values())  # better than no idea


def test_every_row_has_the_steps_of_its_own_optimizer(rows):
    for name, row in rows.items():
        assert row["stepped"] == {CLASSES.get(name, "torch.AdamW"): 4 * FEWER.get(name, STEPS)}, name


def test_every_row_says_what_it_cost(rows):
    assert rows["schedule-free"]["cost"] == pytest.approx(1 + 50 / 3 / STEPS, abs=1e-4)  # BatchNorm's statistics
    assert all(0.9 < row["cost"] <= 1 for name, row in rows.items() if name != "schedule-free")
    assert all(row["cpu_seconds"] > 0 for row in rows.values())
    for name, row in rows.items():
        if not name.startswith("population"):
            steps, _, loss = row["curve"][-1]
            assert (steps, loss) == (STEPS, row["held_out"])


def test_what_each_method_found_is_in_its_row(rows):
    start = rows["paper"]["used_lr"]
    assert rows["hypergradient"]["used_lr"] != start
    assert rows["hypergradient, relative"]["used_lr"] / start == pytest.approx(1, abs=0.02 * STEPS)
    assert 0 < rows["prodigy"]["used_lr"] < 1
    assert 1e-8 <= rows["range test"]["used_lr"] <= 1
    assert rows["population, batch"]["used_lr"] != start


@pytest.mark.parametrize("name", STILL)
def test_a_method_whose_optimizer_stands_still_has_the_loss_of_an_untrained_model(name, monkeypatch):
    """So no row is a constant, and none is another method's."""
    kinds = {
        "prodigy": prodigyopt.Prodigy,
        "d-adaptation": dadaptation.DAdaptAdam,
        "schedule-free": schedulefree.AdamWScheduleFree,
    }
    monkeypatch.setattr(kinds.get(name, torch.optim.AdamW), "step", lambda self, closure=None: None)
    rate = METHODS[name].rates[-1] if METHODS[name].rates else 1e-2
    about = {"task": "text", "size": "smoke", "optimizer": "adamw", "seed": 0}
    row = one({**about, "method": name, "peak_lr": rate}, steps=4)
    task = RunOptions("text", size="smoke").make_task()
    assert row["held_out"] == pytest.approx(task.evaluate(task.model())["loss"], abs=1e-5)


def test_a_run_that_diverges_has_no_loss():
    run = {"task": "digits", "size": "smoke", "optimizer": "sgd", "seed": 0, "method": "paper", "peak_lr": 1e20}
    assert one(run, steps=12)["held_out"] is None


class Line(torch.optim.SGD):
    """x with loss g x, so that the gradient is g."""

    def __init__(self, lr):
        self.x = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
        super().__init__([self.x], lr=lr)

    def take(self, gradient):
        self.x.grad = torch.tensor(gradient, dtype=torch.float64)
        self.step()


def test_the_hypergradient_by_hand():
    optimizer = Line(0.1)
    schedule = lr_scheduler.LambdaLR(optimizer, lambda step: (1.0, 0.5, 0.25)[step])
    follower = peers.hypergradient.Follower(optimizer, 0.1, "additive", 0.01)
    optimizer.take([1.0, 2.0])
    schedule.step()
    assert follower.rate == 0.1
    optimizer.take([3.0, -1.0])  # 3 - 2 = 1, and the last step had the whole schedule
    schedule.step()
    assert follower.rate == pytest.approx(0.11)
    assert optimizer.x.tolist() == pytest.approx([-0.1 - 0.055 * 3, -0.2 + 0.055])
    optimizer.take([1.0, 1.0])  # 3 - 1 = 2, half of it
    assert follower.rate == pytest.approx(0.12)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)  # the schedule is left as it was


def test_the_relative_hypergradient_by_hand():
    optimizer = Line(0.1)
    follower = peers.hypergradient.Follower(optimizer, 0.1, "relative", 0.02)
    optimizer.take([3.0, 4.0])
    optimizer.take([0.0, 10.0])
    assert follower.rate == pytest.approx(0.1 * (1 + 0.02 * 0.8))


def test_the_rate_of_a_range_test():
    rates = [10.0**k for k in range(-7, 1)]
    losses = [5.0, 5.0, 5.0, 4.0, 1.0, 1.0, 1.0, 50.0]
    assert suggest(rates, losses, "minimum") == pytest.approx(1e-2)
    assert suggest(rates, losses, "steepest") == pytest.approx(1e-4, rel=9.1)


def test_a_member_takes_over_weights_state_and_rate():
    options = RunOptions("text", size="smoke", steps=8, replicas=1, controller="none")
    task = options.make_task()
    worse, better = (make_member(options, task, rate, 8) for rate in (1.0, 1e-2))
    for member in (worse, better):
        member.step(task, task.batch(0))
    worse.take_over(better, 0.8)
    assert all(torch.equal(a, b) for a, b in zip(worse.model.parameters(), better.model.parameters(), strict=True))
    for member in (worse, better):
        member.step(task, task.batch(1))
    rates = [member.optimizer.param_groups[0]["lr"] for member in (worse, better)]
    assert rates[0] == pytest.approx(0.8 * rates[1])
    assert worse.rate == pytest.approx(8e-3)
    moments = [next(iter(member.optimizer.state.values()))["exp_avg"] for member in (worse, better)]
    assert moments[0] is not moments[1]


def made_up(method, rate, losses, **more):
    about = {"task": "text", "size": "standard", "optimizer": "adamw", "method": method, "peak_lr": rate}
    row = {**about, "seconds": 99.0, "cpu_seconds": 10.0, **more}
    return [{**row, "seed": s, "held_out": loss} for s, loss in enumerate(losses)]


MADE_UP = [
    *made_up("plain", 4e-3, [2.0, 4.0], curve=[[500, 5, 3.0], [1000, 10, 2.0]]),
    *made_up("plain", 8e-3, [2.5, 4.5]),
    *made_up("plain", 2e-3, [3.0]),
    *made_up("plain", 4e-2, [None, 5.0]),
    *made_up("auto", 4e-4, [2.2, 4.2], cpu_seconds=20.0, curve=[[500, 8, 2.1], [1000, 15, 2.0]]),
    *made_up("schedule-free", 1e-3, [2.6, 4.6]),
    *made_up("schedule-free", 2.5e-3, [2.4, 4.4]),
    *made_up("schedule-free", 1e-2, [2.2, 4.4]),
]


def test_tables_by_hand():
    text = quality_report.tables(MADE_UP, quality.on_grid)
    lines = {line.split("|")[1].strip(): line.split("|")[2:] for line in text.splitlines() if line.startswith("| ")}
    assert "best 3.0000 at 0.004 (2 seeds)" in text
    assert [cell.strip() for cell in lines["`Auto`"]] == [
        "", "7.5 (10.0; 2)", "", "", "", "", "1.00", "2.0", "",
    ]  # fmt: skip
    plain = [cell.strip() for cell in lines["OneCycleLR"]]
    assert plain[3] == "0.0 (0.0; 2)"
    assert plain[5] == "diverged (diverged; 2)"
    default, best = (cells for name, cells in lines.items() if name.startswith("Schedule-Free"))
    assert [cell.strip() for cell in default[:3]] == ["15.0 (20.0; 2)", "1.00", "1.0"]
    assert [cell.strip() for cell in best[:3]] == ["10.0 (10.0; 2)", "3.00", "3.0"]
    old = [{key: value for key, value in row.items() if key != "cpu_seconds"} for row in MADE_UP]  # no time, then
    assert "| 7.5 (10.0; 2) |  |  |  |  | 1.00 |  |" in quality_report.tables(old, quality.on_grid)
    assert "The sweep: 3 rates, so 3 plain runs with one seed" in text
    assert "2 plain runs saved" in text


def test_the_readme_table_by_hand():
    assert quality_report.readme_table(MADE_UP, quality.on_grid).splitlines()[2:] == [
        "| OneCycleLR | 0.0 .. diverged | 1.00 |",
        "| `Auto` | 7.5 | 1.00 |",
        "| Schedule-Free AdamW, its default rate of 0.0025 | 15.0 | 1.00 |",
        "| Schedule-Free AdamW, best of 0.001, 0.0025, 0.01 | 10.0 | 3.00 |",
    ]


def test_speed_by_hand():
    text = quality_report.speed(MADE_UP, quality.on_grid)
    rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if "`Auto`" in line]
    assert rows == [["", "`Auto`", "1/10", "750 steps, 12 s", "750 steps, 12 s", "", ""]]  # one seed in half


def test_rows_are_found_again_and_old_ones_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(quality, "RESULTS", tmp_path / "rows.jsonl")
    run = {"task": "flights", "size": "long", "optimizer": "adamw", "method": "plain", "peak_lr": 3e-4, "seed": 0}
    old = {**run, "held_out": 0.34, "steps": 8800, "finder_steps": None, "used_lr": 3e-4, "seconds": 28.5}
    (tmp_path / "rows.jsonl").write_text(json.dumps(old) + "\n")
    (row,) = quality.run_all([run], workers=1)  # nothing is run
    assert row["held_out"] == 0.34
    few, many = (quality.plan(parts, [0, 1, 2], workers=2) for parts in (quality.SET, quality.FULL))
    assert float(few.splitlines()[-1].split()[0]) < float(many.splitlines()[-1].split()[0])  # core-hours in all


def test_the_readme_has_the_table_of_the_results():
    """Every figure of it can be had again: `python benchmarks/quality.py table --write`."""
    table = quality_report.readme_table(quality.known().values(), quality.on_grid)
    _, _, rest = quality_report.README.read_text().partition(quality_report.BEGIN)
    assert rest.partition(quality_report.END)[0].strip().startswith(f"{table}\n\n[")


def test_filling_the_readme(tmp_path):
    path = tmp_path / "README.md"
    path.write_text(f"before\n{quality_report.BEGIN}\nold\n{quality_report.END}\nafter\n")
    quality_report.fill_readme("| new |", path)
    assert path.read_text() == f"before\n{quality_report.BEGIN}\n| new |\n{quality_report.END}\nafter\n"
    path.write_text("nothing\n")
    with pytest.raises(ValueError, match="must have a line"):
        quality_report.fill_readme("| new |", path)


def test_pictures(tmp_path):
    drawn = quality_report.pictures(MADE_UP, quality.on_grid, tmp_path)
    assert [path.stat().st_size > 5000 for path in drawn] == [True, True]


def test_a_part_of_the_evidence_is_a_dated_file_with_its_command(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "HERE", tmp_path)
    monkeypatch.setattr(evidence, "RUNS", tmp_path / "runs")
    (tmp_path / "results").mkdir()
    command = ["returns", "digits", "--sizes", "2", "--size", "smoke", "--steps", "3", "--in-process"]
    written = evidence.lab("returns-small", "Small", command, "returns.json")
    text = written.read_text()
    assert text.startswith(f"# Small, {written.stem[-10:]}\n")
    assert "`hdet returns digits --sizes 2 --size smoke --steps 3 --in-process --seeds 3 --folder" in text
    assert f"torch {metadata.version('torch')}" in text  # torch itself may add what it was built for
    assert "mean over 3 seeds" in text
    assert len(json.loads(written.with_suffix(".json").read_text())["rows"]) == 2
