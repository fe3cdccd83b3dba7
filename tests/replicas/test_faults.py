"""Replicas that die, stall, raise or end early are named by all the others, in time."""

import contextlib
import datetime
import json
import os
import pathlib
import signal
import socket
import subprocess
import time

import pytest
import torch
import torch.distributed as dist
from processes import ReplicaError, run
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import hdet
from hdet._phases.recording import Recording
from hdet._replicas import notes
from hdet._tensors import converge
from hdet.checkpoint import folder as saved

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
        given = {"interval": interval, "replicas": group, "model": self.model, **options}
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
        assert told[VICTIM]["said"].startswith("replica 1 was last seen at the end of round 0 (step 3); this replica a")
        assert "this replica answered too late" in told[VICTIM]["said"]


def within_the_averaging(folder, atomic):
    """Replica 1 dies between two buckets."""
    loop = Loop(width=40, gradients="local", safety=hdet.Safety(atomic=atomic))
    for number in range(5):
        loop.step(number)
    start_mean, calls = loop.ensemble.replicas.start_mean, []
    small = converge.average_in_buckets

    def in_small_buckets(tensors, replicas, bucket_bytes, of):
        small(tensors, replicas, 64, of)

    def dying(flat, of=None):
        calls.append(1)
        if dist.get_rank() == VICTIM and len(calls) == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return start_mean(flat, of)

    converge.average_in_buckets = in_small_buckets
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
    loop = Loop(gradients=gradients, controller=hdet.controllers.Softmax(temperature=0.1))
    schedule = optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.9)  # stands still where the data have ended
    records = []
    loop.ensemble.engine.phase(Recording).on_round = (records.append,)
    steps = (8, 14, 11)[dist.get_rank()]
    with loop.ensemble.join():
        for number in range(steps):
            loop.step(number)
            schedule.step()
    ended = loop.ensemble.engine.run.rounds.at.step, loop.ensemble.scales
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


# In a few seconds, whatever the group's timeout

LONG = 40.0
SOON = 5.0


class Run:
    """A small run on all ranks, over a store that rank 0 serves; what becomes of each replica is put into a folder."""

    def __init__(self, folder, port, timeout, **options):
        self.rank = int(os.environ["HDET_TEST_RANK"])
        self.folder, self.began = pathlib.Path(folder), time.monotonic()
        where, size = f"tcp://127.0.0.1:{port}", int(os.environ["HDET_TEST_SIZE"])
        limit = datetime.timedelta(seconds=timeout)
        dist.init_process_group("gloo", init_method=where, rank=self.rank, world_size=size, timeout=limit)
        torch.manual_seed(0)
        self.model = DistributedDataParallel(nn.Linear(4, 2))
        self.optimizer = optim.SGD(self.model.parameters(), lr=0.01)
        self.options = {"interval": 3, "model": self.model, **options}
        self.ensemble = self.make()

    def make(self):
        rates = [hdet.learning_rate(self.optimizer, spread=0.5)]
        return hdet.Ensemble(self.optimizer, rates, **self.options)

    def step(self, number):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(number + 100 * self.rank))
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ensemble.step(loss)

    def save(self):
        return hdet.save(self.folder / "saved", {"model": self.model, "ensemble": self.ensemble})

    def steps(self, first, last):
        for number in range(first, last):
            self.step(number)

    def tell(self, error):
        """Leave word and be gone at once, as a program does that does not catch the error."""
        told = {"kind": type(error).__name__, "said": str(error), "ranks": getattr(error, "ranks", None)}
        path = self.folder / f"{self.rank}.json"
        path.with_suffix(".new").write_text(json.dumps({**told, "at": time.monotonic()}))
        path.with_suffix(".new").rename(path)
        os._exit(1)


