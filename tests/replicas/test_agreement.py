"""Agreement before the first step: whatever is wrong or different on one replica is said alike by all of them."""

import contextlib
import copy
import dataclasses
import datetime
import json
import math
import os
import pathlib
import socket
import sys
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from processes import ReplicaError, initialise_gloo, run
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet._replicas.agreement import alike
from hdet._replicas.fingerprint import fingerprint, plain
from hdet._replicas.store import who

ODD = 2
SECONDS = 2.0


class Net(nn.Module):
    def __init__(self, width=3, order="ab"):
        super().__init__()
        for name in order:
            setattr(self, name, nn.Linear(width, 2))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x):
        return self.a(x) + self.b(x)


def loss_of(model, batch):
    return model(batch).square().mean()


def probe(**options):
    return hdet.Probe(torch.ones(8, 3), loss_of, **options)


def ensemble(*, net=None, kind=optim.AdamW, groups=1, spread=0.3, explored=None, change=None, rate=1e-3, **options):
    """An ensemble; on the odd replica with something else."""
    net = net or Net()
    if change is not None:
        change(net)
    halves = [{"params": list(m.parameters())} for m in (net.a, net.b)]
    given = options.pop("optimizer_options", {})
    o = kind(net.parameters() if groups == 1 else halves, lr=rate, **given)
    what = [hdet.learning_rate(o, spread=spread)] if explored is None else explored(o)
    return hdet.Ensemble(o, what, **{"total_steps": 100, "interval": 5, "model": net, **options})


def one_cycle(max_lr=1e-3, **options):
    o = optim.SGD(Net().parameters(), lr=0.1)
    if options.get("last_epoch", -1) > 0:  # as a loaded state would have it
        for group in o.param_groups:
            group |= {"initial_lr": 4e-5, "max_lr": 1e-3, "min_lr": 4e-9, "max_momentum": 0.95, "base_momentum": 0.85}
    given = {"total_steps": 100, "ensemble_lr_spread_ratio": 0.1, "model_sync_interval": 5, **options}
    return hdet.OneCycleAutoLR(o, max_lr, **given)


def find_lr(rate=0.1, **options):
    net = DistributedDataParallel(Net())
    o = optim.SGD(net.parameters(), lr=rate)
    step = lambda index: loss_of(net, torch.ones(2, 3)).backward()  # noqa: E731
    return hdet.find_lr(net, o, step, **{"probe": probe(), **options})


def warm_init(noise=0.01, **options):
    hdet.warm_init(Net(), noise, unwrapped=True, **options)


def freeze(net):
    net.a.bias.requires_grad_(False)


def halve(net):
    net.b.to(torch.bfloat16)


def other_torch():
    torch.__version__ = "2.99.0"
    try:
        ensemble()
    finally:
        torch.__version__ = VERSION


VERSION = torch.__version__
LINEAR = lambda o: [hdet.learning_rate(o, spread=0.3)]  # noqa: E731
TWO = lambda o: [hdet.learning_rate(o, spread=0.3), hdet.weight_decay(o, spread=0.3)]  # noqa: E731
LOG = lambda o: [hdet.learning_rate(o, spread=1.3, ladder="log")]  # noqa: E731
DECAY = lambda o: [hdet.weight_decay(o, spread=0.3)]  # noqa: E731

