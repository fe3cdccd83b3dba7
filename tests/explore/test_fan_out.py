"""Fan-out within `optimizer.step()`: what the optimizer sees, and that the bases always come back."""

import copy
import pickle
import warnings

import pytest
import torch
from processes import run
from single import pretended
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet._hooks import WeakHook


def make(lr=0.1, spread=0.5, optimizer=optim.SGD, per_group=False, n=2):
    parameters = [nn.Parameter(torch.zeros(3)) for _ in range(n)]
    o = optimizer([{"params": [p]} for p in parameters], lr=lr)
    rate = hdet.learning_rate(o, spread=spread, per_group=per_group)
    ensemble = hdet.Ensemble(o, [rate], interval=1000)
    for p in parameters:
        p.grad = torch.ones(3)
    return parameters, o, ensemble


@pytest.mark.parametrize("rank", [0, 1])
def test_the_step_is_taken_with_this_replicas_value(rank):
    with pretended(rank):
        parameters, o, ensemble = make()
        multiplier = ensemble.multipliers["learning_rate"]
        assert multiplier in (0.5, 1.5)
        o.step()
        assert parameters[0].tolist() == pytest.approx([-0.1 * multiplier] * 3)
        assert [g["lr"] for g in o.param_groups] == [0.1, 0.1]


def test_groups_explored_on_their_own_have_their_own_slots():
    with pretended(0, 8):
        parameters, o, ensemble = make(per_group=True, n=6)
        o.step()
        taken = [-p[0].item() / 0.1 for p in parameters]
        assert taken == pytest.approx(list(ensemble.multipliers.values()))
        assert len({round(t, 6) for t in taken}) > 1


def test_nested_steps_apply_once_and_the_outer_step_keeps_its_value():
    seen = []

    class Outer(optim.SGD):
        def step(self, closure=None):
            seen.append(self.param_groups[0]["lr"])
            super().step(closure)
            seen.append(self.param_groups[0]["lr"])

    make(optimizer=optim.SGD)  # gives the parent class its own hooks
    with pretended():
        parameters, o, ensemble = make(optimizer=Outer)
        o.step()
        value = 0.1 * ensemble.multipliers["learning_rate"]
        assert seen == [value, value]
        assert parameters[0][0].item() == pytest.approx(-value)
        assert o.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("as_keyword", [False, True])
def test_a_closure_works_and_one_that_raises_restores_the_bases(as_keyword):
    def bad():
        raise KeyError("on purpose")

    def call(o, closure):
        return o.step(closure=closure) if as_keyword else o.step(closure)

    with pretended():
        parameters, o, ensemble = make()
        with pytest.raises(KeyError, match="on purpose"):
            call(o, bad)
        assert [g["lr"] for g in o.param_groups] == [0.1, 0.1]
        assert call(o, lambda: torch.tensor(4.0)) == 4.0
        value = 0.1 * ensemble.multipliers["learning_rate"]
        assert parameters[0][0].item() == pytest.approx(-value)
        assert o.param_groups[0]["lr"] == 0.1


class Fragile(optim.SGD):
    """Raises in the middle of a step when told to, as running out of memory does."""

    broken = False

    def step(self, closure=None):
        if self.broken:
            raise ValueError("on purpose")
        super().step(closure)


@pytest.mark.parametrize("recursive", [False, True])
def test_after_a_step_that_raised_the_fan_out_goes_on(recursive):
    make(optimizer=optim.SGD)  # gives the parent class its own hooks, so that steps nest
    with pretended():
        parameters, o, ensemble = make(optimizer=Fragile)
        schedule = (
            optim.lr_scheduler.ExponentialLR(o, 0.5) if recursive else optim.lr_scheduler.LambdaLR(o, lambda e: 0.5**e)
        )
        multiplier = ensemble.multipliers["learning_rate"]
        taken = []
        for step in range(5):
            o.broken = step == 1
            before = parameters[0][0].item()
            if o.broken:
                with pytest.raises(ValueError, match="on purpose"):
                    o.step()
                assert o.state_dict()["param_groups"][0]["lr"] == 0.05
                continue
            o.step()
            taken.append(before - parameters[0][0].item())
            assert o.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5 ** len(taken[:-1]))
            schedule.step()
            ensemble.step()
        assert taken == pytest.approx([multiplier * 0.1 * 0.5**k for k in range(4)], rel=1e-5)