def fall(run, how):
    (run.folder / "fell").write_text(str(time.monotonic()))
    if how == "raises":
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    if how == "stops":  # for long enough
        subprocess.Popen(["sh", "-c", f"sleep 5; kill -9 {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGKILL if how == "dies" else signal.SIGSTOP)


def falls(folder, port, timeout, where, how, victim=VICTIM):
    """Replica 1, or another one, dies, stops or raises somewhere."""
    run = Run(folder, port, timeout, gradients="local" if where == "converge" else "shared")
    victim = run.rank == victim
    try:
        if where == "converge":
            run.steps(0, 5)
            if victim:
                fall(run, how)
            run.step(5)
        elif where == "join":
            with run.ensemble.join():
                run.steps(0, 4)
                if victim:
                    fall(run, how)
                run.steps(4, 9)
        else:
            run.steps(0, 4)
            if victim:
                saved.write = lambda *args: fall(run, how)
            run.save()
    except Exception as error:
        run.tell(error)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def told_by(function, folder, *args, timeout=LONG, size=3):
    """What each replica has told, with the seconds since one of them fell."""
    given = str(folder), free_port(), timeout, *args
    with contextlib.suppress(ReplicaError):
        run(function, size, *given, timeout=min(timeout, 12) + 8, initialise=False)
    told = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("[0-9].json")}
    fell = folder / "fell"
    for found in told.values():
        found["seconds"] = found["at"] - float(fell.read_text()) if fell.exists() else None
    return told


WORDS = {
    "converge": "replica 1 was last seen at the end of round 0 (step 3) before its process ended",
    "join": "replica 1 died or stalled after the end of round 0 (step 3): its process has ended",
    "save": "replica 1 died or stalled after hdet.save: its process has ended",
}


def check_named(folder, where):
    told = told_by(falls, folder, where, "dies")
    assert set(told) == {0, 2}
    for found in told.values():
        assert (found["kind"], found["ranks"]) == ("LostReplicaError", [VICTIM])
        assert WORDS[where] in found["said"]
        assert found["seconds"] < SOON
    assert told[0]["said"] == told[2]["said"]
    return max(found["seconds"] for found in told.values())


@pytest.mark.parametrize("where", WORDS)
def test_a_killed_replica_is_named_by_all_long_before_the_timeout(tmp_path, where):
    check_named(tmp_path, where)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("where", WORDS)
def test_a_killed_replica_is_named_by_all_each_time(tmp_path, where):
    seconds = []
    for number in range(10):
        (tmp_path / str(number)).mkdir()
        seconds.append(check_named(tmp_path / str(number), where))
    print(where, [round(s, 2) for s in seconds])


@pytest.mark.parametrize("victim", [VICTIM, 0])  # the latter serves the store, which does not answer either
@pytest.mark.parametrize("where", ["join", "converge"])
def test_a_stopped_replica_is_named_when_the_timeout_is_over(tmp_path, where, victim):
    told = told_by(falls, tmp_path, where, "stops", victim, timeout=3.0)
    others = {0, 1, 2} - {victim}
    assert others <= set(told)
    for rank in others:
        assert (told[rank]["kind"], told[rank]["ranks"]) == ("LostReplicaError", [victim])
        assert told[rank]["seconds"] < 4.0


def stops_unseen(folder, port, timeout, when):
    """Rank 0, which serves the store, stops where nobody sees that: on another host, or when it has been asked."""
    notes.state = lambda process: None
    run = Run(folder, port, timeout, gradients="local")
    run.steps(0, 5)
    try:
        if run.rank == 0:
            if when == "save":
                saved.write = lambda *args: fall(run, "stops")
                run.save()
            fall(run, "stops")
        run.save() if when == "save" else run.step(5)
    except Exception as error:
        run.tell(error)


@pytest.mark.parametrize("where", ["converge", "save"])
def test_a_store_that_does_not_answer_is_waited_for_until_the_timeout(tmp_path, where):
    told = told_by(stops_unseen, tmp_path, where, timeout=3.0)
    for rank in (1, 2):
        assert (told[rank]["kind"], told[rank]["ranks"]) == ("LostReplicaError", [0])
        assert "the store does not answer" in told[rank]["said"]
        assert 2.5 < told[rank]["seconds"] < 4.0


def falls_while_others_wait(folder, port, timeout, blind):
    """Replica 1 dies in a backward pass, for which the others wait in DDP: some of them for one another."""
    if blind:
        notes.state = lambda process: None
    run = Run(folder, port, timeout)

    def late(gradient):
        time.sleep(1.0)
        fall(run, "dies")

    try:
        with run.ensemble.join():
            run.steps(0, 4)
            if run.rank == VICTIM:
                run.model.module.weight.register_hook(late)
            run.steps(4, 9)
    except Exception as error:
        run.tell(error)


@pytest.mark.parametrize("blind", [False, True])  # as for processes of other hosts
def test_all_are_woken_to_name_who_was_killed_while_they_waited_in_ddp(tmp_path, blind):
    told = told_by(falls_while_others_wait, tmp_path, blind, size=4)
    assert set(told) == {0, 2, 3}
    for found in told.values():
        assert (found["kind"], found["ranks"]) == ("LostReplicaError", [VICTIM])
        assert found["seconds"] < SOON


def test_an_error_of_the_users_own_in_the_class_of_gloos_is_quoted(tmp_path):
    told = told_by(falls, tmp_path, "join", "raises")
    assert told[VICTIM]["kind"] == "RuntimeError"
    for rank in (0, 2):
        assert told[rank]["kind"] == "LostReplicaError"
        assert "replica 1 raised RuntimeError: mat1 and mat2 shapes cannot be multiplied" in told[rank]["said"]
        assert told[rank]["seconds"] < SOON


def evaluates(folder, port, timeout, how, blind=False):
    """All compute for longer than the timeout, and talk to nobody; then replica 1 falls while the others go on."""
    if blind:
        notes.state = lambda process: None
    run = Run(folder, port, timeout)
    try:
        with run.ensemble.join():
            run.steps(0, 4)
            time.sleep(timeout + 0.5)
            if run.rank == VICTIM:
                fall(run, how)
            time.sleep(2.0)
            run.steps(4, 9)
    except Exception as error:
        run.tell(error)


@pytest.mark.parametrize("blind", [False, True])  # as for processes of other hosts, and on Windows
def test_whoever_computes_for_longer_than_the_timeout_is_not_blamed_for_an_error_elsewhere(tmp_path, blind):
    told = told_by(evaluates, tmp_path, "raises", blind, timeout=2.0)
    assert told[VICTIM]["kind"] == "RuntimeError"
    for rank in (0, 2):
        assert (told[rank]["kind"], told[rank]["ranks"]) == ("LostReplicaError", [VICTIM])
        assert "replica 1 raised RuntimeError: mat1 and mat2 shapes cannot be multiplied" in told[rank]["said"]


@pytest.mark.parametrize("how", ["dies", "stops"])
def test_who_falls_after_a_long_evaluation_is_named_alone(tmp_path, how):
    told = told_by(evaluates, tmp_path, how, timeout=2.0)
    for rank in (0, 2):
        assert (told[rank]["kind"], told[rank]["ranks"]) == ("LostReplicaError", [VICTIM])


def the_same_error(join):
    """All replicas raise alike within `join()`: each keeps its own error, and the group is as good as before."""
    loop = Loop()
    try:
        with loop.ensemble.join():
            loop.step(0)
            raise (RuntimeError if join == "plain" else KeyError)("enough")
    except (RuntimeError, KeyError) as error:
        kind = type(error).__name__
    with loop.ensemble.join():
        for number in range(1, 7):
            loop.step(number)
    return kind


@pytest.mark.parametrize("kind", ["plain", "other"])
def test_where_all_raise_alike_each_keeps_its_error_and_can_go_on(kind):
    assert set(run(the_same_error, 3, kind)) == {"RuntimeError" if kind == "plain" else "KeyError"}


def alone(folder, port, timeout, what, gradients, joined):
    """Replica 1 makes a call that the others do not make."""
    run = Run(folder, port, timeout, gradients=gradients)
    try:
        with run.ensemble.join() if joined else contextlib.nullcontext():
            run.steps(0, 4)
            if run.rank == VICTIM:
                calls = {
                    "save": run.save,
                    "converge": run.ensemble.converge,
                    "consensus": lambda: run.ensemble.consensus().__enter__(),
                    "ensemble": run.make,
                    "step": lambda: (run.optimizer.step(), run.ensemble.step(1.0)),
                }
                calls[what]()
            run.steps(4, 9)
    except Exception as error:
        run.tell(error)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("save", "replica 1 came to hdet.save while the others were last seen at the end of round 1 (step 6)"),
        ("ensemble", "replica 1 came to hdet.Ensemble while the others were last seen at the end of round 1"),
        ("consensus", "the end of a round on replica 0, ensemble.consensus() on replica 1"),
        ("converge", "the end of a round on replica 0, ensemble.converge() on replica 1"),
    ],
)
def test_who_makes_a_call_alone_is_named_by_all_at_once(tmp_path, what, words):
    began = time.monotonic()
    told = told_by(alone, tmp_path, what, "local", False)
    assert time.monotonic() - began < LONG / 2
    assert set(told) == {0, 1, 2}
    for found in told.values():
        assert words in found["said"]
        assert "every replica must make the same calls in the same order" in found["said"]