# Each: what is called, its arguments on all replicas but one, those on that one, and what all of them say.
KINDS = {
    "seed": (ensemble, {}, {"seed": 5}, "seed: 5 on replica 2, but 0 on the others"),
    "interval": (ensemble, {}, {"interval": 6}, "interval: 6 on replica 2, but 5"),
    "total steps": (ensemble, {}, {"total_steps": None}, "total_steps: None on replica 2, but 100"),
    "controller": (ensemble, {}, {"controller": hdet.controllers.Softmax()}, "controller: Softmax("),
    "its option": (
        ensemble, {"controller": hdet.controllers.Softmax()},
        {"controller": hdet.controllers.Softmax(momentum=0.5)}, "momentum=0.5",
    ),
    "observing only": (ensemble, {}, {"observe_only": True}, "observe_only: True on replica 2, but False"),
    "spread": (ensemble, {}, {"spread": 0.0}, "learning_rate: InGroups(0.0,"),
    "ladder": (ensemble, {}, {"explored": LOG}, "learning_rate: InGroups(1.3, log"),
    "what is explored": (ensemble, {"explored": LINEAR}, {"explored": TWO}, "weight_decay: InGroups("),
    "nothing in common": (ensemble, {"explored": LINEAR}, {"explored": DECAY}, "also on weight_decay"),
    "rate": (ensemble, {}, {"rate": 2e-3}, "lr of the optimizer's group 0: 0.002 on replica 2, but 0.001"),
    "optimizer": (ensemble, {}, {"kind": optim.Adam}, "the optimizer's class: Adam on replica 2, but AdamW"),
    "its options": (ensemble, {}, {"optimizer_options": {"betas": (0.8, 0.99)}}, "betas of the optimizer's group 0"),
    "groups": (ensemble, {}, {"groups": 2}, "parameter groups: [2, 2] on replica 2, but [4]"),
    "shape": (ensemble, {}, {"width": 4}, "parameter 0: a.weight float32 (2, 4) on cpu on replica 2"),
    "order": (ensemble, {}, {"order": "ba"}, "parameter 0: b.weight"),
    "dtype": (ensemble, {}, {"change": halve}, "parameter 2: b.weight bfloat16"),
    "frozen": (ensemble, {}, {"change": freeze}, "parameter 1: a.bias float32 (2,) on cpu frozen on replica 2"),
    "buffer": (ensemble, {}, {"change": lambda net: net.register_buffer("more", torch.ones(1))}, "buffer more"),
    "outer step": (
        ensemble, {}, {"averaging": hdet.Averaging(outer_step=0.5)}, "averaging.outer_step: 0.5 on replica 2, but 1.0",
    ),
    "tail": (
        ensemble, {"probe": probe()}, {"averaging": hdet.Averaging(tail=0.5)},
        "averaging.tail: 0.5 on replica 2, but 0.0",
    ),
    "state": (
        ensemble, {"gradients": "local"}, {"averaging": hdet.Averaging(state=False)},
        "averaging.state: False on replica 2, but True",
    ),
    "guard": (ensemble, {}, {"safety": hdet.Safety(guard=True)}, "safety.guard: True on replica 2, but False"),
    "rollback": (
        ensemble, {}, {"safety": hdet.Safety(rollback=True)}, "safety.rollback: Rollback(window=100",
    ),
    "limits": (
        ensemble, {}, {"safety": hdet.Safety(limits=hdet.Limits(2.0))}, "safety.limits: Limits(per_round=2.0",
    ),
    "atomic": (ensemble, {}, {"safety": hdet.Safety(atomic=True)}, "safety.atomic: True on replica 2, but False"),
    "gradients": (ensemble, {}, {"gradients": "local"}, "gradients: local on replica 2, but shared"),
    "probe": (ensemble, {"controller": hdet.controllers.Softmax()}, {"probe": probe()}, "probe: Probe("),
    "its seed": (ensemble, {"probe": probe()}, {"probe": probe(seed=1)}, "seed=1"),
    "design": (ensemble, {}, {"design": "turns"}, "design: turns on replica 2, but permutations"),
    "follower": (
        ensemble, {}, {"averaging": hdet.Averaging(followers=[torch.ones(3)])}, "tensor 0 of followers: float32 (3,)",
    ),
    "version": (ensemble, {}, None, "torch: 2.99.0 on replica 2"),
    "bad interval": (ensemble, {}, {"interval": 0}, "interval must be at least 1"),
    "bad model": (ensemble, {}, {"model": 7}, "model must be a torch.nn.Module"),
    "bad optimizer": (ensemble, {}, {"kind": optim.LBFGS, "rate": 1}, "LBFGS cannot be used with a spread"),
    "bad safety": (ensemble, {}, {"safety": hdet.Rollback()}, "safety must be an hdet.Safety"),
    "an option elsewhere": (ensemble, {}, {"rollback": 3}, "write safety=hdet.Safety(rollback=...)"),
    "an unforeseen error": (ensemble, {}, {"on_round": 7}, "'int' object is not iterable"),
    "one cycle's peak": (one_cycle, {}, {"max_lr": 2e-3}, "max_lr of the optimizer's group 0"),
    "one cycle's decay": (
        one_cycle, {"enable_auto_lr": True, "auto_lr_warmup_steps": 10},
        {"decay": "geometric"}, "decay: geometric on replica 2, but one_cycle",
    ),
    "one cycle's start": (one_cycle, {}, {"last_epoch": 9}, "last_epoch: 10 on replica 2, but 0 on the others"),
    "one cycle's seed": (one_cycle, {}, {"ensemble": {"seed": 5}}, "seed: 5 on replica 2, but 0 on the others"),
    "one cycle's ensemble": (one_cycle, {}, {"ensemble": {"sead": 5}}, "'sead' is no argument of ensemble="),
    "one cycle's steps": (one_cycle, {}, {"total_steps": -1}, "total_steps must be at least 1"),
    "bad spread": (one_cycle, {}, {"ensemble_lr_spread_ratio": 1.5}, "ensemble_lr_spread_ratio must"),
    "bad factor": (find_lr, {}, {"factor": -1}, "factor must be positive"),
    "no probe": (find_lr, {}, {"probe": None}, "probe must be an hdet.Probe"),
    "another length": (find_lr, {}, {"total_steps": 100}, "total_steps: 100 on replica 2, but None"),
    "another outer step": (find_lr, {}, {"outer_step": 0.5}, "outer_step: 0.5 on replica 2, but 1.0"),
    "bad noise": (warm_init, {}, {"noise": -1}, "noise must be at least 0"),
    "another noise": (warm_init, {}, {"noise": 0.1}, "noise: 0.1 on replica 2, but 0.01"),
    "another call": (warm_init, {}, None, "replica 2 came to hdet.Ensemble while the others came to hdet.warm_init"),
}  # fmt: skip


