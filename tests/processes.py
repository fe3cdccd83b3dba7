"""Runs a function on several real processes over gloo and returns what each of them returned.

Every replica's traceback is shown; a replica that does not come back in time is killed and named.
"""

import multiprocessing
import multiprocessing.connection
import os
import pathlib
import pickle
import tempfile
import time
import traceback
import warnings

import torch.distributed as dist
from without import take_out

os.environ.setdefault("OMP_NUM_THREADS", "1")
# The fork server looks for what it preloads on PYTHONPATH only.
_here = str(pathlib.Path(__file__).parent)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_here, os.environ.get("PYTHONPATH")]))
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["preload"])


class ReplicaError(AssertionError):
    """One or more replicas raised, died or hung."""


def run(function, size, *args, timeout=120, initialise=True):
    """`function(*args)` on `size` replicas; the list of their results, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        pipes, children = _start(function, size, args, folder, initialise)
        outcomes = _collect(pipes, time.monotonic() + timeout)
        for child in children:
            child.join(5)
            if child.is_alive():
                child.kill()
    errors = [f"--- replica {rank} ---\n{text}" for rank, (good, text) in enumerate(outcomes) if not good]
    if errors:
        raise ReplicaError("\n".join(errors))
    return [value for _, value in outcomes]


def run_and_kill(function, size, *args, moment=None):
    """`function(*args)` on `size` replicas, which are killed after `moment()`; by default they end on their own."""
    with tempfile.TemporaryDirectory() as folder:
        _, children = _start(function, size, args, folder, True)
        if moment is not None:
            moment()
            for child in children:
                child.kill()
        for child in children:
            child.join(60)
    return [child.exitcode for child in children]


def _start(function, size, args, folder, initialise):
    pipes, children = [], []
    for rank in range(size):
        ours, theirs = _context.Pipe(duplex=False)
        job = (function, args, rank, size, f"{folder}/store", initialise, theirs)
        child = _context.Process(target=_child, args=job, daemon=True)
        child.start()
        theirs.close()
        pipes.append(ours)
        children.append(child)
    return pipes, children


def _collect(pipes, deadline):
    """Each replica's outcome. Once one has failed, the others have a few seconds left."""
    outcomes = [None] * len(pipes)
    while any(o is None for o in outcomes) and time.monotonic() < deadline:
        waiting = [p for p, o in zip(pipes, outcomes, strict=True) if o is None]
        for pipe in multiprocessing.connection.wait(waiting, timeout=0.2):
            try:
                outcome = pickle.loads(pipe.recv_bytes())
            except EOFError:
                outcome = (False, "died without a word")
            outcomes[pipes.index(pipe)] = outcome
            if not outcome[0]:
                deadline = min(deadline, time.monotonic() + 5)
    return [(False, "did not come back in time") if o is None else o for o in outcomes]


def _child(function, args, rank, size, store, initialise, pipe):
    take_out()
    try:
        if initialise:
            initialise_gloo(rank, size, store)
        else:
            os.environ.update(HDET_TEST_RANK=str(rank), HDET_TEST_SIZE=str(size), HDET_TEST_STORE=store)
        pipe.send_bytes(pickle.dumps((True, function(*args))))
        if dist.is_initialized():
            dist.barrier()  # nobody leaves while others still talk to it
            dist.destroy_process_group()
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))


def initialise_gloo(rank=None, size=None, store=None):
    """Join the process group; without arguments as the runner was told by `initialise=False`."""
    if rank is None:
        rank, size = int(os.environ["HDET_TEST_RANK"]), int(os.environ["HDET_TEST_SIZE"])
        store = os.environ["HDET_TEST_STORE"]
    warnings.filterwarnings("ignore", message=".*barrier.*")
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
