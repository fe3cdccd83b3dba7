"""Measures converges on this machine with 2, 4 and 8 processes, for the model of `cost.py` to be fitted to.

torchrun --nnodes 4 --nproc-per-node 8 ... -m hdet_lab.link      # the same on your own machines, on all their ranks
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from hdet import Ensemble, find_replicas
from hdet_lab.ensemble_from_options import device
from hdet_lab.worker import end_at_once

PARAMETERS = (1 << 12, 1 << 20, 1 << 22, 1 << 24)
"""Numbers of parameters to average: from pure latency to four buckets."""

_TURNS = 15


class Timing(NamedTuple):
    """A timed converge.

    Attributes:
        replicas: number of replicas.
        nbytes: bytes that each of them averaged.
        seconds: the fastest turn, as timed by its slowest replica: other load on the machines can only add to it.
    """

    replicas: int
    nbytes: int
    seconds: float


def time_converges(parameters: Sequence[int] = PARAMETERS, turns: int = _TURNS) -> list[Timing]:
    """Time converges of models of these sizes between the caller and the other replicas. Collective."""
    replicas = find_replicas()
    found = []
    for count in parameters:
        model = nn.ParameterList([nn.Parameter(torch.ones(count, device=device()))])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ensemble = Ensemble(optimizer, interval=1000, gradients="local", model=model)
        ensemble.converge()  # makes process group and buffers
        seconds = []
        for _ in range(turns):
            together = torch.zeros(1, dtype=torch.float64, device=device())
            replicas.gather(together)
            began = time.perf_counter()
            ensemble.converge()
            if together.is_cuda:
                torch.cuda.synchronize()
            took = torch.tensor([time.perf_counter() - began], dtype=torch.float64, device=device())
            seconds.append(max(row[0] for row in replicas.gather(took)))
        ensemble.close()
        found.append(Timing(replicas.size, 4 * count, min(seconds)))
    replicas.close()
    return found


def measure(sizes: Sequence[int], parameters: Sequence[int] = PARAMETERS, turns: int = _TURNS) -> list[Timing]:
    """Run `time_converges()` on this machine, on `sizes` new processes over gloo each."""
    found: list[Timing] = []
    for size in sizes:
        with tempfile.TemporaryDirectory(prefix="hdet-") as folder:
            arguments = (size, folder, tuple(parameters), turns)
            torch.multiprocessing.start_processes(_replica, arguments, size, start_method="forkserver")  # type: ignore[attr-defined,no-untyped-call]
            found += [Timing(*row) for row in json.loads(Path(folder, "timings.json").read_text())]
    return found


def _replica(rank: int, size: int, folder: str, parameters: Sequence[int], turns: int) -> None:
    end_at_once()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(f"{folder}/store", size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    timings = time_converges(parameters, turns)
    if rank == 0:
        Path(folder, "timings.json").write_text(json.dumps(timings))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Time converges on the ranks that torchrun has started, and print the options for `hdet plan`."""
    from hdet_lab.cost import fit, show_fit  # noqa: PLC0415
    from hdet_lab.worker import join  # noqa: PLC0415

    join()
    timings = time_converges()
    if find_replicas().rank == 0:
        machines = timings[0].replicas // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        cores = 0 if torch.cuda.is_available() else machines * (os.cpu_count() or 1)
        link = fit(timings, cores)
        print(show_fit(timings, cores))
        told = {"bandwidth": f"{link.bandwidth:.3g}B/s", "latency": f"{link.latency:.3g}s"}
        told |= {"copying": f"{link.copying:.3g}B/s", "fixed": f"{link.fixed:.3g}s"}
        print("hdet plan", *(f"--{name} {value}" for name, value in told.items() if float(value.rstrip("B/s"))))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
