"""The methods that benchmarks/quality.py compares, and one run of one of them."""

from __future__ import annotations

import collections
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

STARTS = {"1/30": 1 / 30, "1/10": 1 / 10, "1/3": 1 / 3, "1": 1.0, "3": 3.0, "10": 10.0}
_EVALUATIONS, _LEAST = 20, 10  # in a run, for how fast the loss falls; steps between two


class Method(NamedTuple):
    """How a method is run.

    Attributes:
        what: in words, for the tables.
        options: those of the lab's run that differ from the plain schedule's.
        rates: the rates that it is run at, if it does not begin from a user's rate: its own constants.
        starts: multiples of the best rate that the whole set runs it from, if it does.
        kind: "hdet" trains as the lab does, the others are those of benchmarks/peers.
        argument: of that kind.
    """

    what: str
    options: dict[str, Any] = {}  # noqa: RUF012
    rates: tuple[float, ...] = ()
    starts: tuple[str, ...] = tuple(STARTS)
    kind: str = "hdet"
    argument: Any = None


_FEW = ("1/10", "1", "10")
METHODS = {
    "plain": Method("OneCycleLR", {"controller": "none"}),
    "paper": Method("the paper's controller", {"controller": "softmax", "temperature": 0.1}),
    "auto": Method("`Auto`", {"controller": "auto", "charge": True}),
    "line search": Method("`LineSearch`", {"controller": "line_search", "charge": True}, starts=()),
    "hypergradient": Method("hypergradient descent, additive, on OneCycleLR", kind="hypergradient"),
    "hypergradient, constant": Method(
        "hypergradient descent as published, no schedule", starts=_FEW, kind="hypergradient", argument="constant"
    ),
    "hypergradient, relative": Method(
        "hypergradient descent, multiplicative, on OneCycleLR", starts=_FEW, kind="hypergradient", argument="relative"
    ),
    "population, batch": Method(
        "population of 4, a quarter of the batch each", starts=_FEW, kind="population", argument="batch"
    ),
    "population, steps": Method(
        "population of 4, a quarter of the steps each", starts=_FEW, kind="population", argument="steps"
    ),
    "prodigy": Method("Prodigy, lr 1, cosine", rates=(1.0,), kind="prodigy"),
    "d-adaptation": Method("D-Adaptation Adam, lr 1, OneCycleLR", rates=(1.0,), kind="d-adaptation"),
    "range test": Method(
        "range test, a tenth of its minimum, then OneCycleLR", rates=(1e-7,), kind="range test", argument="minimum"
    ),
    "range test, steepest": Method(
        "range test, its steepest point, then OneCycleLR", rates=(1e-7,), kind="range test", argument="steepest"
    ),
    "schedule-free": Method("Schedule-Free AdamW", rates=(1e-3, 2.5e-3, 1e-2), kind="schedule-free"),
}
SCHEDULE_FREE_DEFAULT = 2.5e-3


def one(run: dict, steps: int | None = None) -> dict:
    """Train once in this process; the run with its held-out loss and its cost.

    With plain DDP and no fan-out four replicas are one process with the global batch, up to rounding, and are run as
    that; a model with BatchNorm (digits), and every method that fans out, is run with four replicas in one process.

    `stepped` counts the steps of each class of optimizer, as torch's own hook saw them.
    """
    import torch  # noqa: PLC0415

    from hdet import Auto  # noqa: PLC0415
    from hdet_lab.options import RunOptions  # noqa: PLC0415

    torch.set_num_threads(1)
    method = METHODS[run["method"]]
    options = RunOptions(
        run["task"], size=run["size"], seed=run["seed"], optimizer=run["optimizer"], peak_lr=run["peak_lr"],
        steps=steps, **{"controller": "none", **method.options},
    )  # fmt: skip
    searches = run["method"] == "auto" and options.make_task().steps <= Auto.short
    fans_out = searches or run["method"] in ("paper", "line search")
    alone = method.kind == "population" or (not fans_out and run["task"] != "digits")
    options = options.replace(replicas=1 if alone else 4)
    started, worked = time.time(), time.process_time()
    with _counted() as stepped:
        result, curve = _trained(method, options)
    used = {name: result.get(name) for name in ("steps", "finder_steps", "finder_cost")}
    used["used_lr"] = result["peak_lr"]
    found = {"held_out": (result["held_out"] or {}).get("loss"), **used, "cost": round(result.get("cost", 1.0), 4)}
    took = {"seconds": round(time.time() - started, 1), "cpu_seconds": round(time.process_time() - worked, 3)}
    return {**run, **found, **took, "stepped": dict(stepped), "curve": curve}


