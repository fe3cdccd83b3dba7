"""Records as files: strict, complete after every round, and readable after a kill."""

import dataclasses
import io
import json
import math
import os
import random
import statistics
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from processes import run
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet.records.json_lines import to_line
from hdet.records.trackers.tracker import Tracker


def loads(text):
    """Strict JSON: no NaN, no Infinity."""

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def make_record(replicas=8, names=("learning_rate", "weight_decay"), **changes):
    values = tuple(0.1 * (1 + replica / 10) for replica in range(replicas))
    row = hdet.records.HyperparameterRecord(
        0.1, 0.2, values, 2.5, 2.5, {"velocity": 1 / 3}, 0.1, 0.05, "x2.76 +- 0.14", 2.0, ("0/0/lr",), (0.19,), (0.2,)
    )
    losses = tuple(1 + replica / 7 for replica in range(replicas))
    record = hdet.records.RoundRecord(
        3, 40, True, losses, dict.fromkeys(names, row), losses, 1.5, 2.0, 0.25, 0.25, ("something",), 10, 100
    )
    return dataclasses.replace(record, **changes)


def train(path, steps, interval, total_steps=None, tensor=False, spread=0.2):
    """The records of a real run, as they were handed out, and the rates that each step was taken with."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": torch.tensor(0.05) if tensor else 0.05}]
    o = optim.SGD(groups, lr=torch.tensor(0.1) if tensor else 0.1)
    if hdet.find_replicas().size > 1:
        model = DistributedDataParallel(model)
    schedule = optim.lr_scheduler.CosineAnnealingLR(o, steps)
    kept, rates = [], []
    ensemble = hdet.Ensemble(
        o, [hdet.learning_rate(o, spread=spread)], interval=interval, model=model, total_steps=total_steps,
        controller=hdet.controllers.Softmax(temperature=0.01), on_round=[hdet.JSONLines(path), kept.append],
    )  # fmt: skip
    for step in range(steps):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(9 * step + hdet.find_replicas().rank))
        rates.append([float(group["lr"]) * ensemble.scales["learning_rate"] for group in o.param_groups])
        loss = model(x).square().mean()
        o.zero_grad()
        loss.backward()
        o.step()
        ensemble.step(loss)  # before the scheduler: the next step's rate is not known yet
        schedule.step()
    ensemble.finish()
    return kept, rates


def train_in_pairs(folder):
    """Two ensembles, of two replicas each; what the sinks of this process were given."""
    rank = dist.get_rank()
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    pair = pairs[rank // 2]
    shown, tracker = io.StringIO(), Numbers()
    o = optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    sinks = [hdet.JSONLines(folder / f"{rank // 2}.jsonl"), hdet.Progress(seconds=0, file=shown), tracker]
    ensemble = hdet.Ensemble(o, total_steps=4, interval=2, replicas=pair, on_round=sinks)
    for step in range(4):
        o.param_groups[0]["params"][0].grad = torch.ones(2)
        o.step()
        ensemble.step(float(10 * rank + step))
    return shown.getvalue(), tracker.told


class Numbers(Tracker):
    def __init__(self):
        super().__init__()
        self.told = []

    def log(self, numbers, record):
        self.told.append(numbers["hdet/loss/mean"])


def test_each_of_two_ensembles_is_recorded_by_its_own_first_replica(tmp_path):
    told = run(train_in_pairs, 4, tmp_path)
    for rank, mean in ((0, 5), (2, 25)):
        (shown, numbers), others = told[rank], told[rank + 1]
        records = hdet.records.read_records(tmp_path / f"{rank // 2}.jsonl")
        assert [record.scores for record in records] == [(10 * rank + at, 10 * rank + 10 + at) for at in (0.5, 2.5)]
        assert numbers == [mean + 0.5, mean + 2.5]
        assert len(shown.splitlines()) == 2
        assert others == ("", [])


def train_on_a_full_disk(path):
    """Room comes up after the second round. Whether this replica was warned, and how often."""
    if hdet.find_replicas().rank == 0:
        path.symlink_to("/dev/full")
    o = optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    make_room = [lambda record: path.unlink() if record.round == 1 and record.replica == 0 else None]
    ensemble = hdet.Ensemble(o, total_steps=4, interval=1, on_round=[hdet.JSONLines(path), *make_room])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(4):
            o.param_groups[0]["params"][0].grad = torch.ones(2)
            o.step()
            ensemble.step(4.0 - step)
    return [str(warning.message) for warning in warned]


def test_a_full_disk_does_not_end_a_run(tmp_path):
    path = tmp_path / "rounds.jsonl"
    first, second = run(train_on_a_full_disk, 2, path)
    first, second = ([text for text in told if "losses" not in text] for told in (first, second))
    (told,) = first
    assert told.startswith(f"round 0 cannot be written to {path} (No space left on device); the run goes on")
    assert second == []
    assert [record.round for record in hdet.records.read_records(path)] == [2, 3]


def test_what_is_read_is_what_was_handed_out(tmp_path):
    path = tmp_path / "deep" / "rounds.jsonl"
    (first, rates), (second, _) = run(train, 2, path, 11, 4)
    read = hdet.records.read_records(path)
    assert len(path.read_text().splitlines()) == len(first) == 3  # one replica wrote
    assert [dataclasses.replace(r, hyperparameters={}) for r in read] == [
        dataclasses.replace(r, hyperparameters={}) for r in first
    ]
    for record, there, other in zip(read, first, second, strict=True):
        row, was = record.hyperparameters["learning_rate"], there.hyperparameters["learning_rate"]
        finite = math.isfinite(was.error)  # inf before the second round, which is null in JSON
        assert row == (was if finite else dataclasses.replace(was, error=None))
        assert row == dataclasses.replace(other.hyperparameters["learning_rate"], error=row.error)
        assert row.places == ("0/0/lr", "0/1/lr")
        assert list(row.first) == rates[record.step - record.steps]
        assert list(row.last) == rates[record.step - 1]
        assert row.center == row.last[0]
    assert [(r.step, r.steps, r.full, r.last) for r in read] == [
        (4, 4, True, False), (8, 4, True, False), (11, 3, False, True),
    ]  # fmt: skip
    assert any("raised" in h.decision or "lowered" in h.decision for r in read for h in r.hyperparameters.values())


@pytest.mark.parametrize(("steps", "total", "last"), [(8, None, (8, 0)), (8, 8, (8, 4)), (10, 10, (10, 2))])
def test_the_last_record_says_so(tmp_path, steps, total, last):
    train(tmp_path / "rounds.jsonl", steps, 4, total)
    read = hdet.records.read_records(tmp_path / "rounds.jsonl")
    assert [r.last for r in read] == [False] * (len(read) - 1) + [True]
    assert (read[-1].step, read[-1].steps) == last


def test_tensor_rates_and_rounds_without_exploration_are_recorded_too(tmp_path):
    _, rates = train(tmp_path / "rounds.jsonl", 9, 3, tensor=True, spread=0.2)  # one replica: nothing is explored
    read = hdet.records.read_records(tmp_path / "rounds.jsonl")
    rows = [(r, r.hyperparameters["learning_rate"]) for r in read if r.steps]
    assert len(rows) == 3
    for record, row in rows:
        assert list(row.first) == rates[record.step - 3]
        assert list(row.last) == rates[record.step - 1]
        assert math.isnan(record.scores[0])


def test_lines_are_strict_json_whatever_the_numbers():
    awkward = (math.nan, math.inf, -math.inf, 5e-324)
    row = hdet.records.HyperparameterRecord(math.nan, 1.0, awkward, 1.0, math.inf, {"v": math.nan}, 0.0, math.inf)
    name = "</script><script>alert(1)</script>" + '"' * 10_000
    record = make_record(scores=awkward, probe=awkward, start=math.nan, hyperparameters={name: row})
    text = to_line(record, 1.0)
    line = loads(text)
    assert text.endswith("}\n")
    assert text.count("\n") == 1
    assert line["version"] == 1
    assert line["scores"] == [None, None, None, 5e-324]
    assert line["start"] is None
    assert line["hyperparameters"][name]["proposed_scale"] is None
    assert set(loads(to_line(make_record(), 1.0))) == set(line)


def test_a_line_cut_short_is_left_out_and_then_overwritten(tmp_path):
    path = tmp_path / "rounds.jsonl"
    write = hdet.JSONLines(path)
    for number in range(3):
        write(make_record(round=number))
    write.close()
    whole = path.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for cut in (1, 17, len(whole) - start - 1):
        path.write_bytes(whole[: start + cut])
        assert [r.round for r in hdet.records.read_records(path)] == [0, 1]
    hdet.JSONLines(path)(make_record(round=2))
    assert [r.round for r in hdet.records.read_records(path)] == [0, 1, 2]
    path.write_bytes(path.read_bytes() + b"x" * 200_000)  # a long part: what comes before it is looked for further back
    hdet.JSONLines(path)(make_record(round=3))
    assert [r.round for r in hdet.records.read_records(path)] == [0, 1, 2, 3]


def test_rounds_that_a_resumed_run_did_again_are_read_once(tmp_path):
    path = tmp_path / "rounds.jsonl"
    for number, step in [(0, 10), (1, 20), (2, 30), (1, 21), (2, 31), (3, 41)]:
        hdet.JSONLines(path)(make_record(round=number, step=step))
    assert [(r.round, r.step) for r in hdet.records.read_records(path)] == [(0, 10), (1, 21), (2, 31), (3, 41)]


@pytest.mark.parametrize(
    ("text", "says"),
    [("hello\n", "one JSON object per line"), ("[1]\n", "as hdet.JSONLines writes them"),
     ('{"version": 2, "round": 0, "step": 1, "scores": [], "hyperparameters": {}}\n', "reads up to 1")],
)  # fmt: skip
def test_other_files_are_refused(tmp_path, text, says):
    (tmp_path / "rounds.jsonl").write_text(text)
    with pytest.raises(ValueError, match=says):
        hdet.records.read_records(tmp_path / "rounds.jsonl")


def test_keys_of_later_versions_are_left_out(tmp_path):
    line = loads(to_line(make_record(), 1.0))
    line["mood"] = "good"
    line["hyperparameters"]["learning_rate"]["colour"] = [1, 2]
    (tmp_path / "rounds.jsonl").write_text(json.dumps(line) + "\n")
    assert hdet.records.read_records(tmp_path / "rounds.jsonl") == [make_record()]


def test_a_record_costs_less_than_a_millisecond(tmp_path):
    write, record, seconds = hdet.JSONLines(tmp_path / "rounds.jsonl"), make_record(), []
    for _ in range(300):
        began = time.perf_counter()
        write(record)
        seconds.append(time.perf_counter() - began)
    assert statistics.median(seconds) < 1e-3


def test_many_replicas_are_written_with_twelve_digits_in_half_the_time(tmp_path):
    draw = random.Random(0).random
    record = make_record(1000, scores=tuple(draw() for _ in range(1000)), probe=tuple(draw() for _ in range(1000)))
    plain = {name: getattr(record, name) for name in ("scores", "probe")}
    plain["values"] = [row.values for row in record.hyperparameters.values()]
    ours, theirs = [], []
    for _ in range(30):
        for seconds, write in ((ours, lambda: to_line(record, 1.0)), (theirs, lambda: json.dumps(plain))):
            began = time.process_time()
            write()
            seconds.append(time.process_time() - began)
    assert statistics.median(ours) < 0.7 * statistics.median(theirs)
    hdet.JSONLines(tmp_path / "rounds.jsonl")(record)
    (read,) = hdet.records.read_records(tmp_path / "rounds.jsonl")
    assert read.scores == pytest.approx(record.scores, rel=1e-11)
    row, was = read.hyperparameters["learning_rate"], record.hyperparameters["learning_rate"]
    assert row.values == pytest.approx(was.values, rel=1e-11)
    assert dataclasses.replace(row, values=()) == dataclasses.replace(was, values=())
    holed = loads(to_line(dataclasses.replace(record, scores=(math.nan, *record.scores[1:])), 1.0))
    assert holed["scores"][:2] == [None, record.scores[1]]


def test_metrics_are_flat_finite_numbers():
    flat = hdet.records.metrics(make_record(scores=(1.0, math.nan, 3.0), probe=None, start=None))
    assert all(isinstance(value, float) and math.isfinite(value) for value in flat.values())
    assert flat["loss/mean"] == 2.0
    assert flat["loss/best_replica"] == 0.0
    assert "loss/replica_1" not in flat
    assert flat["learning_rate/scale"] == 2.5
    assert flat["overhead"] == 0.25
    many = hdet.records.metrics(make_record(replicas=1000))
    assert len(many) < 40


@pytest.mark.parametrize(
    "change",
    [
        {"full": None}, {"hyperparameters": {"lr": 5}}, {"version": "x"}, {"events": 5}, {"written_by": 5},
        {"hyperparameters": {"lr": {"values": [1.0], "base": "a", "center": 1, "scale": 1, "proposed_scale": 1}}},
        {"hyperparameters": {"lr": {"values": [1.0], "base": 1, "center": 1, "scale": 1, "proposed_scale": 1,
                                    "memory": [1]}}},
        {"hyperparameters": {"lr": {"values": [1.0], "base": 1, "center": 1, "scale": 1}}},
    ],
)  # fmt: skip
def test_a_damaged_record_is_said_to_be_one(tmp_path, change):
    line = json.loads(to_line(make_record(), 0.0))
    (tmp_path / "rounds.jsonl").write_text(json.dumps({**line, **change}) + "\n")
    with pytest.raises(ValueError, match=r"rounds\.jsonl"):
        hdet.records.read_records(tmp_path / "rounds.jsonl")


SEARCH = hdet.records.SearchRecord(
    rate=0.02, start=1e-4, interval=(0.03, 0.3), whole=(0.02, 0.3), factor=0.25, first_loss=2.0,
    coarse=((1e-4, 2.0), (1e-2, 1.0)), fine=((1e-3, 1.9), (0.1, 0.5)), steps=170, cost=216.0, seconds=1.5,
    doubts=("the loss fell by 1.3 % only",),
)  # fmt: skip


def test_a_search_and_a_loss_of_ones_own_are_kept(tmp_path):
    path = tmp_path / "rounds.jsonl"
    record = make_record(search=SEARCH, loss=0.75)
    path.write_text(to_line(record, 0.0))
    assert hdet.records.read_records(path) == [record]
    line = loads(path.read_text())
    assert line["search"]["coarse"] == [[1e-4, 2.0], [1e-2, 1.0]]
    assert line["loss"] == 0.75
    infinite = dataclasses.replace(SEARCH, coarse=((1e-4, math.inf),))
    path.write_text(to_line(make_record(search=infinite), 0.0))
    loads(path.read_text())
    assert math.isnan(hdet.records.read_records(path)[0].search.coarse[0][1])


def test_a_file_without_them_and_a_search_that_is_not_whole(tmp_path):
    path = tmp_path / "rounds.jsonl"
    line = loads(to_line(make_record(search=SEARCH), 0.0))
    del line["search"]["fine"]
    path.write_text(json.dumps(line) + "\n")
    assert hdet.records.read_records(path)[0].search is None
    del line["search"], line["loss"]
    path.write_text(json.dumps(line) + "\n")
    assert hdet.records.read_records(path) == [make_record()]


def train_long(folder):
    """A run that gathers nothing, as `Auto` has it in long ones, after a search."""
    replicas = hdet.find_replicas()
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    y = x.sum(1, keepdim=True).sin()
    torch.manual_seed(0)
    model = hdet.data_parallel(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = optim.AdamW(model.parameters(), lr=1e-4)

    def loss_of(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def step(index):
        rows = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(9 * index + replicas.rank))
        loss = loss_of(model, (x[rows], y[rows]))
        loss.backward()
        return loss.detach()

    kept, losses = [], []
    sinks = [hdet.JSONLines(folder / "rounds.jsonl"), kept.append]
    ensemble = hdet.Ensemble(
        optimizer, [hdet.learning_rate(optimizer, spread=0.5)], total_steps=600, model=model,
        probe=hdet.Probe(lambda index: [(x, y)], loss_of), on_round=sinks,
    )  # fmt: skip
    began = time.perf_counter()
    found = ensemble.find_lr(step)
    searched = time.perf_counter() - began
    for number in range(600):
        losses.append(step(number))
        optimizer.step()
        optimizer.zero_grad()
        ensemble.step(losses[-1])
    return kept, [float(loss) for loss in losses], found, searched


def test_a_long_run_records_its_search_and_the_losses_that_it_was_given(tmp_path):
    for rank, (kept, losses, found, searched) in enumerate(hdet.in_process(train_long, 2, tmp_path)):
        assert [record.step for record in kept] == list(range(10, 601, 10))
        for record in kept:
            assert all(math.isnan(score) for score in record.scores)  # nothing was gathered
            mean = statistics.fmean(losses[record.step - 10 : record.step])
            assert record.loss == pytest.approx(mean, rel=1e-5)
            assert hdet.records.metrics(record)["loss/own"] == record.loss
        assert f"loss {kept[3].loss:.3f}" in hdet.records.describe(kept[3])
        told = kept[0].search
        flat = hdet.records.metrics(kept[0])
        assert (flat["search/rate"], flat["search/sure"]) == (found.rate, float(found.sure))
        assert "search/rate" not in hdet.records.metrics(kept[1])
        assert [record.search for record in kept[1:]] == [None] * 59
        assert told.rate == found.rate
        assert told.start == pytest.approx(1e-4)
        assert list(told.coarse) == [tuple(point) for point in found.coarse]
        assert told.seconds == found.seconds
        assert kept[0].round_seconds < searched  # the search is no part of the round
        if rank == 0:
            read = hdet.records.read_records(tmp_path / "rounds.jsonl")
            assert (read[0].search, [record.loss for record in read]) == (told, [record.loss for record in kept])


def test_bad_lines_are_left_out_with_a_warning_where_others_are_good(tmp_path):
    path = tmp_path / "rounds.jsonl"
    good = [to_line(make_record(round=number), 1.0) for number in range(3)]
    path.write_text(f'{good[0]}hello\n{good[1]}{{"a": 1}}\n{good[2]}')
    says = r"rounds\.jsonl: 2 lines were left out; the first, line 2: it is no JSON"
    with pytest.warns(UserWarning, match=says) as warned:
        assert [record.round for record in hdet.records.read_records(path)] == [0, 1, 2]
    assert warned[0].filename == __file__
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(ValueError, match=r"pipe\.jsonl cannot be read: it is a named pipe, not a file"):
        hdet.records.read_records(tmp_path / "pipe.jsonl")
    with pytest.raises(FileNotFoundError):
        hdet.records.read_records(tmp_path / "none.jsonl")


def test_what_is_not_finite_is_a_hole_however_it_was_written(tmp_path):
    path = tmp_path / "rounds.jsonl"
    line = loads(to_line(make_record(2), 1.0)) | {"scores": ["A", "B"], "start": "C", "round_seconds": None}
    text = json.dumps(line).replace('"A"', "1e999").replace('"B"', "NaN").replace('"C"', "-Infinity")
    path.write_text(text + "\n")
    (record,) = hdet.records.read_records(path)
    assert all(math.isnan(score) for score in record.scores)
    assert record.start is None
    assert record.round_seconds == 0.0
