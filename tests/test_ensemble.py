"""The protocol on real processes: rounds, consensus, followers, accumulation, scalers, compiled modules, resume."""

import copy
import gc
import itertools
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from cases import Net, all_equal, batch, flat, gathered, keeping_buffers
from processes import run
from single import pretended
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet._explore import slots
from hdet._phases.control import Control
from hdet._phases.recording import Recording
from hdet.controllers.steering import Steering


def make(spread=0.3, interval=4, optimizer=optim.AdamW, net=None, options=None, **kwargs):
    torch.manual_seed(0)
    model = keeping_buffers(net or Net())
    o = optimizer(model.parameters(), lr=0.01, **(options or {}))
    rates = [hdet.learning_rate(o, spread=spread)]
    ensemble = hdet.Ensemble(o, rates, interval=interval, **{"model": model, **kwargs})
    return model, o, ensemble


def train(model, o, ensemble, steps, first=0, micro=1):
    for step in range(first, first + steps):
        o.zero_grad()
        for part in range(micro):
            x, y = batch(dist.get_rank() + 10 * part, step)
            loss = ((model(x) - y) ** 2).mean()
            (loss / micro).backward()
            if part < micro - 1:
                ensemble.step(loss)
        o.step()
        ensemble.step(loss)


# consensus


def consensus_in_mid_round():
    model, o, ensemble = make()
    train(model, o, ensemble, 2)
    assert ensemble.mid_round
    tensors = [*model.parameters(), *model.buffers()]
    own = [t.detach().clone() for t in tensors]
    state = copy.deepcopy(o.state_dict())
    expected = sum(gathered(p for p in model.parameters() if p.requires_grad)) / dist.get_world_size()
    assert not all_equal(model.parameters())
    with ensemble.consensus():
        assert all_equal([*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())])
        trained = flat(p for p in model.parameters() if p.requires_grad)
        torch.testing.assert_close(trained, expected, rtol=1e-6, atol=1e-7)
        model(batch(0, 0)[0])  # in training mode: moves the BatchNorm statistics
        with pytest.raises(RuntimeError, match="inside consensus"):
            o.step()
        with pytest.raises(RuntimeError, match="entered already"), ensemble.consensus():
            pass
    assert all(torch.equal(a, b) for a, b in zip(own, tensors, strict=True))
    assert str(state) == str(o.state_dict())
    assert ensemble.mid_round
    with pytest.raises(KeyError), ensemble.consensus():
        raise KeyError
    assert all(torch.equal(a, b) for a, b in zip(own, tensors, strict=True))
    train(model, o, ensemble, 2, first=2)
    undisturbed = make()
    train(*undisturbed, 4)
    assert torch.equal(flat(model.parameters()), flat(undisturbed[0].parameters()))
    with ensemble.consensus():  # at a round's end: nothing to do
        assert not ensemble.mid_round
    ensemble.close()
    undisturbed[2].close()


def test_consensus_swaps_the_average_in_and_the_replica_back_bit_for_bit():
    run(consensus_in_mid_round, 2)
    run(consensus_in_mid_round, 4)


# converge, finish, total_steps


def rounds_of_all_kinds():
    records = []
    model, o, ensemble = make(interval=4, on_round=[records.append], total_steps=11)
    train(model, o, ensemble, 2)
    ensemble.converge()
    assert not ensemble.mid_round
    assert all_equal(model.parameters())
    train(model, o, ensemble, 4, first=2)
    assert not ensemble.mid_round
    train(model, o, ensemble, 3, first=6)
    o.step()
    ensemble.converge()  # between optimizer.step() and ensemble.step(): the step is counted once
    ensemble.step(1.0)
    assert ensemble.state_dict()["progress"]["step"] == 10
    train(model, o, ensemble, 1, first=10)
    assert [(r.round, r.step, r.full) for r in records] == [(0, 2, False), (1, 6, True), (2, 10, False), (3, 11, False)]
    assert all(len(r.scores) == 2 and all(map(math.isfinite, r.scores)) for r in records)
    rate = records[1].hyperparameters["learning_rate"]
    assert sorted(v / rate.center for v in rate.values) == pytest.approx([0.7, 1.3])
    assert all_equal(model.parameters())
    # after the end the steps are plain, and the replicas stay equal, known to be so
    train(model, o, ensemble, 3, first=11)
    assert all_equal(model.parameters())
    assert ensemble.engine.run.equal
    assert ensemble.multipliers == {"learning_rate": 1.0}
    ensemble.finish()
    assert len(records) == 4


def test_converge_on_demand_and_the_last_step():
    run(rounds_of_all_kinds, 2)