def test_a_value_written_after_a_step_that_raised_is_kept():
    with pretended():
        _, o, ensemble = make(optimizer=Fragile)
        o.broken = True
        with pytest.raises(ValueError, match="on purpose"):
            o.step()
        o.param_groups[0]["lr"] = 0.7
        ensemble.restore_bases()
        assert [g["lr"] for g in o.param_groups] == [0.7, 0.1]


def test_saving_within_a_closure_gives_the_bases_and_leaves_the_step_alone():
    with pretended():
        parameters, o, ensemble = make()
        saved = []
        o.step(lambda: saved.append(o.state_dict()) or torch.tensor(1.0))
        assert [g["lr"] for g in saved[0]["param_groups"]] == [0.1, 0.1]
        assert parameters[0][0].item() == pytest.approx(-0.1 * ensemble.multipliers["learning_rate"])


def test_a_second_ensemble_on_the_same_learning_rate_is_refused():
    with pretended():
        _, o, ensemble = make()
        with pytest.raises(ValueError, match=r"another ensemble explores 'lr'.*close\(\)"):
            hdet.Ensemble(o, interval=3)
        hdet.Ensemble(o, [hdet.learning_rate(o, spread=0.0)], interval=3)
        ensemble.close()
        hdet.Ensemble(o, interval=3)


def test_steps_are_counted_not_calls():
    with pretended():
        _, o, ensemble = make()
        for _ in range(3):
            for _ in range(4):
                o.step()
            ensemble.step()
        assert ensemble.state_dict()["progress"]["step"] == 12


def test_groups_that_share_one_tensor_learning_rate_do_not_disturb_each_other():
    shared = torch.tensor(0.1)
    with pretended(0, 8):
        parameters, o, ensemble = make(lr=shared, per_group=True, n=4)
        o.step()
        taken = [-p[0].item() / 0.1 for p in parameters]
        assert taken == pytest.approx(list(ensemble.multipliers.values()), rel=1e-6)
        assert all(g["lr"] is shared for g in o.param_groups)
        assert shared.item() == pytest.approx(0.1)


def test_loading_optimizer_state_in_mid_run_is_fine():
    with pretended():
        parameters, o, ensemble = make()
        o.step()
        state = o.state_dict()
        assert state["param_groups"][0]["lr"] == 0.1
        o.load_state_dict(state)
        o.step()
        value = 0.1 * ensemble.multipliers["learning_rate"]
        assert parameters[0][0].item() == pytest.approx(-2 * value)
        assert o.param_groups[0]["lr"] == 0.1


def test_close_removes_every_hook_and_so_does_dropping_the_ensemble():
    def tables(o):
        return o._optimizer_step_pre_hooks, o._optimizer_step_post_hooks, o._optimizer_state_dict_post_hooks

    with pretended():
        model = nn.Linear(2, 2)
        o = optim.SGD(model.parameters(), lr=0.1)
        ensemble = hdet.Ensemble(o, interval=10, model=model)
        assert all(tables(o))
        assert model._state_dict_pre_hooks
        ensemble.close()
        assert not any(tables(o))
        assert not model._state_dict_pre_hooks
        ensemble = hdet.Ensemble(o, interval=10, model=model)
        del ensemble  # no reference cycle: gone at once
        assert not any(tables(o))
        assert not model._state_dict_pre_hooks


def test_models_with_hooks_can_be_copied_and_pickled():
    model = nn.Linear(2, 2)
    o = optim.SGD(model.parameters(), lr=0.1)
    ensemble = hdet.Ensemble(o, interval=10, model=model)
    pickle.loads(pickle.dumps(model)).state_dict()
    copy.deepcopy(model).state_dict()
    copy.deepcopy(o).step()
    assert WeakHook(None)() is None
    ensemble.close()


def test_a_new_group_is_explored_along_with_the_joint_learning_rate():
    with pretended():
        _, o, ensemble = make()
        late = nn.Parameter(torch.zeros(1))
        late.grad = torch.ones(1)
        o.add_param_group({"params": [late], "lr": 0.2})
        o.step()
        assert late.item() == pytest.approx(-0.2 * ensemble.multipliers["learning_rate"])


# A forgotten ensemble.step()