@pytest.mark.parametrize("what", ["save", "converge", "step"])
def test_with_shared_gradients_it_is_named_within_join_when_the_timeout_is_over(tmp_path, what):
    told = told_by(alone, tmp_path, what, "shared", True, timeout=3.0)
    assert set(told) == {0, 1, 2}
    place = {"save": "hdet.save", "converge": "ensemble.converge() (step 4)", "step": "the end of round 1 (step 6)"}
    for found in told.values():
        assert found["kind"] == "LostReplicaError"
        assert f"replica 1 came to {place[what]} while the others were last seen at the end of round 0" in found["said"]


def slow_to_go_on(folder, port, timeout):
    """Replica 1 calls hdet.save alone, and is held up once it has heard so: whoever serves the store has left then."""
    run = Run(folder, port, timeout)
    board = run.ensemble.replicas.lookout().board
    leave = board.leave
    try:
        with run.ensemble.join():
            run.steps(0, 4)
            if run.rank == VICTIM:
                board.leave = lambda *given: (leave(*given), time.sleep(1.5))
                run.save()
            run.steps(4, 9)
    except Exception as error:
        run.tell(error)


def test_what_was_heard_is_said_though_the_store_has_gone_since(tmp_path):
    told = told_by(slow_to_go_on, tmp_path, timeout=3.0)
    assert set(told) == {0, 1, 2}
    assert len({found["said"] for found in told.values()}) == 1
    assert "replica 1 came to hdet.save while the others were last seen at the end of round 0" in told[0]["said"]