def finish_without_total_steps():
    model, o, ensemble = make(interval=100)
    train(model, o, ensemble, 3)
    assert not all_equal(model.parameters())
    ensemble.finish()
    return all_equal(model.parameters())


def test_finish_averages_the_last_round():
    assert run(finish_without_total_steps, 2) == [True, True]


def warned_at_the_end(finish):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, o, ensemble = make(interval=100)
        train(model, o, ensemble, 3)
        if finish:
            ensemble.finish()
        del model, o, ensemble
        gc.collect()
    return [str(w.message) for w in caught if "mid-round" in str(w.message)]


def test_a_run_that_ends_in_mid_round_warns():
    assert all("finish()" in text for [text] in run(warned_at_the_end, 2, False))
    assert run(warned_at_the_end, 2, True) == [[], []]


# observe_only


def observed(observe_only):
    records = []
    model, o, ensemble = make(
        observe_only=observe_only,
        controller=hdet.controllers.Softmax(temperature=0.05),
        on_round=[records.append],
        total_steps=16,
    )
    train(model, o, ensemble, 12)
    return [
        (r.hyperparameters["learning_rate"].scale, r.hyperparameters["learning_rate"].proposed_scale) for r in records
    ]


def test_observe_only_measures_and_moves_nothing():
    for row in run(observed, 2, True):
        assert [scale for scale, _ in row] == [1.0] * 3
        assert all(proposed != 1.0 for _, proposed in row)
    for row in run(observed, 2, False):
        assert all(scale == proposed != 1.0 for scale, proposed in row)


# followers


def with_ema():
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    ema = optim.swa_utils.AveragedModel(model.module, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(0.5))
    masters = [torch.full((3,), float(dist.get_rank()))]
    o = optim.AdamW(model.parameters(), lr=0.01)
    ensemble = hdet.Ensemble(o, interval=3, model=model, averaging=hdet.Averaging(followers=[ema, *masters]))
    for step in range(3):
        assert step == 0 or not all_equal(ema.parameters())
        o.zero_grad()
        x, y = batch(dist.get_rank(), step)
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        o.step()
        ema.update_parameters(model.module)
        ensemble.step(loss)
    assert all_equal(ema.parameters())
    assert masters[0].tolist() == [0.5] * 3
    return int(ema.n_averaged)


def test_modules_that_follow_the_weights_are_averaged_along():
    assert run(with_ema, 2) == [3, 3]


# accumulation, GradScaler, closures, compiled modules, sparse gradients


def accumulated(micro):
    model, o, ensemble = make(interval=2)
    scores = []
    ensemble.engine.phase(Recording).on_round = (lambda r: scores.append(r.scores),)
    train(model, o, ensemble, 4, micro=micro)
    return ensemble.state_dict()["progress"], scores


def test_gradient_accumulation_counts_optimizer_steps():
    for progress, scores in run(accumulated, 2, 3):
        assert progress == {"step": 4, "round": 2, "step_in_round": 0, "cut": False, "noisy": False, "finished": False}
        assert len(scores) == 2
        assert all(math.isfinite(s) for row in scores for s in row)


