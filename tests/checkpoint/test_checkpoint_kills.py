"""kill -9 at any moment of a run and of a save: what is found afterwards is whole, and goes on bit for bit."""

import os
import pathlib
import random
import signal
import time
import warnings
from functools import partial

import pytest
import saved_run
import torch
from processes import run, run_and_kill
from torch import nn

import hdet

EVERY = 3  # rounds have 4 steps: of four checkpoints one is at a round's end


def kill_and_resume(path, moments, seed):
    """Kill a run at random moments, each time a new one, and let it end; the steps that they went on from."""
    run(saved_run.finish, 2, f"{path}/warm", 24, EVERY)
    whole = run(saved_run.finish, 2, f"{path}/whole", 24, EVERY)
    draw, seconds = random.Random(seed), whole[0][2]
    went_on = []
    for number in range(moments):
        folder, moment = f"{path}/{number}", draw.uniform(0, seconds)
        run_and_kill(saved_run.finish, 2, folder, 24, EVERY, moment=partial(wait_for, f"{folder}.begun", moment))
        results = run(saved_run.finish, 2, folder, 24, EVERY)
        same = [result[1] for result in results] == [result[1] for result in whole]
        assert same, f"kill {number} after {moment:.3f} s, on from step {results[0][0]}: not the same run"
        went_on.append(results[0][0])
    return went_on


def wait_for(path, seconds):
    """Until there is such a file, and then so long."""
    deadline = time.monotonic() + 60
    while not os.path.exists(path):
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.002)
    time.sleep(seconds)


def test_a_run_that_is_killed_goes_on_bit_for_bit(tmp_path):
    went_on = kill_and_resume(tmp_path, 4, 0)
    assert len(went_on) == 4


@pytest.mark.soak
def test_fifty_kills(tmp_path, capsys):
    went_on = kill_and_resume(tmp_path, 50, 1)
    with capsys.disabled():
        print(f"\n50 of 50 runs equal; went on from steps {sorted(went_on)}")
    assert len(set(went_on)) > 4


# In the middle of a save


def wait_for_a_save(folder, seconds):
    """Until there is a whole checkpoint and one that is being written, and then so long."""
    wait_for(f"{folder}.begun", random.uniform(0, 0.05))
    deadline = time.monotonic() + 60
    while not unfinished_in(folder):
        assert time.monotonic() < deadline, "there was no save"
    time.sleep(seconds)


def unfinished_in(folder):
    return any(name.startswith(".") for name in os.listdir(folder))


def save_without_end(path):
    model = nn.Linear(300, 300)
    step = 0
    while True:
        step += 1
        nn.init.constant_(model.weight, step)
        nn.init.constant_(model.bias, step)
        hdet.save(path, {"model": model}, step=step, keep=2, own={"mine": torch.full((50_000,), float(step))})
        pathlib.Path(f"{path}.begun").touch()


def kill_saves(path, kills):
    """Kill two replicas that save all the time; whether each kill left an unfinished checkpoint behind."""
    unfinished = 0
    for number in range(kills):
        folder = f"{path}/{number}"
        moment = partial(wait_for_a_save, folder, random.uniform(0, 0.03))
        run_and_kill(save_without_end, 2, folder, moment=moment)
        unfinished += unfinished_in(folder)
        model = nn.Linear(300, 300)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loaded = hdet.load(folder, {"model": model})
        assert not any("cannot be verified" in str(w.message) for w in caught), "the newest one was not whole"
        assert torch.equal(model.weight, torch.full_like(model.weight, loaded.step))
        assert torch.equal(model.bias, torch.full_like(model.bias, loaded.step))
    return unfinished


def test_a_kill_in_a_save_leaves_a_verified_state(tmp_path):
    kill_saves(tmp_path, 8)


@pytest.mark.soak
def test_a_hundred_kills_in_saves(tmp_path, capsys):
    unfinished = kill_saves(tmp_path, 100)
    with capsys.disabled():
        print(f"\n100 of 100 loaded a verified state; {unfinished} of the kills hit a checkpoint being written")
    assert unfinished > 50


def save_and_die(path, at):
    """Save twice; die before the `at`-th change to the disk of the second one."""
    model = nn.Linear(4, 4)
    nn.init.ones_(model.weight)
    hdet.save(path, {"model": model}, step=1, keep=1)
    nn.init.constant_(model.weight, 2)
    seen = 0

    def watched(function):
        def call(*args, **kwargs):
            nonlocal seen
            seen += 1
            if seen == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    for name in ("mkdir", "fsync", "rename", "rmdir", "unlink"):
        setattr(os, name, watched(getattr(os, name)))
    hdet.save(path, {"model": model}, step=2, keep=1)
    return seen


def test_a_kill_before_any_change_to_the_disk_leaves_one_or_the_other(tmp_path):
    changes = run(save_and_die, 1, str(tmp_path / "whole"), 0)[0]
    assert changes >= 9  # the folder, two files, checkpoint.json, the folder, its name, the name's folder, and the old
    steps = []
    for at in range(1, changes + 1):
        folder = str(tmp_path / str(at))
        assert run_and_kill(save_and_die, 1, folder, at) == [-signal.SIGKILL]
        model = nn.Linear(4, 4)
        loaded = hdet.load(folder, {"model": model})
        assert not loaded.notices
        assert torch.equal(model.weight, torch.full_like(model.weight, loaded.step))
        steps.append(loaded.step)
    assert steps == sorted(steps)
    assert set(steps) == {1, 2}
