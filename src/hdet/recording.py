"""What a round's record says of the hyperparameters: noted at its first step, put together at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.optim import Optimizer

from hdet.controllers import Observation, Steering
from hdet.hyperparameters.hyperparameter import Hyperparameter, representative
from hdet.range_test.found_rate import FoundRate
from hdet.record import HyperparameterRecord, SearchRecord
from hdet.rounds import Rounds
from hdet.values import Values


def search_record(found: FoundRate) -> SearchRecord:
    """What a record says of a search."""
    return SearchRecord(
        rate=found.rate,
        start=found.rate / found.scale,
        interval=found.interval,
        whole=found.whole,
        factor=found.factor,
        first_loss=found.first_loss,
        coarse=tuple((rate, loss) for rate, loss in found.coarse),
        fine=tuple((rate, loss) for rate, loss in found.fine),
        steps=found.steps,
        cost=found.cost,
        seconds=found.seconds,
        doubts=found.doubts,
    )


class Recorder:
    """Sees the hyperparameters of one ensemble as controllers and records do.

    Args:
        hyperparameters: all of them, explored or not.
        optimizers: whose groups they may live in.
        values: what this replica trains with.
        rounds: which slots were dealt.
    """

    def __init__(
        self,
        hyperparameters: Sequence[Hyperparameter],
        optimizers: Sequence[Optimizer],
        values: Values,
        rounds: Rounds,
    ) -> None:
        self._hyperparameters, self._optimizers = hyperparameters, optimizers
        self._values, self._rounds = values, rounds
        self._first: dict[str, list[float | Tensor]] = {}  # the bases of the round's first step, by name

    def open(self) -> None:
        """Before the first step of a round."""
        # A scheduler overwrites a tensor learning rate in place: keep what this step uses, without reading it back.
        self._first = {
            h.name: [base.clone() if isinstance(base, Tensor) else base for base in h.bases()]
            for h in self._hyperparameters
        }

    def forget(self) -> None:
        """After a resume: where the round began is not known."""
        self._first.clear()

    def observe(self, scales: Mapping[str, float]) -> dict[str, Observation]:
        """What a controller is told of each hyperparameter at the end of a round that was trained at `scales`."""
        return {h.name: self._observe(h, scales[h.name]) for h in self._hyperparameters}

    def rows(
        self,
        seen: Mapping[str, Observation],
        trained: Mapping[str, float],
        proposed: Mapping[str, float],
        steering: Steering,
    ) -> dict[str, HyperparameterRecord]:
        """The record's part about each hyperparameter.

        Args:
            seen: what `observe()` said before the controller moved.
            trained: the scales of the round, by name.
            proposed: those that the controller asks for.
            steering: the controller, and the scales from now on.
        """
        rows = {}
        for h in self._hyperparameters:
            coming, scale = list(h.bases()), trained[h.name]
            used = self._values.used(h) or coming
            base = representative(used, coming)[0]
            rows[h.name] = HyperparameterRecord(
                base,
                h.center(base, scale),
                h.values_of(base, scale, seen[h.name].multipliers),
                steering.scales[h.name],
                proposed[h.name],
                **steering.confidence(h.name, scale, self._rounds.ever_explores(h))._asdict(),
                scale_before=scale,
                places=h.places(self._optimizers),
                first=tuple(h.center(float(b), scale) for b in self._first.get(h.name, ())),
                last=tuple(h.center(float(b), scale) for b in used),
            )
        return rows

    def _observe(self, h: Hyperparameter, scale: float) -> Observation:
        coming = list(h.bases())
        used = self._values.used(h) or coming
        base, next_base = representative(used, coming)
        dealt = self._rounds.dealt[h.name]
        limits = h.limits(next_base, len(dealt))
        multipliers = h.within_bounds([float(x) for x in used], scale, dealt) if h.is_bounded else dealt
        told, following = h.steered(base, scale), h.steered(next_base, scale)
        return Observation(told, following, h.floor, multipliers, h.peak(), limits)
