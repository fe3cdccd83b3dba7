"""Made-up runs of any size, written as `hdet.JSONLines` writes them: for pages, where only the shape matters."""

import math
import random

from hdet.records.json_lines import to_line
from hdet.records.record import HyperparameterRecord, RoundRecord


def make_records(rounds, replicas=8, names=("learning_rate",), seed=0, total=None, last=True):
    """Rounds of 5 steps in which a line search finds a rate that is too low."""
    draw, scale, total = random.Random(seed), 1.0, total or 5 * rounds
    ladder = [0.5 * 4 ** (k / max(replicas - 1, 1)) for k in range(replicas)]
    for number in range(rounds):
        step = 5 * (number + 1)
        base = 1e-3 * (0.02 + math.sin(math.pi * min(1.0, step / total)) ** 2)
        a, b = -0.02 * math.exp(-number / rounds), 0.01 * scale / 8
        dealt = draw.sample(ladder, replicas)
        start = 2.0 + 1.5 * math.exp(-4 * number / rounds) + draw.gauss(0, 0.02)
        probe = tuple(start + a * rho + b * rho * rho + draw.gauss(0, 2e-4) for rho in dealt)
        scores = tuple(loss + draw.gauss(0, 0.02) for loss in probe)
        after = scale * math.exp(0.05 * math.log(8 / scale) + draw.gauss(0, 0.01))
        memory = {"slope": a, "curvature": b, "target": 0.5}
        error = 0.3 / math.sqrt(number) if number else math.inf
        rows = {
            name: HyperparameterRecord(
                base, base * scale, tuple(base * scale * rho for rho in dealt), after, after, memory,
                math.log(8 / scale), error, f"{name}: x{8:.2f} +- {8 * error:.2f}", scale, ("0/0/lr",),
                (base * scale,), (base * scale,),
            )
            for name in names
        }  # fmt: skip
        events = ("rolled back at step 500 to the weights of step 450: the loss was nan",) if number == 100 else ()
        ends = last and number == rounds - 1
        seconds = 0.5 + draw.random() / 10
        yield RoundRecord(
            number,
            step,
            True,
            scores,
            rows,
            probe,
            start if number else None,
            seconds,
            0.01,
            0.05,
            events,
            5,
            total,
            ends,
        )
        scale = after


def write_run(folder, *args, now=1e9, written_by="elsewhere:1", **kwargs):
    """The folder of such a run."""
    folder.mkdir(parents=True, exist_ok=True)
    records = list(make_records(*args, **kwargs))
    text = "".join(to_line(record, now + record.step, written_by) for record in records)
    (folder / "rounds.jsonl").write_text(text)
    return records
