"""`hdet plan`: predicts a run's cost in time, traffic and memory. `link.py` measures the constants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hdet_lab.errors import OptionError
from hdet_lab.link import Timing
from hdet_lab.quantities import show_bytes, show_part, show_seconds
from hdet_lab.tables import table

BUCKET = 16 * 2**20
"""Size of a bucket in a converge, in bytes."""


@dataclass(frozen=True)
class Link:
    """The cost model of a converge: a ring all-reduce in buckets, and the copies into and out of them.

    For B bytes between N replicas it takes::

        seconds = crowd (fixed + 2 (N - 1) messages latency + 2 (N - 1) / N B / bandwidth + B / copying)
        messages = 1 + ceil(B / 16 MB)          the small vector, and the buckets

    Attributes:
        bandwidth: of one rank, in bytes per second and direction.
        latency: of one hop, in seconds.
        copying: speed of copies into and out of buckets, in bytes per second.
        fixed: seconds per converge, whatever its size.
        cores: cores per machine, if ranks compute on the CPU and take turns when there are more of them than cores; 0
            if each rank has its own device.
    """

    bandwidth: float
    latency: float = 10e-6
    copying: float = math.inf
    fixed: float = 0.0
    cores: int = 0

    def seconds(self, replicas: int, nbytes: float) -> float:
        """Duration of a converge."""
        if replicas == 1:
            return 0.0
        parts = _parts(replicas, nbytes, self.cores)
        costs = (self.fixed, self.latency, 1 / self.bandwidth, 1 / self.copying)
        return math.fsum(part * cost for part, cost in zip(parts, costs, strict=True))


def _parts(replicas: int, nbytes: float, cores: int) -> tuple[float, float, float, float]:
    """The factors on fixed, latency, 1 / bandwidth and 1 / copying."""
    crowd = max(1.0, replicas / cores) if cores else 1.0
    hops = 2 * (replicas - 1)
    messages = 1 + math.ceil(nbytes / BUCKET)
    return crowd, crowd * hops * messages, crowd * hops / replicas * nbytes, crowd * nbytes


def fit(timings: Sequence[Timing], cores: int) -> Link:
    """Fit a link to timings by non-negative least squares of the relative error."""
    rows = [[part / t.seconds for part in _parts(t.replicas, t.nbytes, cores)] for t in timings]
    matrix, ones = torch.tensor(rows, dtype=torch.float64), torch.ones(len(rows), 1, dtype=torch.float64)
    scale = matrix.norm(dim=0)
    used = list(range(len(scale)))
    while True:
        costs = torch.linalg.lstsq(matrix[:, used] / scale[used], ones, driver="gelsd").solution.flatten() / scale[used]
        if bool((costs >= 0).all()):
            break
        used.pop(int((costs * scale[used]).argmin()))
    found = dict(zip(used, costs.tolist(), strict=True))
    fixed, latency, per_byte, per_copy = (found.get(number, 0.0) for number in range(4))
    return Link(1 / per_byte if per_byte else math.inf, latency, 1 / per_copy if per_copy else math.inf, fixed, cores)


@dataclass(frozen=True)
class RunPlan:
    """A planned run.

    Attributes:
        params: parameters of the model.
        replicas: number of replicas.
        step_time: seconds of one training step without hdet.
        interval: steps of a round.
        link: the link between replicas.
        shard: ranks that share one replica's model (FSDP); each averages its part.
        local: gradients are not shared.
        average_state: average the optimizer state too; None for the default, which is yes with local gradients.
        state: tensors of optimizer state per parameter; 2 with Adam.
        width: bytes of a parameter in memory.
        copies: copies of the trained parameters that the outer step holds: 0, 1, or 2 with momentum.
        rollback: keep a snapshot.
        probe: global batches of a probe.
        tail_average: hold the mean of the last part of the run.

    Raises:
        OptionError: for impossible values.
    """

    params: float
    replicas: int
    step_time: float
    interval: int
    link: Link
    shard: int = 1
    local: bool = False
    average_state: bool | None = None
    state: int = 2
    width: int = 4
    copies: int = 0
    rollback: bool = False
    probe: float = 0.0
    tail_average: bool = False

    def __post_init__(self) -> None:
        for name, least in (("replicas", 2), ("interval", 1), ("shard", 1), ("state", 0)):
            if getattr(self, name) < least:
                raise OptionError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.average_state is False and not self.local:
            raise OptionError(
                "average_state has no effect with shared gradients; leave it out, or add --gradients local"
            )

    @property
    def averaged(self) -> float:
        """Bytes that a rank averages in a converge; half precision is averaged in single precision."""
        averaged = self.local if self.average_state is None else self.average_state
        return 4 * self.params / self.shard * (1 + (self.state if averaged else 0))

    @property
    def converge_seconds(self) -> float:
        """Of one converge."""
        return self.link.seconds(self.replicas, self.averaged)

    @property
    def probe_seconds(self) -> float:
        """Seconds to score all replicas and the start: a forward pass is a third of a step; each sees all samples."""
        return (self.replicas + 1) * self.probe / 3 * self.step_time

    @property
    def overhead(self) -> float:
        """The overhead of a round relative to its training time."""
        return (self.converge_seconds + self.probe_seconds) / (self.interval * self.step_time)

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in a converge."""
        return _ring(self.replicas) * self.averaged

    @property
    def gradient_bytes(self) -> float:
        """Bytes that a rank sends in each step to share gradients, as DDP does: in the parameters' precision."""
        return _ring(self.replicas) * self.width * self.params / self.shard

    @property
    def sent_per_step(self) -> float:
        """Bytes that a rank sends per step, including shared gradients."""
        return self.sent / self.interval + (0.0 if self.local else self.gradient_bytes)

    @property
    def memory(self) -> dict[str, float]:
        """Bytes that a rank needs on top of training, by purpose."""
        mine = self.params / self.shard
        weights = mine * self.width
        copy = mine * (self.width if self.copies == 1 else max(self.width, 4))
        own = 1 if self.average_state is False else self.replicas  # a replica's own state cannot be split
        kept = weights / self.replicas + mine * 4 * self.state / own
        return {
            "while it averages": min(2.0 * BUCKET, 2 * self.averaged),
            "the outer step": self.copies * copy,
            "the tail average": mine * max(self.width, 4) if self.tail_average else 0.0,
            "the snapshot of a rollback": kept if self.rollback else 0.0,
            "within consensus()": weights,
        }

    def least_interval(self, overhead: float) -> int:
        """The smallest interval with at most this overhead."""
        exact = (self.converge_seconds + self.probe_seconds) / (overhead * self.step_time)
        return max(1, math.ceil(exact * (1 - 1e-12)))


