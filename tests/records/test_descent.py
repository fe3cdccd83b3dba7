"""Whether a run learns is told from its losses alone: while it runs, at its end, in records and on the page."""

import io
import json
import math
import random
import re
import time
import warnings

import pytest
import torch
from processes import run
from sklearn.datasets import load_digits
from torch import nn, optim

import hdet
from hdet._report.run import Run
from hdet._report.summary import summary
from hdet.records.json_lines import from_json, to_line
from hdet.records.progress import describe
from hdet.records.trend import Descent, Trend, words

CONTROLLERS = {
    "auto": hdet.Auto(),
    "line search": hdet.controllers.LineSearch(),
    "slope": hdet.controllers.Slope(),
    "softmax": hdet.controllers.Softmax(),
    "fixed": hdet.controllers.Fixed(),
}


def trends(losses, steps, total=None):
    """What is said after each round of `steps` steps with these losses, one per step."""
    total = len(losses) if total is None else total
    descent, found = Descent(total), []
    for begin in range(0, len(losses) - steps + 1, steps):
        descent.update(sum(losses[begin : begin + steps]) / steps, steps, losses[0] if begin == 0 else None)
        found.append(descent.trend(begin + steps, begin + steps >= total).trend)
    return found


CURVES = {
    "falls": (lambda t: 0.1 + 2.2 * math.exp(-8 * t), "falls"),
    "falls late": (lambda t: 2.3 - 4 * max(0.0, t - 0.6), "falls"),
    "falls at once, then noise": (lambda t: 2.3 if t < 0.004 else 0.7, "falls"),
    "a warm-up that hurts": (lambda t: 2.3 + (3 * t if t < 0.3 else -2 * (t - 0.3)), "falls"),
    "explodes, and dies": (lambda t: 2.3 + (0.0 if t < 0.002 else 1e4 * math.exp(-60 * t)), "risen"),
    "explodes, and dies a little lower": (lambda t: 2.314 if t < 0.002 else 2.303 + 30 * math.exp(-20 * t), "risen"),
    "explodes, and learns": (lambda t: 2.314 if t < 0.002 else 0.1 + 30 * math.exp(-20 * t), "falls"),
    "rises a little, and learns": (lambda t: 2.3 + 2 * t if t < 0.1 else 2.5 - 1.2 * t, "falls"),
    "climbs": (lambda t: 2.3 + 20 * t, "risen"),
    "stays": (lambda t: 2.301, "flat"),
    "comes back": (lambda t: 2.3 - 8 * max(0.0, t * (0.8 - t)), "back"),
}


FEW_ROUNDS = {("stays", 50): "", ("stays", 100): "", ("comes back", 50): "", ("comes back", 100): "falls"}


@pytest.mark.parametrize("steps", [1, 5, 10, 50, 100])
@pytest.mark.parametrize("name", CURVES)
def test_what_is_said_at_the_end(name, steps):
    curve, expected = CURVES[name]
    right = 0
    for seed in range(10):
        rng = random.Random(seed)
        noise = 0.01 if name == "stays" else 0.03
        losses = [curve(k / 500) * (1 + noise * rng.gauss(0, 1)) for k in range(500)]
        found = trends(losses, steps)
        unclear = FEW_ROUNDS.get((name, steps))
        right += found[-1] in (expected, unclear)
        early = [said for k, said in enumerate(found) if (k + 1) * steps < 250]
        assert not any(early), "nothing is said in the first half"
    assert right >= 8


@pytest.mark.parametrize(
    ("total", "steps", "due"), [(387, 5, 195), (2000, 10, 1000), (8000, 10, 2000), (None, 10, 1000)]
)
def test_when_it_is_said(total, steps, due):
    descent, said = Descent(total), []
    for step in range(steps, 4000, steps):
        descent.update(2.3, steps, 2.3 if step == steps else None)
        said.append(descent.trend(step).trend)
    assert (said.index("flat") + 1) * steps == due


