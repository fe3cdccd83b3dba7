"""The losses that replicas are judged by in a round: their mean training losses, and the probe's if there is one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hdet._probe.probe import Probe
from hdet._probe.score import Loss, Score, as_loss, typical
from hdet._replicas import Replicas
from hdet._user_warning import warn

AnyProbe = Probe | Callable[[int], Loss]
_NUMBERS = 7


class Judged(NamedTuple):
    """One round, the same on every replica.

    Attributes:
        scores: mean training loss of each replica; NaN if no loss was given.
        probe: loss of each replica's last weights on the round's probe; None without a probe.
        start: probe loss of the weights at the start of the round; None if not measured.
        given: whether every replica was given a loss in this round.
        early: mean of the round's first losses, over the replicas that marked it; None if none did.
        first: mean loss of the run's first step, likewise.
    """

    scores: tuple[float, ...]
    probe: tuple[float, ...] | None
    start: float | None
    given: bool = True
    early: float | None = None
    first: float | None = None


class Judge:
    """Sums this replica's losses, scores its weights, and reads the gathered numbers of all replicas.

    Args:
        probe: a `Probe`, a callable that takes a number and returns the loss of the current weights on data that
            depend on the number alone, or None.
        model: the model, for a `Probe`.

    Attributes:
        score: the mean training loss of the round so far.
        seconds: time spent on the probe in this round, on this replica.
        seconds_at_end: the part of it spent at the round's end.
    """

    def __init__(self, probe: AnyProbe | None, model: nn.Module | None) -> None:
        self.score = Score()
        self.seconds = self.seconds_at_end = 0.0
        self._probe = probe
        self._model = model
        self._start: Tensor | None = None

    @property
    def probes(self) -> bool:
        """Whether there is a probe."""
        return self._probe is not None

    def begin(self, index: int, replicas: Replicas) -> None:
        """Score the weights at the start of the round, which all replicas hold: each scores its share of the data."""
        began = self._now()
        if isinstance(self._probe, Probe) and self._model is not None:
            self._start = self._probe.share(self._model, index, replicas)
        elif self._probe is not None:
            loss = _scalar(self._call(index))
            self._start = torch.stack([loss, torch.ones_like(loss)])
        self.seconds += self._now() - began

    def end(self, index: int, full: bool, replicas: Replicas, device: torch.device) -> Tensor:
        """Score the weights after a full round; return this replica's numbers, a float64 vector on `device`."""
        began = self._now()
        vector = torch.full((_NUMBERS,), math.nan, dtype=torch.float64, device=device)
        vector[0] = self.score.mean(device)
        if full and isinstance(self._probe, Probe) and self._model is not None:
            vector[1] = self._probe.score(self._model, index, replicas)
        elif full and self._probe is not None:
            vector[1] = _scalar(self._call(index))
        if self._start is not None:
            vector[2:4] = self._start.to(device)
        vector[4] = self.score.count
        vector[5] = self.score.early_mean(device)
        vector[6] = self.score.first_mean(device)
        self.seconds_at_end = self._now() - began
        self.seconds += self.seconds_at_end
        return vector

    def loss(self, index: int, replicas: Replicas, device: torch.device) -> float:
        """The loss of weights that all replicas hold on probe `index`: each scores its share. Collective.

        If the probe of an unsharded replica raises, the loss is NaN, with a warning, and the run continues.
        """
        try:
            self.begin(index, replicas)
        except Exception as error:
            if replicas.sharded:  # the others of this replica wait for it
                raise
            self._start = torch.tensor([math.nan, 1.0], dtype=torch.float64)
            warn(f"the probe raised {type(error).__name__} at index {index}: {error}")
        assert self._start is not None
        table = replicas.gather(self._start.to(device))
        self._start = None
        return sum(row[0] for row in table) / sum(row[1] for row in table)

    def read(self, table: Sequence[Sequence[float]], full: bool) -> Judged:
        """Read the gathered numbers."""
        scores = tuple(row[0] for row in table)
        given = all(row[4] > 0 for row in table)
        early, first = _known([row[5] for row in table]), _known([row[6] for row in table])
        if self._probe is None or not full:
            return Judged(scores, None, None, given, early, first)
        weight = sum(row[3] for row in table)
        start = sum(row[2] for row in table) / weight if weight > 0 else None  # NaN is not more than 0
        return Judged(scores, tuple(row[1] for row in table), start, given, early, first)

    def reset(self) -> None:
        """Begin a new round."""
        self.score.reset()
        self._start = None
        self.seconds = self.seconds_at_end = 0.0

    def state_dict(self) -> dict[str, Any]:
        """The measurements of this round so far."""
        start = None if self._start is None else self._start.tolist()
        return {**self.score.state_dict(), "start": start}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`."""
        self.score.load_state_dict(state)
        start = state.get("start")
        repeats = not isinstance(self._probe, Probe) or self._probe.repeats
        if start is not None and repeats:  # an iterable does not give the same batches again
            self._start = torch.tensor(start, dtype=torch.float64)
        else:
            self._start = None

    def _now(self) -> float:
        """The time; with a probe, after a GPU has finished its queue, so that earlier work is not charged to it."""
        if self.probes and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        return time.perf_counter()

    def _call(self, index: int) -> Loss:
        assert self._probe is not None
        assert not isinstance(self._probe, Probe)
        with torch.no_grad():
            return self._probe(index)


def _known(losses: Sequence[float]) -> float | None:
    """The mean of those that are finite."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    return typical(finite) if finite else None


def _scalar(loss: Loss) -> Tensor:
    return torch.as_tensor(as_loss(loss), dtype=torch.float64)