def what_is_said(kind):
    """The error of one kind of misfit on this replica, and after how many seconds."""
    call, usual, odd, _ = KINDS[kind]
    given = copy.copy(usual)
    if dist.get_rank() == ODD:
        given |= odd or {}
        shape = {key: given.pop(key) for key in ("width", "order") if key in given}
        if shape:
            given["net"] = Net(**shape)
        if odd is None:
            call = other_torch if kind == "version" else ensemble
    dist.barrier()
    began = time.monotonic()
    try:
        call(**given)
    except (TypeError, ValueError, RuntimeError) as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return None, "nothing", time.monotonic() - began


def all_kinds():
    warnings.simplefilter("ignore")
    return {kind: what_is_said(kind) for kind in KINDS}


def test_what_is_wrong_or_different_on_one_replica_is_said_alike_by_all():
    replicas = run(all_kinds, 4)
    wrong = {}
    for kind, (_, _, _, words) in KINDS.items():
        names, texts, seconds = zip(*(found[kind] for found in replicas), strict=True)
        good = len(set(names)) == len(set(texts)) == 1 and words in texts[0] and f"replica {ODD}" in texts[0]
        if not good or max(seconds) > SECONDS:
            wrong[kind] = names, texts, seconds
    assert not wrong, "\n".join(f"{kind}: {said}" for kind, said in wrong.items())
    assert len(KINDS) >= 25


def said_over_tcp(folder, port, kind):
    """As most programs are run: rank 0 serves the store, and whoever meets an error is gone at once."""
    rank, size = int(os.environ["HDET_TEST_RANK"]), int(os.environ["HDET_TEST_SIZE"])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    said = what_is_said(kind)
    (pathlib.Path(folder) / str(rank)).write_text(json.dumps(said))
    os._exit(1)