def forgetful(kind, forgets_at):
    """How many optimizer steps went through before it was named, and how: nobody calls step() from `forgets_at` on."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1))
    first, second = (optim.SGD([p], lr=0.01) for p in model.parameters())
    optimizers = [first, second]
    if kind == "drop-in":
        both = optimizers = [optim.SGD(model.parameters(), lr=0.01)]
        scheduler = hdet.OneCycleAutoLR(both[0], 0.1, total_steps=400, ensemble_lr_spread_ratio=0.2, model=model)
        ensemble, advance = scheduler.ensemble, scheduler.step
    else:
        local = {"gradients": "local"} if kind == "local" else {}
        rollback = {"safety": hdet.Safety(rollback=hdet.Rollback())} if kind == "rollback" else {}
        explored = [hdet.learning_rate(optimizers, spread=0.0 if kind in ("plain", "local", "rollback") else 0.2)]
        ensemble = hdet.Ensemble(optimizers, explored, interval=10, model=model, **local, **rollback)
        advance = ensemble.step
    taken, loss, warned = 0, None, []
    try:
        for step in range(1300):
            loss = model(torch.ones(4, 3)).square().mean()
            loss.backward()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            warned += [(taken - forgets_at, str(w.message)) for w in caught if "without a call" in str(w.message)]
            taken += 1
            if step < forgets_at:
                advance(loss)
            if kind == "finished" and step == forgets_at:
                ensemble.finish()
    except RuntimeError as error:
        weights = [p.tolist() for p in model.parameters()]
        ensemble.converge()  # what was trained is not lost
        assert ensemble.progress["step"] == taken
        return warned, (taken - forgets_at, str(error)), weights
    return warned, None, [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize("forgets_at", [0, 25])
@pytest.mark.parametrize("kind", ["ensemble", "drop-in", "local", "rollback"])
def test_a_forgotten_step_is_named_on_all_replicas_alike(kind, forgets_at):
    (warned, raised, weights), other = run(forgetful, 2, kind, forgets_at)
    assert other[:2] == (warned, raised)
    ((taken, said),) = warned
    assert taken == 36
    assert said.startswith("36 optimizer steps were taken without a call of ensemble.step()")
    assert "call ensemble.step(loss) after each optimizer.step() (with OneCycleAutoLR, scheduler.step(loss))" in said
    if forgets_at:  # whoever has called it may have reasons
        assert raised is None
    else:
        assert 1000 <= raised[0] < 1300
        assert raised[1] == said.replace("36", str(raised[0]), 1)
    if kind in ("ensemble", "drop-in"):
        assert weights != other[2]


@pytest.mark.parametrize("kind", ["plain", "finished"])
def test_nothing_is_forgotten_where_nothing_is_averaged(kind):
    assert [told[:2] for told in run(forgetful, 2, kind, 3)] == [([], None)] * 2


def test_several_steps_to_a_call_are_no_mistake():
    """A discriminator that steps five times as often, and as many again in its own warm-up."""
    critic, actor = (optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1) for _ in range(2))
    ensemble = hdet.Ensemble([critic, actor], [hdet.learning_rate([critic, actor], spread=0.2)], interval=10)
    for round_number in range(20):
        for _ in range(1500 if round_number == 0 else 5):
            critic.step()
        actor.step()
        ensemble.step(1.0)
    assert ensemble.progress["step"] == 1500 + 19 * 5


def test_steps_of_a_measurement_and_of_saving_do_not_count():
    p = nn.Parameter(torch.ones(2))
    optimizer = optim.SGD([p], lr=0.1)
    ensemble = hdet.Ensemble(optimizer, [hdet.learning_rate(optimizer, spread=0.2)], interval=10)
    with ensemble.saving():
        for _ in range(100):
            optimizer.step()
    optimizer.step()
    ensemble.step(1.0)
    assert ensemble.progress["step"] == 1


def test_one_batch_of_a_host_may_be_many_steps():
    """As reinforcement learning with Lightning's manual optimization has it; the callback calls step() itself."""
    from hdet.integrations.hosted import Hosted

    model = nn.Linear(2, 1)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    explored = [hdet.learning_rate(optimizer, spread=0.2)]
    ensemble = Hosted(explored, {"interval": 10}).start([optimizer], model, None, lambda numbers, record: None)
    for _ in range(320):
        optimizer.step()
    ensemble.step(1.0)
    assert ensemble.progress["step"] == 320