def _ring(replicas: int) -> float:
    return 2 * (replicas - 1) / replicas


def show(plan: RunPlan, overhead: float | None) -> str:
    """The plan as text."""
    ranks = plan.replicas * plan.shard
    rows = [
        ["one converge", show_seconds(plan.converge_seconds)],
        *([["one probe", show_seconds(plan.probe_seconds)]] if plan.probe else []),
        [f"overhead at interval {plan.interval}", show_part(plan.overhead)],
        *([[f"smallest interval for {show_part(overhead)}", str(plan.least_interval(overhead))]] if overhead else []),
        ["a rank sends per converge", show_bytes(plan.sent)],
        ["a rank sends per step", show_bytes(plan.sent_per_step)],
        ["plain DDP's, between replicas", show_bytes(plan.gradient_bytes)],
        *([["of DDP's", f"1/{plan.gradient_bytes / plan.sent_per_step:.0f}"]] if plan.local else []),
        *([f"memory of a rank: {what}", show_bytes(size)] for what, size in plan.memory.items() if size),
    ]
    about = f"{plan.replicas} replicas" + (f" of {plan.shard} ranks each, {ranks} ranks" if plan.shard > 1 else "")
    return table([about, ""], rows) + f"\n\n{describe(plan.link)}"


def describe(link: Link) -> str:
    """The constants of the model."""
    parts = [f"bandwidth {show_bytes(link.bandwidth)}/s" if link.bandwidth < math.inf else "bandwidth without limit"]
    parts.append(f"{show_seconds(link.latency)} per hop")
    if link.copying < math.inf:
        parts.append(f"copies at {show_bytes(link.copying)}/s")
    if link.fixed:
        parts.append(f"{show_seconds(link.fixed)} for each converge")
    if link.cores:
        parts.append(f"ranks take turns on {link.cores} cores")
    return "Model: a ring all-reduce; " + ", ".join(parts) + "."


def errors(link: Link, timings: Sequence[Timing]) -> list[float]:
    """The relative error of the prediction for each timing: 0.1 is a tenth too long."""
    return [link.seconds(t.replicas, t.nbytes) / t.seconds - 1 for t in timings]


def show_fit(timings: Sequence[Timing], cores: int) -> str:
    """The timings, the fitted model's predictions, and those for the most replicas by a fit to the others."""
    link = fit(timings, cores)
    off = errors(link, timings)
    rows = [
        [f"{t.replicas} replicas, {show_bytes(t.nbytes)}", show_seconds(t.seconds),
         show_seconds(link.seconds(t.replicas, t.nbytes)), f"{100 * error:+.0f} %"]
        for t, error in zip(timings, off, strict=True)
    ]  # fmt: skip
    text = table(["a converge", "measured", "model", "error"], rows)
    text += f"\n\n{describe(link)}\nError of the fit: {_summary(off)}."
    most = max(t.replicas for t in timings)
    fewer, unseen = [t for t in timings if t.replicas < most], [t for t in timings if t.replicas == most]
    if len({t.replicas for t in fewer}) > 1:
        told = errors(fit(fewer, cores), unseen)
        text += f"\nError at {most} replicas of a fit to fewer: {_summary(told)}."
    return text


def _summary(off: Sequence[float]) -> str:
    sizes = sorted(abs(error) for error in off)
    return f"median {100 * sizes[len(sizes) // 2]:.0f} %, most {100 * sizes[-1]:.0f} %"