@pytest.mark.parametrize("kind", ["seed", "rate", "shape", "bad interval", "an unforeseen error", "another call"])
def test_it_is_said_by_all_although_whoever_serves_the_store_leaves_at_once(tmp_path, kind):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with contextlib.suppress(ReplicaError):
        run(said_over_tcp, 4, str(tmp_path), port, kind, timeout=30, initialise=False)
    told = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(4)]
    assert len({(name, text) for name, text, _ in told}) == 1, told
    assert KINDS[kind][3] in told[0][1]


def nothing_is_left_of_a_failed_one():
    o = optim.SGD(Net().parameters(), lr=0.1)
    with contextlib.suppress(ValueError):
        hdet.Ensemble(o, [hdet.learning_rate(o, spread=0.5)], interval=5 + dist.get_rank())
    hooks = len(o._optimizer_step_pre_hooks) + len(o._optimizer_step_post_hooks)
    good = hdet.Ensemble(o, [hdet.learning_rate(o, spread=0.5)], interval=5)
    good.close()
    return hooks


def test_nothing_is_left_of_an_ensemble_that_was_refused_elsewhere():
    assert run(nothing_is_left_of_a_failed_one, 2) == [0, 0]


def the_same_bad_argument():
    try:
        ensemble(interval=0)
    except ValueError as error:
        return str(error)


def test_what_is_wrong_on_all_replicas_is_said_as_in_one_process():
    alone = the_same_bad_argument()
    assert run(the_same_bad_argument, 2) == [alone] * 2
    assert "replica" not in alone


def made_before_the_group(odd):
    o = optim.SGD(Net().parameters(), lr=0.1)
    rank = int(os.environ["HDET_TEST_RANK"])
    made = hdet.Ensemble(o, [hdet.learning_rate(o, spread=0.5)], interval=5, seed=7 if odd and rank == 1 else 0)
    initialise_gloo()
    for p in o.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    try:
        o.step()
    except ValueError as error:
        return str(error)
    made.close()


def test_replicas_that_are_launched_later_agree_at_the_first_step():
    said = run(made_before_the_group, 2, True, initialise=False)
    assert said[0] == said[1]
    assert "disagree on seed: 7 on replica 1, but 0" in said[0]
    assert run(made_before_the_group, 2, False, initialise=False) == [None, None]


def over_tcp(port):
    rank = int(os.environ["HDET_TEST_RANK"])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    ensemble().close()
    began = time.monotonic()
    try:
        ensemble(seed=rank)
    except ValueError as error:
        return str(error), time.monotonic() - began


def test_the_same_over_the_store_that_torchrun_uses():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    first, second = run(over_tcp, 2, port, initialise=False)
    assert first[0] == second[0]
    assert "disagree on seed: 1 on replica 1, but 0" in first[0]
    assert max(first[1], second[1]) < SECONDS


def in_a_subgroup():
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[dist.get_rank() % 2]
    try:
        ensemble(replicas=mine, seed=dist.get_rank())
    except ValueError as error:
        return str(error)


def test_only_the_replicas_of_the_group_are_compared():
    even, odd, *rest = run(in_a_subgroup, 4)
    assert rest == [even, odd]
    assert "seed: 2 on replica 1, but 0 on the others" in even
    assert "seed: 3 on replica 1, but 1 on the others" in odd


