"""FSDP2 within replicas: 2 x 2 ranks against one process in float64, and what is refused."""

import copy
import math
import re
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import run
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hdet
from hdet._phases.tail_average import weights as tail

STEPS, INTERVAL, SPREAD = 7, 4, 0.4  # a round, its converge, and three more steps


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def batch(step, rank):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def loss_of(model, x):
    return (model(x) - x.sum(1, keepdim=True).sin()).square().mean()


def make_mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def shard(model, mesh):
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def start(gradients, kind=optim.AdamW, **options):
    mesh = make_mesh()
    model = shard(network(), mesh if gradients == "shared" else mesh["shard"])
    optimizer = kind(model.parameters(), lr=1e-2)
    schedule = optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, STEPS)
    ensemble = hdet.Ensemble(
        optimizer, [hdet.learning_rate(optimizer, spread=SPREAD)], interval=INTERVAL, model=model, replicas=mesh,
        gradients=gradients, **options,
    )  # fmt: skip
    return model, optimizer, schedule, ensemble


def train(parts, steps):
    model, optimizer, schedule, ensemble = parts
    losses = []
    for step in steps:
        loss = loss_of(model, batch(step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        ensemble.step(loss)
        losses.append(loss.item())
    return losses


def weights(model):
    return [whole(p).detach().tolist() for p in model.parameters()]


def sharded_run(gradients):
    records = []
    options = {"on_round": [records.append]}
    if gradients == "shared":
        options["controller"] = hdet.controllers.Softmax(temperature=0.1)
    parts = start(gradients, **options)
    losses = train(parts, range(STEPS))
    model, _, _, ensemble = parts
    mid = weights(model)
    with ensemble.consensus():
        consensus = weights(model)
    assert weights(model) == mid
    with pytest.raises(ValueError, match="join\\(\\) is for whole replicas"), ensemble.join():
        pass
    seen = (ensemble.multipliers["learning_rate"], ensemble.scales["learning_rate"], list(records[0].scores))
    ensemble.finish()
    ensemble.close()
    return losses, mid, consensus, weights(model), seen


def reference(gradients, deals, scales):
    """The same in one process: replicas are copies, the ranks of one share its gradient."""
    replicas = [network() for _ in range(2)]
    optimizers = [optim.AdamW(r.parameters(), lr=1e-2) for r in replicas]
    schedules = [optim.lr_scheduler.LinearLR(o, 1.0, 0.5, STEPS) for o in optimizers]
    losses = [[], [], [], []]
    for step in range(STEPS):
        everyone = []
        for number, replica in enumerate(replicas):
            own = [loss_of(replica, batch(step, 2 * number + part)) for part in range(2)]
            for part in range(2):
                losses[2 * number + part].append(own[part].item())
            (sum(own) / 2).backward()
            everyone.append([p.grad for p in replica.parameters()])
        if gradients == "shared":
            for left, right in zip(*everyone, strict=True):
                mean = (left + right) / 2
                left.copy_(mean)
                right.copy_(mean)
        deal = deals[step // INTERVAL]
        for number, (optimizer, schedule) in enumerate(zip(optimizers, schedules, strict=True)):
            group = optimizer.param_groups[0]
            base = group["lr"]
            group["lr"] = base * scales[step // INTERVAL] * deal[number]
            optimizer.step()
            group["lr"] = base
            optimizer.zero_grad()
            schedule.step()
        if step == INTERVAL - 1:
            average(replicas, optimizers, state=gradients == "local")
    mid = [[p.detach().clone() for p in r.parameters()] for r in replicas]
    average(replicas, optimizers, state=False)
    return losses, mid, [p.detach() for p in replicas[0].parameters()]


@torch.no_grad()
def average(replicas, optimizers, state):
    for left, right in zip(*(r.parameters() for r in replicas), strict=True):
        pairs = [(left, right)]
        if state:
            a, b = optimizers[0].state[left], optimizers[1].state[right]
            pairs += [(a[key], b[key]) for key in ("exp_avg", "exp_avg_sq")]
        for x, y in pairs:
            mean = (x + y) / 2
            x.copy_(mean)
            y.copy_(mean)


def close_to(ours, expected):
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(torch.tensor(a, dtype=torch.float64), b, rtol=0, atol=1e-6)
    return True


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_two_replicas_of_two_ranks_are_as_in_one_process(gradients):
    results = run(sharded_run, 4, gradients)
    seen = [result[4] for result in results]
    assert seen[0] == seen[1]  # the ranks of a replica have its slot, its scales and its scores
    assert seen[2] == seen[3]
    assert seen[0][1:] == seen[2][1:]
    deals = [dealt(0), dealt(1)]
    assert (seen[0][0], seen[2][0]) == deals[1]
    losses, mid, last = reference(gradients, deals, [1.0, seen[0][1]])
    if gradients == "shared":
        assert seen[0][1] != 1.0  # the controller has moved it, by scores of replicas and not of ranks
    assert seen[0][2] == pytest.approx([sum(losses[2 * r][:4] + losses[2 * r + 1][:4]) / 8 for r in range(2)])
    for rank, (ours, at_mid, consensus, final, _) in enumerate(results):
        assert ours == pytest.approx(losses[rank], abs=1e-6)
        assert close_to(at_mid, mid[rank // 2])
        assert close_to(consensus, last)
        assert close_to(final, last)
    # and within a round the replicas differ
    assert any(
        not math.isclose(a, b, abs_tol=1e-5)
        for a, b in zip(*(torch.tensor(results[r][1][0]).flatten() for r in (0, 2)), strict=True)
    )


def dealt(number):
    def see():
        o = optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        ensemble = hdet.Ensemble(o, [hdet.learning_rate(o, spread=SPREAD)], interval=1)
        ensemble.start_from(number)
        return ensemble.multipliers["learning_rate"]

    return tuple(hdet.in_process(see, 2))


def save(path, parts):
    model, optimizer, schedule, ensemble = parts
    with ensemble.saving():
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save({hdet.checkpoint.replica_key(ensemble): state}, checkpoint_id=f"{path}/sharded")
    hdet.save(path, {"scheduler": schedule, "ensemble": ensemble, "sharded": "sharded"})


def load(path, parts):
    model, optimizer, schedule, ensemble = parts
    loaded = hdet.load(path, {"scheduler": schedule, "ensemble": ensemble})
    with ensemble.saving():
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load({hdet.checkpoint.replica_key(ensemble): state}, checkpoint_id=f"{path}/{loaded.values['sharded']}")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def resumed(path, at, gradients, kind=optim.AdamW):
    whole_run = start(gradients, kind, total_steps=STEPS, averaging=hdet.Averaging(outer_step=0.5))
    train(whole_run, range(at))
    save(path, whole_run)
    after = train(whole_run, range(at, STEPS))
    again = start(gradients, kind, total_steps=STEPS, averaging=hdet.Averaging(outer_step=0.5))
    load(path, again)
    key = hdet.checkpoint.replica_key(again[3])
    assert train(again, range(at, STEPS)) == after
    assert weights(again[0]) == weights(whole_run[0])
    for parts in (whole_run, again):
        parts[3].close()
    return key


def resumes(path):
    """At a round's end, and in mid-round: one key for all, and one for each replica."""
    resumed(f"{path}/sgd", 6, "shared", optim.SGD)  # without any state, which torch looks for with every load
    return [resumed(f"{path}/{at}{how}", at, how) for at, how in ((4, "shared"), (6, "shared"), (6, "local"))]


def test_a_run_resumes_from_torchs_distributed_checkpoint_bit_for_bit(tmp_path):
    first, _, second, _ = run(resumes, 4, str(tmp_path))
    assert first == ["consensus", "replica-0-of-2", "replica-0-of-2"]
    assert second == ["consensus", "replica-1-of-2", "replica-1-of-2"]


def recovers():
    events = []
    parts = start(
        "shared",
        safety=hdet.Safety(rollback=hdet.Rollback(window=4, every=1)),
        on_round=[lambda r: events.extend(r.events)],
    )
    kept = {}
    for step in (0, 4):
        train(parts, range(step, step + 4))
        kept[step + 4] = weights(parts[0])
    if dist.get_rank() == 1:  # one part of one replica
        with torch.no_grad():
            next(parts[0].parameters()).to_local().fill_(math.nan)
    train(parts, range(8, 12))
    now = weights(parts[0])
    return events, [step for step, then in kept.items() if then == now]


def test_all_parts_of_all_replicas_go_back_together():
    results = run(recovers, 4)
    assert all(result == results[0] for result in results)
    (step,) = results[0][1]
    assert f"rolled back at step 12 to the weights of step {step}" in results[0][0][-1]


def tensor_parallel():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    plain = copy.deepcopy(model)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    results = []
    for net, options in ((model, {"replicas": mesh}), (plain, {"replicas": mesh.get_group("dp_replicate")})):
        optimizer = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        ensemble = hdet.Ensemble(
            optimizer, [hdet.learning_rate(optimizer, spread=0.5)], interval=3, total_steps=7, model=net,
            gradients="local", **options,
        )  # fmt: skip
        for step in range(7):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + mesh.get_local_rank(0))).double()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ensemble.step(loss)
        results.append(weights(net))
        ensemble.close()
    return results


def test_tensor_parallel_replicas_are_as_whole_ones():
    for ours, expected in run(tensor_parallel, 4):
        for a, b in zip(ours, expected, strict=True):
            torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=0, atol=1e-9)


def finds():
    mesh = make_mesh()
    model = shard(network(), mesh)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    before = weights(model)
    probe = hdet.Probe([(x, x) for x in batch(0, 9).repeat(8, 1)], lambda m, b: loss_of(m, b[0]), size=32)

    def step(index):
        loss_of(model, batch(index % 5, dist.get_rank())).backward()

    found = hdet.find_lr(model, optimizer, step, probe=probe, replicas=mesh)
    assert weights(model) == before
    return found.rate


def finds_from_a_loader():
    """Every rank has batches of its own, and not as many as the others."""
    mesh = make_mesh()
    model = shard(network(), mesh)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    before = weights(model)
    loader = [batch(index, dist.get_rank()) for index in range(20 + dist.get_rank())]
    found = hdet.find_lr(
        model, optimizer, loader, loss_of, total_steps=1000, accumulate=2, clip_grad_norm=1.0, replicas=mesh
    )  # fmt: skip
    assert weights(model) == before
    return found.rate


@pytest.mark.soak
@pytest.mark.parametrize("how", [finds, finds_from_a_loader])
def test_the_rate_is_found_by_all_ranks_together(how):
    rates = run(how, 4)
    assert rates == [rates[0]] * 4
    assert 1e-3 < rates[0] < 1


def refused(kind):
    mesh = make_mesh()
    model = network()
    options = {"gradients": "shared", "replicas": mesh}
    if kind == "one dimension":
        options["replicas"] = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
        shard(model, options["replicas"])
    elif kind == "no mesh":
        shard(model, mesh)
        options["replicas"] = None
    elif kind == "not shared":
        shard(model, mesh["shard"])
    elif kind == "not local":
        shard(model, mesh)
        options["gradients"] = "local"
    elif kind == "guard":
        shard(model, mesh)
        options["safety"] = hdet.Safety(guard=True)
    elif kind == "both":
        shard(model, mesh)
        options["mesh"] = mesh
    elif kind == "no model":
        shard(model, mesh)
    elif kind == "no mesh at all":
        options["replicas"] = (2, 2)
    elif kind == "one rank":
        shard(model, mesh)
        options["seed"] = 7 if dist.get_rank() == 3 else 0
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    try:
        hdet.Ensemble(optimizer, interval=5, model=None if kind == "no model" else model, **options)
    except (ValueError, TypeError) as error:
        return str(error)


REFUSED = {
    "one dimension": 'there is one model, so replicas cannot diverge.*mesh_dim_names=\\("replicate", "shard"\\)',
    "no mesh": r"hdet\.Ensemble\(\.\.\., replicas=mesh\)",
    "not shared": r"nothing shares the gradients of different replicas.*fully_shard\(model, mesh=mesh\)",
    "not local": r'fully_shard\(model, mesh=mesh\["shard"\]\)',
    "nothing shared": "nothing shares the gradients of different replicas: the model is not placed on the mesh",
    "no model": "a sharded model must be given.*model=model",
    "guard": "guard=True needs whole gradients on every rank",
    "both": "hdet.Ensemble has no argument 'mesh'; write replicas=mesh",
    "no mesh at all": "replicas must be a process group or a DeviceMesh, got \\(2, 2\\)",
    "one rank": "the replicas disagree on seed: 7 on rank 3, but 0 on the others",
}


def refusals():
    return {kind: refused(kind) for kind in REFUSED}


def test_what_cannot_work_is_refused_on_every_rank():
    results = run(refusals, 4)
    for kind, words in REFUSED.items():
        for result in results:
            assert re.search(words, result[kind] or ""), (kind, result[kind])


def root_only(mesh):
    """FSDP2 keeps the weights of the root gathered after a forward pass, in which all of this model's are."""
    return fully_shard(network(), mesh=mesh)


def disturbed(look):
    """A run in which something looks at the model between steps, or nothing does; its losses and weights."""
    mesh = make_mesh()
    model = root_only(mesh)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    probe = hdet.Probe([(x, x) for x in batch(0, 9)], lambda m, b: loss_of(m, b[0])) if look == "probe" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nobody reads the probe
        ensemble = hdet.Ensemble(
            optimizer, [hdet.learning_rate(optimizer, spread=SPREAD)], interval=3, model=model, replicas=mesh,
            probe=probe, controller=hdet.controllers.Fixed(),
        )  # fmt: skip
    losses = []
    for step in range(8):
        if look == "evaluation" and step in (2, 4):
            with ensemble.consensus(), torch.no_grad():
                loss_of(model, batch(0, 0))
        losses += train((model, optimizer, optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0), ensemble), [step])
    ensemble.finish()
    ensemble.close()
    return losses, weights(model)


def keeps_training_on_what_is_there():
    plain = disturbed(None)
    assert disturbed("evaluation") == plain
    assert disturbed("probe") == plain
    mesh = make_mesh()
    model = root_only(mesh)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    before = loss_of(model, batch(0, 0)).item()
    probe = hdet.Probe([(x, x) for x in batch(0, 9)], lambda m, b: loss_of(m, b[0]))
    hdet.find_lr(
        model, optimizer, lambda index: loss_of(model, batch(index % 5, dist.get_rank())).backward(), probe=probe,
        replicas=mesh,
    )  # fmt: skip
    assert loss_of(model, batch(0, 0)).item() == before


def test_what_looks_at_the_model_leaves_no_gathered_weights_behind():
    run(keeps_training_on_what_is_there, 4)


def resume_outer(path, at, **options):
    """Where a round began, and the momenta of the outer step, are in parts as well."""
    results = []
    for again in (False, True):
        model = shard(network(), options.get("replicas") or init_device_mesh("cpu", (4,)))
        optimizer = optim.AdamW(model.parameters(), lr=1e-2)
        schedule = optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, 10)
        spread = hdet.learning_rate(optimizer, spread=SPREAD if "replicas" in options else 0.0)
        ensemble = hdet.Ensemble(optimizer, [spread], interval=3, model=model, **options)
        parts = model, optimizer, schedule, ensemble
        if again:
            load(path, parts)
        else:
            train(parts, range(at))
            save(path, parts)
        results.append((train(parts, range(at, 10)), weights(model)))
        ensemble.close()
    assert results[0] == results[1]


def resumes_outer_steps(path):
    resume_outer(f"{path}/end", 6, replicas=make_mesh(), averaging=hdet.Averaging(outer_step=hdet.Nesterov()))
    resume_outer(f"{path}/mid", 7, replicas=make_mesh(), averaging=hdet.Averaging(outer_step=0.5))
    resume_outer(
        f"{path}/plain", 7, averaging=hdet.Averaging(outer_step=0.5)
    )  # one model over all ranks, which an outer step is for, too


def resumes_tail_averages(path):
    """The mean of the round ends is in parts too. It is taken here whatever the probe says, or it would not be seen."""
    told = []
    tail.compare = lambda last, average: tail.Compared(True, last[0], last[0] - average[0], 0.0)
    probe = hdet.Probe([(x, x) for x in batch(0, 9)], lambda m, b: loss_of(m, b[0]), size=3)
    given = {
        "total_steps": 10,
        "probe": probe,
        "averaging": hdet.Averaging(tail=0.8),
        "controller": hdet.controllers.Fixed(),
        "on_round": [told.append],
    }
    resume_outer(f"{path}/end", 6, replicas=make_mesh(), **given)
    resume_outer(f"{path}/mid", 7, replicas=make_mesh(), **given)
    one = init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard"))
    resume_outer(f"{path}/one", 7, replicas=one, **given)  # one model over all ranks
    with pytest.raises(ValueError, match="the optimizer holds DTensors"):
        resume_outer(f"{path}/plain", 7, **given)
    ends = [event for record in told for event in record.events if event.startswith("tail average: taken")]
    assert len(ends) == 6


def test_tail_averages_resume_bit_for_bit(tmp_path):
    run(resumes_tail_averages, 4, str(tmp_path))


def test_outer_steps_resume_bit_for_bit(tmp_path):
    run(resumes_outer_steps, 4, str(tmp_path))


def odd_models():
    mesh = make_mesh()
    model = network()
    for p in model[:-1].parameters():
        p.requires_grad_(False)
    ema = shard(network(), mesh)
    shard(model, mesh)  # the last layer has one row: one rank of each replica holds nothing that is trained
    optimizer = optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    ensemble = hdet.Ensemble(
        optimizer, [hdet.learning_rate(optimizer, spread=SPREAD)], interval=2, model=model, replicas=mesh,
        averaging=hdet.Averaging(outer_step=0.5, followers=[ema]),
    )  # fmt: skip
    train((model, optimizer, optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0), ensemble), range(4))
    ensemble.close()
    return weights(model)


def one_replica():
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard"))
    model = shard(network(), mesh)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    ensemble = hdet.Ensemble(optimizer, interval=2, model=model, replicas=mesh)
    with pytest.warns(UserWarning, match="there is only one replica"):
        train((model, optimizer, optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0), ensemble), range(3))
    ensemble.close()


def unusual():
    one_replica()
    return odd_models()


def test_ranks_without_a_trained_part_followers_in_parts_and_one_replica():
    results = run(unusual, 4)
    assert all(result == results[0] for result in results)