def scaled(fused):
    model, o, ensemble = make(interval=3, options={"fused": fused})
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step in range(8):
        x, y = batch(dist.get_rank(), step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = ((model(x) - y) ** 2).mean()
        o.zero_grad()
        scaler.scale(loss).backward()
        if step == 2 and dist.get_rank() == 1:
            model.module.outer.weight.grad.fill_(math.inf)  # too late for the others: they must skip as well
        if step == 2:
            dist.all_reduce(model.module.outer.weight.grad)
        scaler.step(o)
        scaler.update()
        ensemble.step(loss)
    finite = all(p.isfinite().all() for p in model.parameters())
    step = ensemble.state_dict()["progress"]["step"]
    ensemble.finish()
    return finite, step, all_equal(model.parameters())


def seen_within_autocast(folder):
    """Whether a forward pass sees the weights as they are after each of these, within an autocast that stays open."""
    model, o, ensemble = make(optimizer=optim.SGD)
    parts = {"model": model, "optimizer": o, "ensemble": ensemble}
    x, _ = batch(0, 0)
    seen, outputs = {}, []

    def look(after):
        output = model.module(x)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            seen[after] = torch.equal(output, model.module(x))
        outputs.append(output)

    train(model, o, ensemble, 2)
    hdet.save(folder, parts)
    with torch.autocast("cpu", torch.bfloat16):
        look("nothing")
        with ensemble.consensus():
            look("entering consensus()")
        look("leaving consensus()")
        ensemble.converge()
        look("converge()")
        hdet.load(folder, parts)
        look("load()")
        hdet.warm_init(model, 0.1)
        look("warm_init()")
    ensemble.close()
    return seen, all(not torch.equal(a, b) for a, b in itertools.pairwise(outputs))


def test_autocast_sees_weights_that_change_while_it_is_open(tmp_path):
    for seen, moved in run(seen_within_autocast, 2, tmp_path):
        assert seen == dict.fromkeys(seen, True)
        assert moved


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_skips_on_all_replicas_alike(fused):
    # a skipped step calls no hook, but fused optimizers skip inside the step
    assert run(scaled, 2, fused) == [(True, 8 if fused else 7, True)] * 2


def closed_over():
    results = []
    for closed in (False, True):
        model, o, ensemble = make(interval=2)
        for step in range(4):
            x, y = batch(dist.get_rank(), step)

            def closure(model=model, o=o, x=x, y=y):
                o.zero_grad()
                loss = ((model(x) - y) ** 2).mean()
                loss.backward()
                return loss

            loss = o.step(closure) if closed else closure()
            if not closed:
                o.step()
            ensemble.step(loss)
        results.append(flat(model.parameters()))
    return torch.equal(*results)


def test_closures_train_the_same():
    assert run(closed_over, 2) == [True, True]


def compiled():
    torch._dynamo.config.suppress_errors = False
    results = []
    for compile_ in (False, True):
        torch.manual_seed(0)
        net = Net()
        model = DistributedDataParallel(torch.compile(net, backend="eager") if compile_ else net)
        o = optim.AdamW(model.parameters(), lr=0.01)
        ensemble = hdet.Ensemble(o, interval=2, model=model)
        train(model, o, ensemble, 4)
        assert all_equal(model.parameters())
        results.append(flat(model.parameters()))
    return (results[0] - results[1]).abs().max().item()


def test_compiled_modules_see_the_average():
    assert all(difference < 1e-6 for difference in run(compiled, 2))


def sparse(kind):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.EmbeddingBag(20, 4, sparse=True, mode="sum"))
    o = kind(model.parameters(), lr=0.1)
    ensemble = hdet.Ensemble(o, [hdet.learning_rate(o, spread=0.5)], interval=2)
    g = torch.Generator().manual_seed(dist.get_rank())
    for step in range(4):
        o.zero_grad()
        loss = model(torch.randint(0, 20, (5, 3), generator=g)).pow(2).mean()
        loss.backward()
        assert model.module.weight.grad.is_sparse
        o.step()
        ensemble.step(loss)
        assert all_equal(model.parameters()) is (step % 2 == 1)


@pytest.mark.parametrize("kind", [optim.SGD, optim.SparseAdam, optim.Adagrad])
def test_sparse_gradients(kind):
    run(sparse, 2, kind)


def late_group():
    model, o, ensemble = make(interval=3)
    extra = nn.Parameter(torch.ones(3))
    for step in range(3):
        if step == 1:
            o.add_param_group({"params": [extra], "lr": 0.1})
        o.zero_grad()
        x, y = batch(dist.get_rank(), step)
        ((model(x) - y) ** 2).mean().backward()
        extra.grad = torch.ones(3)
        o.step()
        if step == 1:
            assert not all_equal([extra])
        ensemble.step()
    return all_equal([extra]), extra[0].item() != 1.0


def test_groups_added_later_are_averaged():
    assert run(late_group, 2) == [(True, True)] * 2


def frozen_in_mid_round():
    model, o, ensemble = make(interval=3, optimizer=optim.SGD)
    train(model, o, ensemble, 1)
    model.module.outer.weight.requires_grad_(False)
    assert not all_equal([model.module.outer.weight])
    ensemble.converge()
    return all_equal([model.module.outer.weight])


def test_a_parameter_frozen_in_mid_round_is_averaged_once_more():
    assert run(frozen_in_mid_round, 2) == [True, True]


# the process group


