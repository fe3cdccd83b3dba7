"""What hdet costs: in an ordinary step, in a real DDP loop, and in a converge. CPU and gloo, one thread per rank.

step      One `optimizer.step()` and `scheduler.step()` with 4 tiny parameter groups on 2 ranks: OneCycleAutoLR in
          mid-round against torch's OneCycleLR, in CPU time, as neither waits, one rank after the other; with an
          optimizer that does nothing, and with SGD, whose work evicts the library's code from the caches. A second
          OneCycleLR shows the noise.
loop      AdamW on a transformer of 10 million parameters and 256 tokens per rank, in DDP on 2 ranks: the time inside
          the library's hooks and `Ensemble.step` against the rest of the step, at intervals of 100 and 1000 steps.
converge  `hdet._tensors.converge.average` of 25 million float32 parameters against one all_reduce of a flat tensor that
          already holds them (and a division), one all_reduce per parameter (two turns, it is slow), and torch's
          PeriodicModelAverager. The slowest rank counts. Memory is what the first call in a fresh process adds at
          its peak: VmHWM of /proc/self/status, set back to VmRSS just before; hdet's process group is included.

What is compared takes turns within one run; ratios and differences are taken within each turn. Shown are the median
and, in brackets, the 10th and the 90th percentile of the turns.

    python benchmarks/overhead.py --write    # to benchmarks/results/overhead-DATE.json and .md
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import multiprocessing
import os
import platform
import re
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter, thread_time
from timeit import timeit
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.optim.lr_scheduler import OneCycleLR

import hdet
from hdet._replicas import Replicas
from hdet._tensors.converge import BUCKET_BYTES, average

NEVER = 10**8
VOCABULARY = 2_000
SLOW = "all_reduce per parameter"


@dataclass(frozen=True)
class Sizes:
    """How much is measured. `model` is the transformer's width and layers, `tokens` a rank's batch."""

    step_turns: int = 300
    rounds: int = 13
    interval: int = 8
    model: tuple[int, int] = (384, 5)
    tokens: tuple[int, int] = (8, 32)
    elements: int = 25_000_000
    tensors: tuple[int, int] = (96, 2_500)
    ranks: tuple[int, ...] = (2, 4)
    converge_turns: int = 30
    bucket_bytes: int = BUCKET_BYTES


SMOKE = Sizes(10, 3, 2, (16, 1), (2, 4), 100_000, (6, 20), (2,), 3)


class Row:
    """One line of the result. `goal` is the most that the median should be."""

    def __init__(self, part: str, what: str, unit: str, samples: Sequence[float], goal: float | None = None) -> None:
        self.part, self.what, self.unit, self.goal = part, what, unit, goal
        self.samples = len(samples)
        self.median = statistics.median(samples)
        self.p10, *_, self.p90 = statistics.quantiles(samples, n=10, method="inclusive")
        self.met = None if goal is None else self.median <= goal

    def line(self) -> str:
        goal = "" if self.goal is None else f"at most {self.goal:g} {self.unit}: {'met' if self.met else 'missed'}"
        value = f"{self.median:.3g} ({self.p10:.3g} to {self.p90:.3g}) {self.unit}"
        return f"| {self.part:8} | {self.what:52} | {value:30} | {goal:22} |"


def launch(function: Callable[..., Any], ranks: int, *args: Any) -> list[Any]:
    """`function(*args)` on fresh processes with a gloo group; what each of them returned, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(_child, (ranks, folder, function, args), ranks, start_method="forkserver")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def _child(rank: int, ranks: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*period is 1.*")
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    Path(folder, f"{rank}.json").write_text(json.dumps(function(*args)))
    dist.barrier()
    dist.destroy_process_group()


class Idle(torch.optim.SGD):
    """Takes steps that do nothing, so that only what surrounds them is timed."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def tiny_optimizer(kind: type[torch.optim.SGD]) -> torch.optim.Optimizer:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    return kind([{"params": [p]} for p in parameters], lr=1e-6, momentum=0.9)


def measure_step(turns: int, idle: bool) -> list[list[float]]:
    """Microseconds per step in each turn of 20 steps: OneCycleLR, OneCycleAutoLR, OneCycleLR again."""
    optimizers = [tiny_optimizer(Idle if idle else torch.optim.SGD) for _ in range(3)]
    options: dict[str, Any] = {"model_sync_interval": NEVER, "enable_auto_lr": True}
    ours = hdet.OneCycleAutoLR(optimizers[1], 1e-6, NEVER, ensemble_lr_spread_ratio=0.3, **options)
    first, second = (OneCycleLR(optimizers[i], 1e-6, NEVER) for i in (0, 2))
    loss = torch.ones((), requires_grad=True) * 2
    schedules: list[Callable[[], None]] = [first.step, partial(ours.step, loss), second.step]

    def time(step: Callable[[], Any], schedule: Callable[[], None]) -> float:
        return timeit(lambda: (step(), schedule()), gc.enable, thread_time, number=20) / 20 * 1e6

    found: list[list[float]] = []
    for rank in range(2):  # one after the other: ordinary steps do not wait, and the ranks may share a core
        if rank == dist.get_rank():
            found = [[time(o.step, s) for o, s in zip(optimizers, schedules, strict=True)] for _ in range(turns + 5)]
        dist.barrier()
    ours.ensemble.finish()
    return found[5:]


def step_rows(sizes: Sizes) -> list[Row]:
    rows = []
    for idle, name in ((True, "idle"), (False, "SGD")):
        turns = [turn for rank in launch(measure_step, 2, sizes.step_turns, idle) for turn in rank]
        rows += [
            Row("step", f"{name}: OneCycleLR", "us", [plain for plain, _, _ in turns]),
            Row("step", f"{name}: OneCycleAutoLR - OneCycleLR", "us", [ours - plain for plain, ours, _ in turns], 25),
            Row("step", f"{name}: noise, OneCycleLR - OneCycleLR", "us", [again - plain for plain, _, again in turns]),
        ]
    return rows


def language_model(width: int, layers: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, max(1, width // 64), 4 * width, dropout=0.0, batch_first=True)
    body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(VOCABULARY, width), body, nn.Linear(width, VOCABULARY))


def measure_loop(sizes: Sizes) -> list[list[float]]:
    """Seconds per round: an ordinary step without the library, the library in it, and in the step that converges."""
    model = nn.parallel.DistributedDataParallel(language_model(*sizes.model))
    optimizer = torch.optim.AdamW(model.parameters())
    total = sizes.rounds * sizes.interval
    scheduler = OneCycleLR(optimizer, max_lr=1e-4, total_steps=total + 1)
    options: dict[str, Any] = {"interval": sizes.interval, "controller": hdet.controllers.Softmax(), "model": model}
    ensemble = hdet.Ensemble(optimizer, [hdet.learning_rate(optimizer, spread=0.3)], total_steps=total, **options)
    spent: list[float] = []

    def timed(call: Callable[..., Any], *args: Any) -> Any:
        begin = perf_counter()
        result = call(*args)
        spent.append(perf_counter() - begin)
        return result

    for table in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
        table.update({key: partial(timed, hook) for key, hook in table.items()})

    def step() -> tuple[float, float]:
        spent.clear()
        begin = perf_counter()
        tokens = torch.randint(VOCABULARY, sizes.tokens)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        timed(ensemble.step, loss)
        return perf_counter() - begin - sum(spent), sum(spent)

    rounds = []
    for _ in range(sizes.rounds):
        *ordinary, last = [step() for _ in range(sizes.interval)]
        rounds.append([*(statistics.mean(times) for times in zip(*ordinary, strict=True)), last[1]])
    return rounds[1:]


def loop_rows(sizes: Sizes) -> list[Row]:
    rounds = [r for rank in launch(measure_loop, 2, sizes) for r in rank]
    count = sum(p.numel() for p in language_model(*sizes.model).parameters())
    shares = {n: [100 * ((n - 1) * ours + last) / (n * rest) for rest, ours, last in rounds] for n in (100, 1000)}
    return [
        Row("loop", f"rest of a step, {count / 1e6:.1f} M parameters", "ms", [rest * 1e3 for rest, _, _ in rounds]),
        Row("loop", "library in an ordinary step", "us", [ours * 1e6 for _, ours, _ in rounds]),
        Row("loop", "library in a step that converges", "ms", [last * 1e3 for _, _, last in rounds]),
        Row("loop", "overhead at an interval of 100", "%", shares[100]),
        Row("loop", "overhead at an interval of 1000", "%", shares[1000], 0.1),
    ]


def make_parameters(elements: int, count: int) -> list[nn.Parameter]:
    """Matrices and vectors in turn, with `elements` elements or slightly less; their gradients take no room."""
    pair = elements // (count // 2)
    rows = int(pair**0.5) // 2
    made = [nn.Parameter(torch.randn(shape)) for shape in [(rows, pair // rows - 1), (rows,)] * (count // 2)]
    for parameter in made:
        parameter.grad = torch.zeros(()).expand(parameter.shape)
    return made


def ways_to_average(sizes: Sizes, count: int) -> dict[str, Callable[[], None]]:
    """Each has parameters of its own."""
    ours, each, torchs = (make_parameters(sizes.elements, count) for _ in range(3))
    flat = torch.randn(sum(p.numel() for p in ours))
    replicas, averager = Replicas(), PeriodicModelAverager(period=1, warmup_steps=0)

    def all_reduce(tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)
            tensor.div_(dist.get_world_size())

    return {
        "flat": lambda: all_reduce([flat]),
        "hdet": lambda: average(ours, replicas, sizes.bucket_bytes),
        SLOW: lambda: all_reduce([p.detach() for p in each]),
        "PeriodicModelAverager": lambda: averager.average_parameters(torchs),
    }


def extra_memory(call: Callable[[], None]) -> float:
    """By how many MB the resident memory rises at its peak during `call`."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before = re.findall(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    call()
    peak = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return (int(peak[0]) - int(before[0])) / 1024


def measure_converge(sizes: Sizes, count: int) -> dict[str, list[float]]:
    """For each way the extra MB of a first call, then the seconds of each turn. The slow one has two turns only."""
    ways = ways_to_average(sizes, count)
    found = {name: [0.0 if name == SLOW else extra_memory(way)] for name, way in ways.items()}
    for turn in range(sizes.converge_turns):
        for name in ways if turn % 2 else reversed(ways):
            if name != SLOW or turn < 2:
                dist.barrier()
                found[name].append(timeit(ways[name], number=1))
    return found


def converge_rows(sizes: Sizes, ranks: int, count: int, goal: float) -> list[Row]:
    results = launch(measure_converge, ranks, sizes, count)
    slowest = {name: [max(each) for each in zip(*(r[name][1:] for r in results), strict=True)] for name in results[0]}
    part, flat = f"{ranks} ranks", slowest.pop("flat")
    rows = [Row(part, f"{count} tensors: one flat all_reduce", "ms", [t * 1e3 for t in flat])]
    for name, times in slowest.items():
        ratios = [t / f for t, f in zip(times, flat, strict=False)]
        rows.append(Row(part, f"{count} tensors: {name} / flat", "x", ratios, goal if name == "hdet" else None))
    for name, most in (("hdet", 64), ("PeriodicModelAverager", None)):
        rows.append(Row(part, f"{count} tensors: extra memory of {name}", "MB", [r[name][0] for r in results], most))
    return rows


def write(sizes: Sizes, rows: list[Row], table: str) -> None:
    path = Path(__file__).parent / "results" / f"overhead-{datetime.date.today()}"
    cores = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    about = {
        "machine": f"{cores[0]}, {len(cores)} cores, no GPU, {platform.system()} {platform.release()}",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, hdet {hdet.__version__}",
        "command": f"python {' '.join(sys.argv)}",
    }
    everything = {**about, "sizes": asdict(sizes), "rows": [vars(row) for row in rows]}
    path.with_suffix(".json").write_text(json.dumps(everything, indent=1) + "\n")
    facts = "\n".join(f"- {name}: {fact}" for name, fact in about.items())
    path.with_suffix(".md").write_text(f"# Overhead\n\n{facts}\n\n{table}\n\n```text\n{__doc__}```\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--smoke", action="store_true", help="tiny sizes: it works, but the numbers mean nothing")
    either.add_argument("--write", action="store_true", help="write the table beside this file, under results/")
    parser.add_argument("--bucket-mb", type=float, default=BUCKET_BYTES / 2**20, help="the size of a converge's bucket")
    options = parser.parse_args()
    multiprocessing.set_forkserver_preload(["torch", "hdet", "torch._dynamo"])  # the last comes with an optimizer
    sizes = replace(SMOKE if options.smoke else Sizes(), bucket_bytes=int(options.bucket_mb * 2**20))
    rows = [*step_rows(sizes), *loop_rows(sizes)]
    for ranks in sizes.ranks:
        for count, goal in zip(sizes.tensors, (1.2, 1.5), strict=True):
            rows += converge_rows(sizes, ranks, count, goal)
    head = f"| {'part':8} | {'what':52} | {'median (10 to 90 %)':30} | {'goal':22} |\n|---|---|---|---|"
    table = "\n".join([head, *(row.line() for row in rows)])
    print(table)
    if options.write:
        write(sizes, rows, table)


if __name__ == "__main__":
    main()
