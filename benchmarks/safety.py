"""What safety costs: guard, quarantine, atomic converge, snapshots and agreement. CPU and gloo, one thread per rank.

All with AdamW on the transformer of `overhead.py`: 10 million parameters, 256 tokens per rank, in DDP on 2 ranks.

guard     The gradient guard's hooks against the rest of the step, with the default (foreach) and the fused optimizer.
converge  What the guard adds to the end of a round (are weights and state finite?), and what `atomic=True` adds,
          against averaging the same weights.
snapshot  `Rollback`: taking and putting back a snapshot of weights, moments and buffers; the memory of a share.
agreement The exchange when an ensemble is made, on 2 and 4 ranks.

    python benchmarks/safety.py --write    # to benchmarks/results/safety-DATE.md
"""

from __future__ import annotations

import argparse
import datetime
import platform
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from overhead import SMOKE, VOCABULARY, Row, Sizes, language_model, launch
from torch import nn

import hdet
from hdet._phases.guard.gradients import GradientGuard, finite
from hdet._replicas import Replicas
from hdet._tensors import optimizer_state
from hdet._tensors.converge import average
from hdet._tensors.snapshot import Snapshot


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, sizes: Sizes) -> None:
    tokens = torch.randint(VOCABULARY, sizes.tokens)
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def measure_guard(sizes: Sizes, fused: bool) -> list[list[float]]:
    """Seconds of the rest of a step and of the guard in it."""
    model = nn.parallel.DistributedDataParallel(language_model(*sizes.model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
    guard, spent = GradientGuard([optimizer]), []

    def timed(hook: Any, *args: Any) -> Any:
        begin = perf_counter()
        result = hook(*args)
        spent.append(perf_counter() - begin)
        return result

    for table in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
        table.update({key: partial(timed, hook) for key, hook in table.items()})
    found = []
    for _ in range(sizes.rounds * sizes.interval):
        spent.clear()
        begin = perf_counter()
        train_step(model, optimizer, sizes)
        found.append([perf_counter() - begin - sum(spent), sum(spent)])
    guard.close()
    return found[sizes.interval :]


def measure_round_end(sizes: Sizes) -> dict[str, list[float]]:
    """Seconds of each part, by name; "share" is the memory of a snapshot in MB."""
    model = nn.parallel.DistributedDataParallel(language_model(*sizes.model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    train_step(model, optimizer, sizes)
    weights, state, replicas = [p.detach() for p in model.parameters()], optimizer_state.all_of([optimizer]), Replicas()
    snapshot = Snapshot(replicas)
    snapshot.save([*weights, *state])
    ways = {
        "average": lambda: average(weights, replicas),
        "atomic": lambda: average(weights, replicas, atomic=True),
        "finite": lambda: bool(finite([*weights, *state], torch.device("cpu"))),
        "save": lambda: snapshot.save([*weights, *state]),
        "restore": lambda: snapshot.restore([*weights, *state]),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(sizes.converge_turns):
        for name, way in ways.items():
            dist.barrier()
            begin = perf_counter()
            way()
            found[name].append(perf_counter() - begin)
    return {**found, "share": [snapshot.nbytes / 2**20], "all": [sum(t.nbytes for t in (*weights, *state)) / 2**20]}


def measure_agreement(sizes: Sizes) -> list[float]:
    """Seconds of making an ensemble, from the last replica's arrival on, less what that takes alone."""
    model = language_model(*sizes.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    found = []
    for _ in range(sizes.converge_turns):
        dist.barrier()
        begin = perf_counter()
        ensemble = hdet.Ensemble(optimizer, [hdet.learning_rate(optimizer, spread=0.3)], interval=5, model=model)
        found.append(perf_counter() - begin)
        ensemble.close()
    return found


def rows(sizes: Sizes) -> list[Row]:
    found = []
    for fused in (False, True):
        steps = [step for rank in launch(measure_guard, 2, sizes, fused) for step in rank]
        name = "fused" if fused else "foreach"
        found.append(Row("guard", f"rest of a step, {name}", "ms", [rest * 1e3 for rest, _ in steps]))
        found.append(Row("guard", f"the guard in it, {name}", "ms", [ours * 1e3 for _, ours in steps]))
        share = [100 * ours / rest for rest, ours in steps]
        found.append(Row("guard", f"of the rest, {name}", "%", share, 1.0))
    parts = launch(measure_round_end, 2, sizes)
    for name in ("average", "atomic", "finite", "save", "restore"):
        slowest = [max(turn) * 1e3 for turn in zip(*(part[name] for part in parts), strict=True)]
        found.append(Row("round", _SAID[name], "ms", slowest))
    found.append(Row("round", "memory of a snapshot, on each of 2 replicas", "MB", parts[0]["share"] * 2))
    found.append(Row("round", "of weights and optimizer state", "MB", parts[0]["all"] * 2))
    for ranks in sizes.ranks:
        times = [max(turn) for turn in zip(*launch(measure_agreement, ranks, sizes), strict=True)]
        found.append(Row("start", f"making an ensemble, agreement included, {ranks} ranks", "s", times, 2.0))
    return found


_SAID = {
    "average": "averaging the weights",
    "atomic": "the same with atomic=True",
    "finite": "guard: are weights and optimizer state finite?",
    "save": "taking a snapshot of weights and optimizer state",
    "restore": "putting it back",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results/")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to see that it runs")
    options = parser.parse_args()
    table = "\n".join(row.line() for row in rows(SMOKE if options.smoke else Sizes(converge_turns=15)))
    print(table)
    if options.write:
        today = datetime.date.today().isoformat()
        about = (
            f"{platform.machine()}, {platform.python_version()}, torch {torch.__version__}, gloo, one thread per rank"
        )
        text = f"# What safety costs, {today}\n\n`python benchmarks/safety.py --write`. {about}.\n"
        text += "Median (10th to 90th percentile) of turns.\n\n| part | what | measured | goal |\n|---|---|---|---|\n"
        (Path(__file__).parent / "results" / f"safety-{today}.md").write_text(f"{text}{table}\n")


if __name__ == "__main__":
    main()