def _trained(method: Method, options: Any) -> tuple[dict, list]:
    """The result of a run, and its held-out losses on the way: compute in plain steps, seconds, loss."""
    from peers.population import population  # noqa: PLC0415

    import hdet  # noqa: PLC0415
    from hdet_lab.folder import read_lines  # noqa: PLC0415

    if method.kind == "population":
        return population(options, method.argument), []
    length = options.make_task().steps
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        try:
            result = hdet.in_process(_KINDS[method.kind], options.replicas, method, options, path, length)[0]
        except hdet.ReplicaError as error:
            if "the run has diverged" not in str(error):
                raise
            return {"held_out": None, "steps": length, "peak_lr": options.peak_lr}, []
        lines = read_lines(path / "held_out.jsonl")
    steps = result["steps"]
    before = length - steps if result.get("finder_steps") else 0  # a finder is paid at once, probes as the run goes
    each = (length - before) / steps
    end = {"step": steps, "seconds": result["seconds"], "loss": (result["held_out"] or {}).get("loss")}
    lines = [line for line in lines if line["step"] < steps] + [end]
    curve = [[round(before + each * line["step"]), line["seconds"], line["loss"]] for line in lines]
    return result, curve


def _train(method: Method, options: Any, folder: Path, length: int, recipe: Any = None, **changes: Any) -> dict:
    from hdet_lab.recipe import ONE_CYCLE  # noqa: PLC0415
    from hdet_lab.train import train  # noqa: PLC0415

    options = options.replace(evaluate_every=max(_LEAST, length // _EVALUATIONS), **changes)
    result = train(options, folder, recipe or ONE_CYCLE)
    found = getattr(recipe, "found", None)
    return result if found is None else {**result, "peak_lr": found}


def _hypergradient(method: Method, options: Any, folder: Path, length: int) -> dict:
    from peers.hypergradient import Hypergradient  # noqa: PLC0415

    rule = "relative" if method.argument == "relative" else "additive"
    return _train(method, options, folder, length, Hypergradient(rule, constant=method.argument == "constant"))


def _prodigy(method: Method, options: Any, folder: Path, length: int) -> dict:
    from peers.optimizers import Prodigy  # noqa: PLC0415

    return _train(method, options, folder, length, Prodigy())


def _d_adaptation(method: Method, options: Any, folder: Path, length: int) -> dict:
    from peers.optimizers import DAdaptation  # noqa: PLC0415

    return _train(method, options, folder, length, DAdaptation())


def _schedule_free(method: Method, options: Any, folder: Path, length: int) -> dict:
    from peers.optimizers import ScheduleFree, has_batch_norm  # noqa: PLC0415

    result = _train(method, options, folder, length, ScheduleFree(length))
    again = ScheduleFree.recalibration / 3 if has_batch_norm(options.make_task().model()) else 0.0
    return {**result, "cost": 1 + again / length}


def _range_test(method: Method, options: Any, folder: Path, length: int) -> dict:
    from peers.range_test import range_test  # noqa: PLC0415

    rate, taken = range_test(options, method.argument)
    result = _train(method, options, folder, length, steps=length - taken, peak_lr=rate)
    return {**result, "finder_steps": taken}


_KINDS: dict[str, Callable[..., dict]] = {
    "hdet": _train,
    "hypergradient": _hypergradient,
    "prodigy": _prodigy,
    "d-adaptation": _d_adaptation,
    "schedule-free": _schedule_free,
    "range test": _range_test,
}


@contextmanager
def _counted() -> Iterator[collections.Counter]:
    """Counts the optimizer steps within it, by class, through torch's hook for all optimizers."""
    from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: PLC0415

    found: collections.Counter = collections.Counter()

    def count(optimizer: Any, args: Any, kwargs: Any) -> None:
        kind = next(k for k in type(optimizer).__mro__ if not k.__module__.startswith("hdet"))
        found[f"{kind.__module__.partition('.')[0]}.{kind.__name__}"] += 1

    handle = register_optimizer_step_post_hook(count)
    try:
        yield found
    finally:
        handle.remove()
