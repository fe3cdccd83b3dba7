"""Long runs and many ensembles leave nothing behind: no memory, no hook, no process group, no thread."""

import gc
import pathlib
import re
import threading

import pytest
import torch
import torch.distributed as dist
from processes import run
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import hdet


def status(name):
    """A number of /proc/self/status: VmRSS in kB, Threads."""
    return int(re.search(rf"{name}:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())[1])


def long_run(steps):
    """How much memory and how many objects the second half of a run adds, with everything switched on."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)))
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    ensemble = hdet.Ensemble(
        optimizer, [hdet.learning_rate(optimizer, spread=0.3)], interval=20,
        controller=hdet.controllers.Softmax(), model=model,
        safety=hdet.Safety(guard=True, atomic=True, rollback=hdet.Rollback()), averaging=hdet.Averaging(outer_step=0.9),
    )  # fmt: skip
    seen = []
    for step in range(steps):
        if step in (steps // 2, steps - 1):
            gc.collect()
            objects = len(gc.get_objects())  # first: the list itself takes memory
            seen.append((status("VmRSS"), objects, status("Threads")))
        x = torch.randn(8, 8)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ensemble.step(loss)
    ensemble.finish()
    return [after - before for before, after in zip(*seen, strict=True)]


def check_long_run(steps):
    for kilobytes, objects, threads in run(long_run, 2, steps, timeout=900):
        assert kilobytes < 2_000
        assert objects < 200
        assert threads == 0


def test_a_run_keeps_its_memory():
    check_long_run(800)


@pytest.mark.soak
@pytest.mark.timeout(1000)
def test_a_long_run_keeps_its_memory():
    check_long_run(20_000)


def many_ensembles(count):
    """What is left of ensembles that were made, used and closed: hooks, groups, threads, keys in the store."""
    model = nn.Linear(4, 1)
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    store = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)

    def left():
        gc.collect()
        tables = (
            optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks,
            optimizer._optimizer_state_dict_post_hooks, model._state_dict_pre_hooks,
        )  # fmt: skip
        groups = len(dist.distributed_c10d._world.pg_map)
        return [sum(map(len, tables)), groups, threading.active_count(), status("Threads"), store.num_keys()]

    def use():
        ensemble = hdet.Ensemble(
            optimizer,
            [hdet.learning_rate(optimizer, spread=0.3)],
            interval=2,
            model=model,
            safety=hdet.Safety(guard=True),
        )
        for _ in range(2):
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ensemble.step(loss)
        ensemble.close()

    for _ in range(2):
        use()
    dist.barrier()
    first = left()
    for _ in range(count):
        use()
    dist.barrier()
    return first, left()


def check_many(count):
    for first, last in run(many_ensembles, 2, count, timeout=900):
        assert first[0] == last[0] == 0
        assert first[1:4] == last[1:4]
        # torch leaves a few keys in the store for each process group that it makes, and hdet none
        assert last[4] - first[4] <= count * keys_of_a_group()


def keys_of_a_group():
    return max(run(_keys_of_a_group, 2))


def _keys_of_a_group():
    store = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
    before = store.num_keys()
    group = dist.new_group()
    dist.barrier()  # a group that is destroyed while another rank still connects to it breaks that rank
    dist.destroy_process_group(group)
    dist.barrier()
    return store.num_keys() - before


def test_ensembles_leave_nothing_behind():
    check_many(20)


@pytest.mark.soak
@pytest.mark.timeout(1000)
def test_five_hundred_ensembles_leave_nothing_behind():
    check_many(500)