def on_a_subgroup():
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    o = optim.SGD(model.parameters(), lr=0.1)
    rates = [hdet.learning_rate(o, spread=0.5)]
    ensemble = hdet.Ensemble(o, rates, interval=1, replicas=groups[rank // 2])
    assert (ensemble.replicas.rank, ensemble.replicas.size) == (rank % 2, 2)
    for p in model.parameters():
        p.grad = torch.full_like(p, 1.0 + rank // 2)
    o.step()
    ensemble.step()
    result = model.weight.detach().clone()
    ensemble.close()
    return result


def test_replicas_can_be_a_part_of_the_ranks():
    a, b, c, d = run(on_a_subgroup, 4)
    assert torch.equal(a, b)
    assert torch.equal(c, d)
    assert not torch.equal(a, c)


# disagreement


def disagreeing(kind):
    """What was the same when the ensemble was made, and is not any more. The start: test_agreement.py."""
    rank = dist.get_rank()
    net = nn.Linear(6, 2)
    o = optim.SGD(net.parameters(), lr=0.1)
    ensemble = hdet.Ensemble(o, [hdet.learning_rate(o, spread=0.5)], interval=1)
    if rank == 1 and kind == "step":
        ensemble.start_from(5)
    elif rank == 1 and kind == "tensors":
        o.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    elif rank == 1 and kind == "options":
        object.__setattr__(ensemble.engine.run.settings, "seed", 1)  # what is given is frozen
    elif rank == 1 and kind == "base":
        o.param_groups[0]["lr"] = 0.2
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    o.step()
    before = flat(net.parameters())
    with pytest.raises(RuntimeError) as caught:
        ensemble.step()
    assert torch.equal(before, flat(net.parameters()))
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("base", r"the base of learning_rate: 0\.1 on replica 0, 0\.2 on replica 1"),
        ("tensors", "the tensors to average"),
        ("options", "the ensemble's options"),
        ("step", "the step: 1 on replica 0, 6 on replica 1"),
    ],
)
def test_replicas_that_disagree_all_raise_the_same_before_anything_is_averaged(kind, match):
    first, second = run(disagreeing, 2, kind)
    assert first == second
    assert f"disagree on {match}".replace("\\", "") in first


# saving and resuming


def save_at_a_rounds_end(folder):
    model, o, ensemble = make(controller=hdet.controllers.Softmax(temperature=0.05), total_steps=20)
    train(model, o, ensemble, 8)
    state = {"model": model.module.state_dict(), "optimizer": o.state_dict(), "ensemble": ensemble.state_dict()}
    if dist.get_rank() == 0:
        torch.save(state, f"{folder}/state.pt")
    dist.barrier()
    ensemble.finish()


def resume_from_one_file(folder):
    state = torch.load(f"{folder}/state.pt", weights_only=True)
    model, o, ensemble = make(controller=hdet.controllers.Softmax(temperature=0.05), total_steps=20)
    model.module.load_state_dict(state["model"])
    o.load_state_dict(state["optimizer"])
    ensemble.load_state_dict(state["ensemble"])
    scale = ensemble.scales["learning_rate"]
    multiplier = ensemble.multipliers["learning_rate"]
    train(model, o, ensemble, 4, first=8)
    assert all_equal(model.parameters())
    ensemble.finish()
    return scale, multiplier


def test_one_file_of_a_rounds_end_loads_on_any_number_of_replicas(tmp_path):
    run(save_at_a_rounds_end, 4, str(tmp_path))
    for size in (2, 4, 8):
        results = run(resume_from_one_file, size, str(tmp_path))
        assert len({scale for scale, _ in results}) == 1
        assert results[0][0] != 1.0
        multipliers = sorted(m for _, m in results)
        assert multipliers == pytest.approx(slots.multipliers(size, 0.3))


def mid_round_state():
    model, o, ensemble = make(interval=4)
    train(model, o, ensemble, 2)
    state = ensemble.state_dict()
    ensemble.finish()
    return state


def test_a_mid_round_state_is_refused_elsewhere_with_the_remedy():
    states = run(mid_round_state, 4)
    assert [s["mid_round"]["replica"] for s in states] == [0, 1, 2, 3]
    for rank, size in ((0, 2), (0, 8), (1, 4)):
        with pretended(rank, size):
            o = optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
            ensemble = hdet.Ensemble(o, [hdet.learning_rate(o, spread=0.3)], interval=4)
            with pytest.raises(ValueError, match=r"replica 0 of 4.*ensemble\.converge\(\)"):
                ensemble.load_state_dict(states[0])


@pytest.mark.parametrize("bad", [None, {}, {"version": 99}, []])
def test_a_state_that_is_none_of_ours_is_refused(bad):
    o = optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ValueError, match="state_dict must come from"):
        hdet.Ensemble(o, interval=4).load_state_dict(bad)


# warnings and errors


