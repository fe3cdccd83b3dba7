"""Replicas that die, stall, raise or end early are named by all the others, in time."""

import contextlib
import datetime
import json
import os
import pathlib
import signal
import socket
import time

import pytest
import torch
import torch.distributed as dist
from processes import ReplicaError, run
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet import converge

TIMEOUT = 2.0
VICTIM = 1


def survivors(function, size, folder, *args, **options):
    """What each replica that lived to tell has told, by rank."""
    with contextlib.suppress(ReplicaError):
        run(function, size, str(folder), *args, timeout=30, **options)
    return {int(path.stem): json.loads(path.read_text()) for path in pathlib.Path(folder).glob("*.json")}


def tell(folder, **what):
    """Leave word and go: a process group with a hole in it cannot be closed in order."""
    path = pathlib.Path(folder) / f"{dist.get_rank()}.json"
    path.with_suffix(".new").write_text(json.dumps(what))
    path.with_suffix(".new").rename(path)
    os._exit(0)


class Loop:
    """A small run on a group with a short timeout."""

    def __init__(self, interval=3, width=4, **options):
        torch.manual_seed(0)
        group = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT))
        self.model = DistributedDataParallel(nn.Linear(width, 2), process_group=group)
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.01)
        rates = [hdet.learning_rate(self.optimizer, spread=0.5)]
        given = {"interval": interval, "process_group": group, "model": self.model, **options}
        self.ensemble = hdet.Ensemble(self.optimizer, rates, **given)
        self.width = width

    def step(self, number):
        x = torch.randn(4, self.width, generator=torch.Generator().manual_seed(number + 100 * dist.get_rank()))
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ensemble.step(loss)

    def weights(self):
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


def tell_who_is_lost(folder, loop):
    """The step that ends the round: what it raises, when, and whether the weights are those that were trained."""
    before, began = [], time.monotonic()
    loop.optimizer.register_step_post_hook(lambda *_: before.append(loop.weights()))
    try:
        loop.step(5)
    except hdet.LostReplicaError as error:
        same = torch.equal(before[-1], loop.weights())
        tell(folder, said=str(error), ranks=error.ranks, seconds=time.monotonic() - began, same=same)


def before_the_gather(folder, how):
    """Replica 1 takes its last step of the second round and never comes to its end."""
    loop = Loop(gradients="local")
    for number in range(5):
        loop.step(number)
    dist.barrier()
    if dist.get_rank() == VICTIM:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(TIMEOUT + 3)
    tell_who_is_lost(folder, loop)


@pytest.mark.parametrize("how", ["dies", "stalls"])
def test_a_replica_that_does_not_come_to_the_end_of_a_round_is_named_in_time(tmp_path, how):
    told = survivors(before_the_gather, 3, tmp_path, how)
    assert set(told) - {VICTIM} == {0, 2}
    for rank in (0, 2):
        found = told[rank]
        assert found["ranks"] == [VICTIM]
        assert "replica 1 was last seen at the end of round 0 (step 3)" in found["said"]
        assert "while this one is at the end of round 1 (step 6)" in found["said"]
        assert "as before the averaging" in found["said"]
        assert found["same"]
        assert found["seconds"] < TIMEOUT + 1
    if how == "stalls" and VICTIM in told:
        assert "this replica came too late" in told[VICTIM]["said"]


def within_the_averaging(folder, atomic):
    """Replica 1 dies between two buckets."""
    loop = Loop(width=40, gradients="local", atomic=atomic)
    for number in range(5):
        loop.step(number)
    start_mean, calls = loop.ensemble.replicas.start_mean, []
    small = converge._average

    def in_small_buckets(tensors, replicas, bucket_bytes, of):
        small(tensors, replicas, 64, of)

    def dying(flat, of=None):
        calls.append(1)
        if dist.get_rank() == VICTIM and len(calls) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return start_mean(flat, of)

    converge._average = in_small_buckets
    loop.ensemble.replicas.start_mean = dying
    tell_who_is_lost(folder, loop)


