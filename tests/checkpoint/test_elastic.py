"""A checkpoint of N replicas goes on with M: the same consensus, new slots, new random numbers, and it says so."""

import copy
import math
import re
import warnings

import pytest
import saved_run
import torch
import torch.distributed as dist
from processes import run
from torch import nn

import hdet
from hdet._explore.slots import multipliers
from hdet.checkpoint.mean import mean


def save(path, steps, options):
    parts = saved_run.parts(**options)
    saved_run.train(parts, range(steps))
    hdet.save(path, parts, own={"mine": dist.get_rank()})
    inner, optimizer = parts["model"].module, parts["optimizer"]
    tensors = [t.clone() for t in inner.state_dict().values()]
    moments = [entry["exp_avg_sq"].clone() for entry in optimizer.state.values()]
    scale, step = parts["ensemble"].scales["learning_rate"], optimizer.state[inner[0].weight]["step"].clone()
    parts["ensemble"].finish()
    return tensors, moments, scale, step


def go_on(path, steps, options, last=24):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        records = []
        parts = saved_run.parts(**options, on_round=[records.append])
        loaded = hdet.load(path, parts, own={"mine": None})
    inner = getattr(parts["model"], "module", parts["model"])
    tensors = [t.clone() for t in inner.state_dict().values()]
    moments = [entry["exp_avg_sq"].clone() for entry in parts["optimizer"].state.values()]
    scale, dealt = parts["ensemble"].scales["learning_rate"], parts["ensemble"].multipliers["learning_rate"]
    step = parts["optimizer"].state[inner[0].weight]["step"].clone()
    drawn = torch.rand(1).item()
    saved_run.train(parts, range(steps, last))
    weights = torch.cat([p.detach().flatten() for p in inner.parameters()])
    said = [str(w.message) for w in caught if "saved by" in str(w.message)]
    return loaded, said, (tensors, moments, scale, step), dealt, drawn, weights, records


@pytest.mark.parametrize(
    ("saved", "resumed", "steps"), [(4, 2, 8), (2, 4, 8), (4, 2, 10), (2, 4, 10), (2, 1, 10)]
)  # 8 is a round's end
def test_another_number_of_replicas_goes_on(tmp_path, saved, resumed, steps):
    before = run(save, saved, str(tmp_path), steps, {})
    after = run(go_on, resumed, str(tmp_path), steps, {})
    mean = [torch.stack([b[0][k].double() for b in before]).mean(0) for k in range(len(before[0][0]))]
    slots = sorted(multipliers(resumed, 0.3)) if resumed > 1 else [1.0]
    assert sorted(a[3] for a in after) == pytest.approx(slots)
    assert len({a[4] for a in after}) == resumed, "replicas draw the same numbers"
    for loaded, said, (tensors, moments, scale, step), _, _, weights, records in after:
        assert all(torch.equal(t, m.to(t.dtype)) for t, m in zip(tensors, mean, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(moments, before[0][1], strict=True))
        assert scale == before[0][2] != 1.0
        assert step == before[0][3] == steps
        assert (loaded.step, loaded.replicas, loaded.exact, loaded.values) == (steps, saved, False, {})
        assert said == list(loaded.notices)
        assert re.search(f"saved by {saved} replicas and is loaded by {resumed}: slots are dealt again", said[0])
        assert ("start from the mean of the saved ones" in said[0]) == (steps == 10)
        assert "own entries ['mine'] are left as they are" in said[0]
        assert torch.equal(weights, after[0][5])
        assert weights.isfinite().all()
        if resumed > 1:
            assert [(r.step, r.full) for r in records[:2]] == [(12, steps == 8), (16, True)]
            assert all(math.isfinite(score) for record in records for score in record.scores)


def outer(path, steps):
    parts = saved_run.parts(averaging=hdet.Averaging(outer_step=0.5))
    start = [p.detach().clone() for p in parts["model"].parameters()]
    saved_run.train(parts, range(steps))
    hdet.save(path, parts)
    parts["ensemble"].finish()
    return start


def outer_goes_on(path, steps):
    with pytest.warns(UserWarning, match="the rest of the round is not judged"):
        parts = saved_run.parts(averaging=hdet.Averaging(outer_step=0.5))
        hdet.load(path, parts)
    start = [p.clone() for p in parts["ensemble"].state_dict()["weights"]["outer step"]["start"]]
    saved_run.train(parts, range(steps, 4))
    return start


def test_the_round_goes_on_from_where_it_had_begun(tmp_path):
    start = run(outer, 2, str(tmp_path), 2)[0]
    for again in run(outer_goes_on, 3, str(tmp_path), 2):
        assert all(torch.equal(a, b) for a, b in zip(start, again, strict=True))


def drop_in(path, steps):
    torch.manual_seed(0)
    model = hdet.data_parallel(nn.Linear(6, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = hdet.OneCycleAutoLR(
        optimizer, max_lr=0.01, total_steps=20, ensemble_lr_spread_ratio=0.3, model_sync_interval=4, model=model
    )
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    resumed = hdet.load(path, parts)
    for step in range(0 if resumed is None else resumed.step, steps):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(loss)
    if resumed is None:
        hdet.save(path, parts)
    return (
        scheduler.last_epoch,
        scheduler.get_replica_lr()[0] / scheduler.get_last_lr()[0],
        model.module.weight.tolist(),
    )


def test_the_drop_in_scheduler_goes_on_too(tmp_path):
    run(drop_in, 4, str(tmp_path), 6)
    results = run(drop_in, 2, str(tmp_path), 7)
    assert [epoch for epoch, _, _ in results] == [7, 7]
    assert sorted(ratio for _, ratio, _ in results) == pytest.approx([0.7, 1.3])
    first, *others = run(drop_in, 3, str(tmp_path), 20)
    assert all(weights == first[2] for _, _, weights in others)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_replica_without_optimizer_state_does_not_count_in_its_mean(order):
    """With a guard or a GradScaler a replica may have skipped all its steps so far."""
    moments = {0: {"step": torch.tensor(3.0), "exp_avg": torch.tensor([2.0, 4.0])}}
    states = [
        {"model": {"kind": "module", "state": {"w": torch.tensor([1.0])}},
         "optimizer": {"kind": "optimizer", "state": {"state": moments, "param_groups": []}}},
        {"model": {"kind": "module", "state": {"w": torch.tensor([3.0])}},
         "optimizer": {"kind": "optimizer", "state": {"state": {}, "param_groups": []}}},
    ]  # fmt: skip
    found = mean([copy.deepcopy(states[k]) for k in order])
    assert found["model"]["state"]["w"].tolist() == [2.0]
    assert found["optimizer"]["state"]["state"][0]["exp_avg"].tolist() == [2.0, 4.0]
    assert float(found["optimizer"]["state"]["state"][0]["step"]) == 3.0