def saved_in_mid_round():
    model, o, ensemble = make()
    train(model, o, ensemble, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with ensemble.consensus():
            model.state_dict()
        assert not caught
        model.state_dict()
        model.module.state_dict()
    ensemble.finish()
    return [str(w.message) for w in caught]


def test_saving_in_mid_round_warns_once():
    for texts in run(saved_in_mid_round, 2):
        assert len(texts) == 1
        assert "ensemble.consensus()" in texts[0]


def test_one_replica_is_plain_training_with_a_warning():
    torch.manual_seed(0)
    plain, ours = Net(), Net()
    ours.load_state_dict(plain.state_dict())
    optimizers = [optim.AdamW(m.parameters(), lr=0.01) for m in (plain, ours)]
    ensemble = hdet.Ensemble(optimizers[1], interval=2, model=ours, controller=hdet.controllers.Softmax())
    with pytest.warns(UserWarning, match="only one replica"):
        for step in range(5):
            x, y = batch(0, step)
            for m, o in zip((plain, ours), optimizers, strict=True):
                o.zero_grad()
                loss = ((m(x) - y) ** 2).mean()
                loss.backward()
                o.step()
            ensemble.step(loss)
    assert not ensemble.mid_round
    assert torch.equal(flat(plain.parameters()), flat(ours.parameters()))
    with ensemble.consensus():
        pass


class Wrapper:
    """As Accelerate's: an optimizer without hook tables around one that has them."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def test_a_wrapper_is_unwrapped_and_anything_else_refused():
    o = optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    rates = hdet.learning_rate(Wrapper(o), spread=0.1)
    hdet.Ensemble(Wrapper(o), [rates], interval=2)
    assert o._optimizer_step_pre_hooks == {}  # dropped at once, and gone
    for bad in (object(), None, nn.Linear(1, 1)):
        with pytest.raises(TypeError, match="pass the torch optimizer that it wraps"):
            hdet.Ensemble(bad, interval=2)


def test_steps_that_are_never_seen_are_an_error():
    with pretended():
        o = optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        ensemble = hdet.Ensemble(o, interval=2)
        for _ in range(99):
            ensemble.step(1.0)
        with pytest.raises(RuntimeError, match="no optimizer step was seen in 100 calls"):
            ensemble.step(1.0)


def test_after_close_steps_are_plain_and_never_an_error():
    with pretended():
        p = nn.Parameter(torch.ones(1))
        o = optim.SGD([p], lr=0.1)
        ensemble = hdet.Ensemble(o, [hdet.learning_rate(o, spread=0.5)], interval=2)
        ensemble.close()
        for _ in range(120):
            p.grad = torch.ones(1)
            o.step()
            ensemble.step(1.0)
        assert p.item() == pytest.approx(1 - 120 * 0.1, rel=1e-4)
        assert ensemble.multipliers == ensemble.scales == {"learning_rate": 1.0}
        for call in (ensemble.converge, ensemble.finish, ensemble.consensus().__enter__):
            with pytest.raises(RuntimeError, match="closed"):
                call()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"spread": 0.0, "controller": hdet.controllers.Softmax()}, "Softmax has no effect, as nothing is explored"),
        ({"spread": 0.0, "probe": len, "total_steps": 9, "controller": hdet.Auto()}, "Auto has no effect, as nothing"),
        ({"spread": 0.0, "probe": len, "controller": hdet.controllers.LineSearch()}, "LineSearch has no effect"),
        ({"observe_only": True}, "observe_only=True has no effect"),
        ({"controller": hdet.controllers.Softmax(warmup_steps=50), "total_steps": 50}, "Softmax never acts"),
        ({"controller": hdet.controllers.Softmax(warmup_steps=9), "total_steps": 10, "interval": 4}, "ends at step 8"),
    ],
)
def test_arguments_without_effect_warn(options, match, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")  # the replicas come later
    o = optim.SGD(parameters_of(), lr=0.1)
    rate = hdet.learning_rate(o, spread=options.pop("spread", 0.1))
    with pytest.warns(UserWarning, match=match):
        hdet.Ensemble(o, [rate], **{"interval": 5, **options})


@pytest.mark.parametrize(
    "options",
    [
        {"probe": len, "total_steps": 9},  # nobody has asked for Auto
        {"probe": len, "total_steps": 900, "controller": hdet.Auto(finds=False, outer_step=0.5)},
    ],
)
def test_without_a_spread_what_nobody_asked_to_search_is_silent(options):
    o = optim.SGD(parameters_of(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hdet.Ensemble(o, [hdet.learning_rate(o, spread=0.0)], **options)


def test_resuming_without_a_state_and_beyond_the_end():
    with pretended():
        p = nn.Parameter(torch.ones(1))
        p.grad = torch.ones(1)
        o = optim.SGD([p], lr=0.1)
        past = hdet.Ensemble(o, interval=4, total_steps=10)
        past.start_from(12)
        assert past.multipliers == {"learning_rate": 1.0}
        finished = past.state_dict()
        past.close()
        longer = hdet.Ensemble(o, interval=4, total_steps=20)
        longer.load_state_dict(finished)
        assert longer.multipliers["learning_rate"] != 1.0
        longer.close()
        middle = hdet.Ensemble(o, interval=4)
        middle.start_from(7)
        assert not middle.mid_round
        assert "mid_round" not in middle.state_dict()
        o.step()
        middle.engine.count()
        assert middle.mid_round
        assert not middle.engine.run.rounds.full  # three of its four steps were taken elsewhere


def test_the_base_of_a_joint_learning_rate_is_that_of_one_group():
    with pretended():
        parameters = parameters_of(2)
        o = optim.SGD([{"params": [p]} for p in parameters], lr=0.1)
        o.param_groups[0]["lr"] = 0.0
        ensemble = hdet.Ensemble(o, interval=4)
        o.step()
        o.param_groups[0]["lr"], o.param_groups[1]["lr"] = 5.0, 0.09
        seen = ensemble.engine.phase(Control).observe()["learning_rate"]
        assert (seen.base, seen.next_base) == (0.1, 0.09)


def parameters_of(n=1):
    return [nn.Parameter(torch.ones(2)) for _ in range(n)]


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"interval": 0}, ValueError, "interval must be at least 1"),
        ({"interval": -3}, ValueError, "interval must be at least 1"),
        ({"interval": 2.0}, TypeError, "interval must be an int"),
        ({"interval": True}, TypeError, "interval must be an int"),
        ({"interval": "often"}, TypeError, "interval must be an int"),
        ({"interval": "auto"}, ValueError, "needs total_steps"),
        ({"interval": 1, "total_steps": 0}, ValueError, "total_steps must be at least 1"),
        ({"interval": 1, "total_steps": 1.5}, TypeError, "total_steps must be an int"),
        ({"interval": 1, "averaging": 0.5}, TypeError, r"averaging must be an hdet\.Averaging.*Averaging\(outer_step"),
        ({"interval": 1, "safety": True}, TypeError, r"safety must be an hdet\.Safety.*hdet\.Safety\(guard=True\)"),
        ({"interval": 1, "replicas": 3}, TypeError, "replicas must be a process group or a DeviceMesh, got 3"),
        ({"interval": 1, "observe_only": 1}, TypeError, "observe_only must be True or False, got 1"),
        ({"interval": 1, "hyperparameters": ["lr"]}, TypeError, "hyperparameters must hold"),
        ({"interval": 1, "model": nn.Linear(2, 2)}, ValueError, "model must be the one that the optimizer trains"),
        ({"interval": 1, "model": 3}, TypeError, "model must be a torch.nn.Module"),
        ({"interval": 1, "on_round": [3]}, TypeError, "on_round must hold callables"),
        (
            {"interval": 1, "controller": hdet.controllers.Softmax},
            TypeError,
            r"controller=hdet.controllers.Softmax\(\)",
        ),
    ],
)
def test_bad_arguments(options, error, match):
    with pytest.raises(error, match=match):
        hdet.Ensemble(optim.SGD(parameters_of(), lr=0.1), **options)


@pytest.mark.parametrize("step", [-1, 1.5])
def test_a_step_to_start_from_that_cannot_be(step):
    ensemble = hdet.Ensemble(optim.SGD(parameters_of(), lr=0.1), interval=1)
    with pytest.raises((TypeError, ValueError), match="step must be"):
        ensemble.start_from(step)


def test_bad_hyperparameters():
    o, other = optim.SGD(parameters_of(), lr=0.1), optim.SGD(parameters_of(), lr=0.1)
    joint, each = hdet.learning_rate(o), hdet.learning_rate(o, per_group=True)
    with pytest.raises(ValueError, match="both explore 'lr'"):
        hdet.Ensemble(o, [joint, each], interval=1)
    with pytest.raises(ValueError, match="two hyperparameters are named"):
        hdet.Ensemble(o, [joint, joint], interval=1)
    with pytest.raises(ValueError, match="pass every optimizer"):
        hdet.Ensemble(other, [joint], interval=1)
    for bad in (1.0, -0.1, math.nan):
        with pytest.raises(ValueError, match="spread must"):
            hdet.learning_rate(o, spread=bad)


def test_interval_auto():
    o = optim.SGD(parameters_of(), lr=0.1)
    for total, expected in ((100, 1), (10_000, 50), (10**6, 1000)):
        assert hdet.Ensemble(o, total_steps=total).interval == expected
    with pytest.warns(UserWarning, match="longer than the run"):
        hdet.Ensemble(o, total_steps=5, interval=10)


def test_lbfgs_is_refused_with_a_spread_and_allowed_without():
    o = optim.LBFGS(parameters_of(), lr=0.1)
    with pytest.raises(ValueError, match="LBFGS cannot be used with a spread"):
        hdet.Ensemble(o, interval=1)
    hdet.Ensemble(o, [hdet.learning_rate(o, spread=0.0)], interval=1)


def sharded(kind):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    if kind == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    elif kind == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer
    else:
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(model, use_orig_params=kind == "fsdp1_orig", device_id=torch.device("cpu"))
    if kind == "zero":
        o = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.1)
    else:
        o = optim.SGD(model.parameters(), lr=0.1)
    hdet.Ensemble(o, [hdet.learning_rate(o, spread=0.0)], interval=1)
    with pytest.raises(ValueError, match="so replicas cannot diverge") as caught:
        hdet.Ensemble(o, interval=1)
    with pytest.raises(ValueError, match="so replicas cannot diverge"):
        hdet.OneCycleAutoLR(
            o, 0.1, total_steps=10, ensemble_lr_spread_ratio=0.1, model_sync_interval=2, cycle_momentum=False
        )
    return str(caught.value)


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1", "fsdp1_orig", "zero"])
def test_sharded_parameters_are_refused(kind):
    for text in run(sharded, 2, kind):
        assert "spread 0" in text


def risen_to_its_bound(controller, tie):
    """Schedules that lead a rate to its bound and back: the scales, and the values and multipliers of all replicas."""
    torch.manual_seed(0)
    model = hdet.data_parallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rate = hdet.learning_rate(optimizer, spread=0.3, bounds=(0, 0.1))
    records, trained = [], []
    ensemble = hdet.Ensemble(
        optimizer, [rate], total_steps=60, interval=4, controller=controller, model=model, on_round=[records.append],
        probe=(lambda index: 1.0) if tie else None,
    )  # fmt: skip
    optimizer.register_step_pre_hook(lambda o, args, kwargs: trained.append(o.param_groups[0]["lr"]))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=61)
    for step in range(60):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        ensemble.step(loss)
    return [record.hyperparameters["learning_rate"] for record in records], trained


@pytest.mark.parametrize(
    ("controller", "tie"),
    [(hdet.controllers.Fixed(), False), (hdet.controllers.Slope(), True), (hdet.controllers.Softmax(), True)],
)
def test_a_bound_cuts_values_and_moves_no_scale(controller, tie):
    for rows, trained in hdet.in_process(risen_to_its_bound, 4, controller, tie):
        assert {row.scale for row in rows} == {1.0}
        assert max(trained) <= 0.1
        cut = [row for row in rows if 1.3 * row.center > 0.1]
        assert cut
        for row in cut:
            assert max(row.values) == pytest.approx(0.1, rel=1e-12)
            assert min(row.values) == pytest.approx(0.7 * row.center)


class Sees:
    """A controller that moves nothing and keeps what it is told."""

    needs_score = False

    def __init__(self, returned=1.0):
        self.returned, self.seen = returned, []

    def init(self, names):
        return {name: {"scale": 1.0} for name in names}

    def update(self, state, report):
        self.seen.append(report.observations["learning_rate"])
        return {name: {"scale": self.returned} for name in state}


def told_under_a_bound():
    controller = Sees()
    risen_to_its_bound(controller, False)
    return controller.seen


def test_controllers_are_told_what_was_trained_with():
    seen = hdet.in_process(told_under_a_bound, 4)[0]
    dealt = slots.multipliers(4, 0.3)
    cut = [row for row in seen if row.base * max(dealt) > 0.1]
    assert cut
    assert len(cut) < len(seen)
    for row in seen:
        most = min(0.1 / row.base, max(dealt))
        assert max(row.multipliers) == pytest.approx(most)
        assert sorted(row.multipliers)[:2] == pytest.approx([min(k, most) for k in sorted(dealt)[:2]])


@pytest.mark.parametrize(("vertex", "estimate"), [(0.05, 0.0), (0.2, math.log(4))])
def test_a_base_beyond_its_bound_is_told_as_the_bound(vertex, estimate):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    rate = hdet.learning_rate(optimizer, spread=2.0, ladder="log", bounds=(0.0, 0.1))
    rungs = (0.5, 0.8, 1.25, 2.0)
    steering = Steering(hdet.controllers.LineSearch(), ["learning_rate"])
    bases = [0.1 * 1.15**k for k in range(20)]
    for base, following in itertools.pairwise(bases):  # all rounds are alike: trained at the bound
        scale = steering.scales["learning_rate"]
        probe = tuple((v / vertex) ** 2 - 2 * v / vertex for v in rate.values_of(base, scale, rungs))
        seen = hdet.controllers.Observation(
            rate.steered(base, scale), rate.steered(following, scale), 0.0,
            rate.within_bounds([base], scale, rungs), limits=rate.limits(following, 4),
        )  # fmt: skip
        steering.update(hdet.controllers.Report(1, probe, {"learning_rate": seen}, 10_000, probe, 0.0))
        assert steering.scales["learning_rate"] == pytest.approx(1.0)  # above the limits, and nothing asks for less
    assert steering.confidence("learning_rate", 1.0).estimate == pytest.approx(estimate, abs=1e-9)


def test_one_scale_of_several_places_is_told_by_their_mean():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    rate = hdet.learning_rate(optimizer, spread=0.3, bounds=(0.0, 0.1))
    assert rate.within_bounds([0.1, 0.001], 1.0, (0.7, 1.21)) == pytest.approx((0.7, 1.1))
    assert rate.within_bounds([0.01, 0.001], 1.0, (0.7, 1.21)) == (0.7, 1.21)
    assert rate.within_bounds([0.0], 1.0, (0.7, 1.21)) == (0.7, 1.21)


def lost_its_way():
    model = hdet.data_parallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    records = []
    ensemble = hdet.Ensemble(
        optimizer, total_steps=8, interval=2, controller=Sees(math.nan), model=model, on_round=[records.append]
    )
    for _ in range(4):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        ensemble.step()
    ensemble.close()
    return [record.events for record in records]


def test_the_record_tells_of_a_controller_that_has_lost_its_way():
    for events in hdet.in_process(lost_its_way, 2):
        assert events[-1] == ("learning_rate: Sees asked for a scale of nan; it begins anew at 1",)


def test_bounds_hold_without_a_spread():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = []
    rates = [hdet.learning_rate(optimizer, spread=0.0, bounds=(0, 0.05))]
    ensemble = hdet.Ensemble(optimizer, rates, total_steps=10, interval=2)
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(o.param_groups[0]["lr"]))
    for lr in (0.02, 0.2):
        optimizer.param_groups[0]["lr"] = lr
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        ensemble.step()
    assert seen == [0.02, 0.05]
    assert optimizer.param_groups[0]["lr"] == 0.2


@pytest.mark.parametrize(("base", "coordinate"), [(0.0, None), (0.5, None), (0.0, "log")])
def test_a_scalar_at_its_bound_is_told_that_it_is_not_explored(base, coordinate):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    smoothing = hdet.scalar("label_smoothing", base, bounds=(0, 0.5), spread=0.5, coordinate=coordinate)
    with pytest.warns(UserWarning, match=f"label_smoothing is {base:g}, at its bound: in the .* coordinate every"):
        hdet.Ensemble(optimizer, [smoothing], total_steps=10, interval=2, gradients="local", model=model).close()


def searched_by_two(controller, per_group):
    model = hdet.data_parallel(nn.Linear(2, 1))
    groups = [{"params": [model.module.weight]}, {"params": [model.module.bias]}]
    optimizer = torch.optim.SGD(groups, lr=0.01)
    rates = [hdet.learning_rate(optimizer, spread=2.0, ladder="log", per_group=per_group)]
    ensemble = hdet.Ensemble(
        optimizer, rates, total_steps=10, interval=2, controller=controller, model=model, probe=lambda index: 1.0
    )
    model(torch.ones(1, 2)).sum().backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    ensemble.close()
    return [str(warning.message) for warning in caught if "three replicas" in str(warning.message)]


@pytest.mark.parametrize("controller", [hdet.controllers.LineSearch(), hdet.Auto()])
def test_two_replicas_are_too_few_for_a_line_search_by_group(controller):
    told = hdet.in_process(searched_by_two, 2, controller, True)
    assert sum(map(len, told)) >= 1
    assert not any(hdet.in_process(searched_by_two, 2, controller, False))
    assert not any(hdet.in_process(searched_by_two, 3, controller, True))


def test_a_close_that_fails_leaves_no_hook_behind(monkeypatch):
    model = nn.Linear(2, 1)
    ensemble = hdet.Ensemble(torch.optim.SGD(model.parameters(), lr=0.1), total_steps=4, model=model)
    assert model._state_dict_pre_hooks

    def fail():
        raise RuntimeError("the process group is gone")

    monkeypatch.setattr(ensemble.engine.run.rounds, "close", fail)
    with pytest.raises(RuntimeError, match="is gone"):
        ensemble.close()
    assert not model._state_dict_pre_hooks