@pytest.mark.parametrize("what", ["save", "ensemble", "converge", "step"])
def test_without_join_who_made_it_says_where_the_others_were(tmp_path, what):
    told = told_by(alone, tmp_path, what, "shared", False, timeout=3.0)
    assert (
        "replicas 0 and 2 were last seen at the end of round 0 (step 3), while this one is at" in told[VICTIM]["said"]
    )


def waits_for_a_device(folder, port, timeout, comes):
    """As on a backend that returns before the collective is done: replica 1 comes late, or makes another call."""
    run = Run(folder, port, timeout, gradients="local")
    if run.rank == VICTIM:
        time.sleep(0.5)
    try:
        lookout = run.ensemble.replicas.lookout()
        lookout.arrive("hdet.save" if run.rank == VICTIM and not comes else "the end of a round")
        if run.rank == VICTIM and not comes:
            time.sleep(3.0)
        parts = [torch.zeros(1) for _ in range(3)]
        work = dist.all_gather(parts, torch.tensor([float(run.rank)]), async_op=True)
        lookout.outlast(work)
        work.wait()
        run.tell(ValueError(str([part.item() for part in parts])))
    except hdet.LostReplicaError as error:
        run.tell(error)


def test_whoever_waits_for_a_device_looks_around_too(tmp_path):
    told = told_by(waits_for_a_device, tmp_path, False)
    for rank in (0, 2):
        assert "replica 1 came to hdet.save while the others were last seen at the end of a round" in told[rank]["said"]


def test_and_has_the_result_when_all_have_come(tmp_path):
    told = told_by(waits_for_a_device, tmp_path, True)
    assert [told[rank]["said"] for rank in range(3)] == ["[0.0, 1.0, 2.0]"] * 3