@pytest.mark.parametrize("atomic", [False, True])
def test_a_replica_that_dies_while_they_average_is_named_and_the_weights_are_accounted_for(tmp_path, atomic):
    told = survivors(within_the_averaging, 3, tmp_path, atomic)
    assert set(told) == {0, 2}
    for found in told.values():
        assert found["ranks"] == [VICTIM]
        assert "replica 1 died or stalled after the end of round 1 (step 6)" in found["said"]
        assert found["same"] is atomic
        assert ("as before the averaging" in found["said"]) is atomic
        assert ("atomic=True" in found["said"]) is not atomic
        assert found["seconds"] < TIMEOUT + 1


def within_a_step(folder, how):
    """Replica 1 fails in an ordinary step, while the others wait for its gradient."""
    loop = Loop()
    began = 0.0
    try:
        with loop.ensemble.join():
            for number in range(20):
                began = time.monotonic()
                if number == 4 and dist.get_rank() == VICTIM:
                    if how == "dies":
                        os.kill(os.getpid(), signal.SIGKILL)
                    raise KeyError("no such sample")
                loop.step(number)
    except hdet.LostReplicaError as error:
        tell(folder, said=str(error), ranks=error.ranks, seconds=time.monotonic() - began)
    except KeyError as error:
        tell(folder, said=repr(error))


@pytest.mark.parametrize("how", ["dies", "raises"])
def test_within_join_a_failure_in_an_ordinary_step_is_named_too(tmp_path, how):
    told = survivors(within_a_step, 3, tmp_path, how)
    for rank in (0, 2):
        assert told[rank]["ranks"] == [VICTIM]
        expected = "died or stalled after" if how == "dies" else "raised KeyError: 'no such sample'"
        assert f"replica 1 {expected}" in told[rank]["said"]
        assert told[rank]["seconds"] < TIMEOUT + 1
    if how == "raises":
        assert told[VICTIM]["said"] == "KeyError('no such sample')"


def when_the_store_goes(folder, port):
    """Rank 0 serves the store and dies."""
    rank, timeout = int(os.environ["HDET_TEST_RANK"]), datetime.timedelta(seconds=TIMEOUT)
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=3, timeout=timeout)
    loop = Loop(gradients="local")
    for number in range(5):
        loop.step(number)
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        loop.step(5)
    except hdet.LostReplicaError as error:
        tell(folder, said=str(error), ranks=error.ranks, seconds=time.monotonic() - began)


def test_a_store_that_is_gone_is_said(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = survivors(when_the_store_goes, 3, tmp_path, port, initialise=False)
    assert set(told) == {1, 2}
    for found in told.values():
        assert found["ranks"] == [0]
        assert "the store is gone" in found["said"]
        assert found["seconds"] < TIMEOUT + 1


def uneven(gradients):
    loop = Loop(gradients=gradients, controller=hdet.Softmax(temperature=0.1))
    schedule = optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.9)  # stands still where the data have ended
    records = []
    loop.ensemble._engine._on_round = (records.append,)
    steps = (8, 14, 11)[dist.get_rank()]
    with loop.ensemble.join():
        for number in range(steps):
            loop.step(number)
            schedule.step()
    ended = loop.ensemble._engine.rounds.at.step, loop.ensemble.scales
    return ended, loop.weights().tolist(), [r.step for r in records], [r.events for r in records]


@pytest.mark.parametrize("gradients", ["shared", "local"])
def test_data_that_end_unevenly(gradients):
    (at, weights, steps, events), second, third = run(uneven, 3, gradients)
    assert at == second[0] == third[0]
    assert at[0] == 14
    assert at[1] != {"learning_rate": 1.0}
    assert weights == second[1] == third[1]
    assert steps == second[2] == third[2]
    assert steps[:4] == [3, 6, 9, 12]
    assert "replica 0 had no more data" in " ".join(events[2])
    assert "replicas 0 and 2 had no more data" in " ".join(events[3])


def ends_early():
    loop = Loop(gradients="local", interval=4)
    for number in range(5 + dist.get_rank()):
        loop.step(number)
    try:
        loop.ensemble.finish()
    except RuntimeError as error:
        return str(error)


def test_without_join_replicas_that_end_at_different_steps_are_told_who_ended_where():
    first, second = run(ends_early, 2)
    assert first == second
    assert "disagree on the step: 5 on replica 0, 6 on replica 1" in first
    assert "with ensemble.join()" in first