@pytest.mark.parametrize("mean", [0.0, 1e-3, 1.0])
def test_losses_that_are_nothing_but_noise_are_not_accused(mean):
    """As those of a policy's gradient, which begin at 0; a lucky first batch is no lower start."""
    accused = 0
    for seed in range(100):
        rng = random.Random(seed)
        losses = [mean + rng.gauss(0, 1) for _ in range(500)] if mean < 1 else [rng.expovariate(1) for _ in range(500)]
        losses[0] = 0.0 if mean < 1 else losses[0]
        fine = ("", "falls") if mean < 1 else ("", "falls", "flat")
        accused += trends(losses, 5)[-1] not in fine
    assert accused <= 10


@pytest.mark.parametrize("odd", [1e30, math.nan, math.inf])
@pytest.mark.parametrize("where", [0, 50, 99])
def test_one_odd_round_is_not_the_level(odd, where):
    descent = Descent(500)
    for k in range(100):
        descent.update(odd if k == where else 2.3 - 0.02 * k, 5, 2.3 if k == 0 else None)
    assert descent.trend(500, last=True).trend == "falls"


def test_nothing_is_said_without_a_start():
    descent = Descent(100)
    for step in range(5, 101, 5):
        descent.update(2.3, 5, None)
        assert descent.trend(step, last=step == 100) == Trend()
    assert words(Trend()) == words(Trend("falls", 2.3, 0.1, 0.1, 2.3)) == ""


def data(step, rank, size=32):
    centres = torch.randn(10, 16, generator=torch.Generator().manual_seed(0))
    y = torch.randint(10, (size,), generator=torch.Generator().manual_seed(100 * step + rank))
    noise = torch.randn(size, 16, generator=torch.Generator().manual_seed(50_000 + 100 * step + rank))
    return centres[y] + 0.5 * noise, y


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def trained(
    rate, controller=None, probe=True, gradients="shared", drop_in=False, steps=60, resume_at=None, spread=0.5,
    told=True, **more,
):  # fmt: skip
    """A run of a small net; its records."""
    rank = hdet.find_replicas().rank
    torch.manual_seed(0)
    model = hdet.data_parallel(
        nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    )
    o = optim.AdamW(model.parameters(), lr=rate)
    records = []

    def make():
        if drop_in:
            return hdet.OneCycleAutoLR(
                o, rate, total_steps=steps, ensemble_lr_spread_ratio=1 / 9, model_sync_interval=5, enable_auto_lr=True,
                auto_lr_warmup_steps=10, model=model, ensemble={"on_round": [records.append]}, **more,
            )  # fmt: skip
        return hdet.Ensemble(
            o, [hdet.learning_rate(o, spread=spread)], total_steps=steps, interval=5, controller=controller,
            model=model, probe=hdet.Probe(lambda index: [data(1000 + index, 9, 128)], loss_of) if probe else None,
            gradients=gradients, on_round=[records.append] if told else [], **more,
        )  # fmt: skip

    ensemble = make()
    for step in range(steps):
        if step == resume_at:
            state = ensemble.state_dict()
            ensemble.close()
            ensemble = make()
            ensemble.load_state_dict(state)
        loss = loss_of(model, data(step, rank))
        loss.backward()
        o.step()
        o.zero_grad()
        ensemble.step(loss)
    if not drop_in:
        ensemble.close()
    return records


def events_of(records):
    return [(r.step, event) for r in records for event in r.events if event.startswith("the losses")]