def test_replicas_in_one_process_agree_too():
    def make():
        ensemble(seed=hdet.find_replicas().rank // 2)

    with pytest.raises(hdet.ReplicaError, match="disagree on seed: 1 on replica 2, but 0"):
        hdet.in_process(make, 3)


def with_one_missing():
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    began = time.monotonic()
    try:
        if dist.get_rank() != 1:
            ensemble(replicas=group)
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    finally:
        dist.barrier()


def test_a_replica_that_does_not_come_is_named_in_time():
    first, _, third = run(with_one_missing, 3)
    assert "replica 1 did not come to hdet.Ensemble within 1 s" in first[0]
    assert first[0] == third[0]
    assert max(first[1], third[1]) < 2.0


def test_the_store_does_not_fill_up():
    before, after = run(keys_after, 2, 1), run(keys_after, 2, 20)
    assert before == after


def keys_after(count):
    for seed in range(count):
        ensemble(seed=seed).close()
    dist.barrier()
    return dist.distributed_c10d._get_process_group_store(dist.group.WORLD).num_keys()


def test_an_object_without_a_name_of_its_own_is_told_by_its_class():
    assert plain(object()) == "object"
    assert plain((1, 0.1, None, torch.tensor(2.0))) == [1, 0.1, None, 2.0]


@dataclasses.dataclass
class Scorer:
    device: str

    def __call__(self, index):
        return 1.0


def ensembles_with_probes_of_their_own():
    ensemble(controller=hdet.controllers.Softmax(), probe=Scorer(f"cuda:{dist.get_rank()}")).close()


def test_a_function_that_scores_on_a_device_of_its_own_is_the_same_probe():
    run(ensembles_with_probes_of_their_own, 2)


def test_the_versions_are_compared():
    assert fingerprint({})["versions"] == {
        "hdet": hdet.__version__, "torch": torch.__version__, "Python": ".".join(map(str, sys.version_info[:2])),
    }  # fmt: skip


def test_replicas_in_words():
    assert who(list(range(12))) == "replicas 0, 1, 2, 3, 4, 5, 6 and 5 more"


def test_a_warning_points_at_the_line_that_makes_the_ensemble():
    o = optim.SGD(Net().parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hdet.Ensemble(o, total_steps=5, interval=50).close()
        hdet.OneCycleAutoLR(o, 0.1, total_steps=5, enable_auto_lr=True).ensemble.close()
    assert len(caught) == 2
    assert all(warning.filename == __file__ for warning in caught)


def collectives_of_making_one():
    calls = []
    for name in ("all_reduce", "all_gather", "broadcast", "barrier", "new_group", "all_gather_into_tensor"):
        setattr(dist, name, lambda *a, _n=name, **k: calls.append(_n))
    ensemble().close()
    return calls


def test_it_is_no_collective():
    assert run(collectives_of_making_one, 2) == [[], []]


def failing_step(folder):
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    model = DistributedDataParallel(Net(), process_group=group)
    o = optim.SGD(model.parameters(), lr=0.1)

    def step(index):
        if index == 3 and dist.get_rank() == 1:
            raise KeyError("no such batch")
        loss_of(model, torch.ones(2, 3)).backward()

    try:
        hdet.find_lr(model, o, step, probe=probe(), replicas=group)
    except (KeyError, hdet.LostReplicaError) as error:
        pathlib.Path(folder, str(dist.get_rank())).write_text(repr(error))
    os._exit(0)  # a group with a hole in it cannot be closed in order


def test_what_a_replica_raises_within_find_lr_is_quoted_by_the_others(tmp_path):
    with contextlib.suppress(ReplicaError):
        run(failing_step, 2, str(tmp_path), timeout=30)
    assert (tmp_path / "1").read_text() == "KeyError('no such batch')"
    assert "replica 1 raised KeyError: 'no such batch'" in (tmp_path / "0").read_text()


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (1.0, 1.0 + 1e-14, True),
        (1.0, 1.0 + 1e-9, False),
        (math.nan, math.nan, True),
        (math.inf, math.inf, True),
        (math.inf, 1.0, False),
        ([0.1, math.inf], [0.1, -math.inf], False),
        (1.0, "nothing", False),
    ],
)
def test_numbers_are_alike_up_to_their_last_digits(one, other, expected):
    assert alike(one, other) is expected
    assert alike(other, one) is expected