WAYS = {
    **{name: {"controller": controller} for name, controller in CONTROLLERS.items()},
    "without a probe": {"controller": hdet.controllers.Softmax(), "probe": False},
    "local": {"controller": hdet.controllers.Slope(), "gradients": "local"},
    "drop-in": {"drop_in": True},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_is_lost_is_not_called_fine(way):
    records, other = hdet.in_process(lambda: trained(3.0, **WAYS[way]), 2)
    assert [(r.trend, r.level, r.events) for r in other] == [(r.trend, r.level, r.events) for r in records]
    assert [step for step, _ in events_of(records)] == [30, 60], "once when it is seen, and at the end"
    assert all("run hdet.find_lr, or start at a tenth" in text for _, text in events_of(records))
    assert records[-1].trend == "risen"
    assert 2.0 < records[-1].first_loss < 3.0, "that of the first step, before it exploded"
    assert records[-1].level > records[-1].first_loss - 0.3
    assert all(record.level > record.first_loss for record in records[3:6]), "it is too early to accuse"
    for record in records[3:]:
        findings = [row.finding for row in record.hyperparameters.values()]
        assert not any("no evidence" in finding for finding in findings)
    assert "not learning" in describe(records[-1])
    assert from_json(json.loads(to_line(records[-1], 0.0))) == records[-1]


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_learns_is_left_in_peace(way):
    records, _ = hdet.in_process(lambda: trained(3e-3, **WAYS[way]), 2)
    assert events_of(records) == []
    assert records[-1].trend == "falls"
    assert {r.trend for r in records[:5]} == {""}


@pytest.mark.parametrize("at", [2, 17, 40])
def test_it_is_resumed_to_the_last_bit(at):
    whole, _ = hdet.in_process(lambda: trained(3.0, hdet.controllers.Slope()), 2)
    resumed, _ = hdet.in_process(lambda: trained(3.0, hdet.controllers.Slope(), resume_at=at), 2)
    told = [[(r.step, r.trend, r.first_loss, r.level, r.events) for r in records] for records in (whole, resumed)]
    assert told[0] == told[1]


PLAIN = {"controller": hdet.controllers.Fixed(), "probe": False, "spread": 0.0}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("resume_at", [None, 2, 17, 40])
def test_where_nothing_is_gathered_each_replica_goes_by_its_own_losses(resume_at):
    for records in hdet.in_process(lambda: trained(100.0, resume_at=resume_at, **PLAIN), 2):
        assert [step for step, _ in events_of(records)] == [30, 60]
        assert records[-1].trend == "risen"
        assert 2.0 < records[-1].first_loss < 3.0
    for records in hdet.in_process(lambda: trained(3e-3, resume_at=resume_at, **PLAIN), 2):
        assert events_of(records) == []
        assert records[-1].trend == "falls"


def test_it_is_said_to_those_who_keep_no_records():
    with pytest.warns(UserWarning, match="fallen since the start") as caught:
        trained(100.0, told=False, **PLAIN)
    assert sum("the losses" in str(w.message) for w in caught) == 1


def in_processes():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        records = trained(3.0, hdet.controllers.Softmax(), probe=False)
    return events_of(records), [str(w.message) for w in caught if "the losses" in str(w.message)]


def test_every_rank_warns():
    found = run(in_processes, 2)
    assert found[0] == found[1]
    assert len(found[0][1]) == 1


def test_the_page_says_so(tmp_path):
    """Also of a run that goes on; a file of before, without these fields, is read as ever."""
    for rate, good in ((3.0, False), (3e-3, True)):
        records, _ = hdet.in_process(lambda rate=rate: trained(rate, hdet.controllers.LineSearch()), 2)
        for count in (5, 8, len(records)):
            path = tmp_path / f"{rate}-{count}.jsonl"
            path.write_text("".join(to_line(record, 0.0) for record in records[:count]))
            page = Run(path)
            page.refresh()
            parts = {part["title"]: part for part in summary(page.lines, page.status(time.time()))}
            text = " ".join(part["text"] for part in parts.values())
            assert ("shows nothing of what is better" in text) == (not good)
            assert ("have not fallen since the start" in text) == (not good and count > 5)
            assert not (rate == 3.0 and "no evidence" in text)
            if count == 5:  # too early to accuse
                continue
            assert parts["Health"]["tone"] == ("good" if good else "bad")
            if not good:
                assert "run hdet.find_lr" in parts["Health"]["text"]
                for title in ("Won", "Controller"):
                    assert "shows nothing" in parts[title]["text"]
    old = {key: value for key, value in page.lines[-1].items() if key not in Trend._fields}
    assert "not fallen" not in str(summary([old], page.status(time.time())))
    for bad in ({"trend": "risen"}, {"trend": 3, "level": "x"}, {"trend": "flat", "first_loss": None}):
        path.write_text(json.dumps({**old, **bad}) + "\n")
        page = Run(path)
        page.refresh()
        assert summary(page.lines, page.status(time.time()))


@pytest.mark.parametrize("steps", [20, 50, 100])
@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_a_run_that_ends_no_lower_than_it_began_is_never_passed_over(steps, noise):
    """However few its rounds are, and however noisy."""
    for seed in range(50):
        rng, descent = random.Random(seed), Descent(400)
        losses = [2.3 + noise * rng.gauss(0, 1) for _ in range(400)]
        for end in range(steps, 401, steps):
            first = losses[0] if end == steps else None
            descent.update(sum(losses[end - steps : end]) / steps, steps, first)
        told = descent.trend(400, last=True)
        assert not told.shows_nothing or told.trend in ("flat", "risen", "back")
        assert not told.shows_nothing or words(told)


CNN_STEPS = 387


def digits_cnn():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def digits(index, samples=32):
    found = load_digits()
    chosen = torch.randint(1400, (samples,), generator=torch.Generator().manual_seed(index))
    images = torch.tensor(found.images, dtype=torch.float32)[chosen]
    return images[:, None] / 16, torch.tensor(found.target)[chosen]


def cross_entropy_of(model, data):
    return nn.functional.cross_entropy(model(data[0]), data[1])


def digits_run(rate, folder):
    """As long as one that fine-tunes, and begun at a rate at which it learns nothing."""
    rank, batches = hdet.find_replicas().rank, [digits(index) for index in range(32)]
    model = hdet.data_parallel(digits_cnn())
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, CNN_STEPS)
    records, shown = [], io.StringIO()
    ensemble = hdet.Ensemble(
        optimizer, [hdet.learning_rate(optimizer, spread=0.5)], total_steps=CNN_STEPS, controller=hdet.Auto(),
        model=model, probe=hdet.Probe(lambda index: [digits(10**6 + index, 64)], cross_entropy_of),
        on_round=[records.append, hdet.JSONLines(folder / "rounds.jsonl"), hdet.Progress(seconds=0, file=shown)],
    )  # fmt: skip
    for step in range(CNN_STEPS):
        loss = cross_entropy_of(model, batches[(2 * step + rank) % len(batches)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        ensemble.step(loss)
    return records, shown.getvalue()


@pytest.mark.parametrize("rate", [0.3, 3.0])
def test_a_short_run_of_a_cnn_that_is_dead_is_called_so_while_it_runs_and_at_its_end(tmp_path, rate):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (records, shown), _ = hdet.in_process(lambda: digits_run(rate, tmp_path), 2)
    assert records[-1].level > 2.2, "it has learned: the rate is not too high for this net"
    told = [
        record.step
        for record in records
        if any(re.match(r"the losses have (not|hardly) fallen", e) for e in record.events)
    ]
    assert len(told) == 2
    assert told[0] <= CNN_STEPS / 2 + 5
    assert told[1] == CNN_STEPS
    assert any("run hdet.find_lr, or start at a tenth of it" in str(w.message) for w in caught)
    assert "not learning" in shown
    late = [h.finding for r in records if r.step > 50 for h in r.hyperparameters.values()]
    assert not any("no evidence" in finding for finding in late)
    page = Run(tmp_path / "rounds.jsonl")
    page.refresh()
    health = next(p for p in summary(page.lines, page.status(time.time())) if p["title"] == "Health")
    assert health["tone"] == "bad"
    assert "run hdet.find_lr" in health["text"]
