"""Control: the controller sees the replicas' results and moves the scales."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hdet._explore.hyperparameter import Hyperparameter, representative
from hdet._phases.phase import Phase, Round, State
from hdet._run.run import Run
from hdet.controllers import Observation, Report
from hdet.records.record import HyperparameterRecord


class Control(Phase):
    """Shows full rounds to the controller, and records the values and decisions for each hyperparameter."""

    name = "control"

    def __init__(self, run: Run) -> None:
        self._run = run
        self._first: dict[str, list[float | Tensor]] = {}  # the bases of the round's first step, by name

    def begin(self) -> None:
        # A scheduler overwrites a tensor learning rate in place: keep what this step uses, without reading it back.
        self._first = {
            h.name: [base.clone() if isinstance(base, Tensor) else base for base in h.bases()]
            for h in self._run.settings.hyperparameters
        }

    def resumed(self) -> None:
        self._first.clear()  # unknown after a resume

    def after(self, rnd: Round) -> None:
        self._steer(rnd, full=rnd.full and rnd.compares and not rnd.last)

    def undone(self, rnd: Round) -> None:
        self._steer(rnd, full=False)
        self._run.steering.scale_by(rnd.cut, self._run.settings.rates, forget=True)
        rows = rnd.record["hyperparameters"]
        rnd.record["hyperparameters"] = {
            name: replace(row, scale=self._run.steering.scales[name]) for name, row in rows.items()
        }

    def reset(self) -> None:
        self._run.steering.reset()

    def state_dict(self) -> State:
        return {"controller": self._run.steering.state_dict()}

    def load_state_dict(self, state: State, own: State) -> None:
        self._run.steering.load_state_dict(state["controller"])

    def observe(self) -> dict[str, Observation]:
        """The observation of each hyperparameter for the controller."""
        scales = self._run.scales
        return {h.name: self._observe(h, scales[h.name]) for h in self._run.settings.hyperparameters}

    def _steer(self, rnd: Round, full: bool) -> None:
        run = self._run
        if not (rnd.compares or rnd.recorded):
            return
        rnd.scales = proposed = run.scales
        seen = self.observe()
        if full:  # after the last step there is nothing left to steer
            report = Report(rnd.step, rnd.scores, seen, run.settings.total_steps, rnd.probe, rnd.start)
            proposed = run.steering.update(report)
            rnd.events += run.steering.said
        rnd.record["hyperparameters"] = {
            h.name: self._row(h, seen[h.name], rnd.scales[h.name], proposed[h.name])
            for h in run.settings.hyperparameters
        }
        if rnd.ended and rnd.healthy:  # the schedules of ended replicas stand still: steer by the others
            numbers = torch.tensor(run.steering.numbers, dtype=torch.float64, device=rnd.device)
            run.replicas.broadcast(numbers, rnd.healthy[0])
            run.steering.take_over(numbers.tolist())

    def _row(self, h: Hyperparameter, seen: Observation, scale: float, proposed: float) -> HyperparameterRecord:
        """The record of a hyperparameter trained at `scale`."""
        run, coming = self._run, list(h.bases())
        used = run.values.used(h) or coming
        base = representative(used, coming)[0]
        return HyperparameterRecord(
            base,
            h.center(base, scale),
            h.values_of(base, scale, seen.multipliers),
            run.steering.scales[h.name],
            proposed,
            **run.steering.confidence(h.name, scale, run.rounds.ever_explores(h))._asdict(),
            scale_before=scale,
            places=h.places(run.settings.optimizers),
            first=tuple(h.center(float(b), scale) for b in self._first.get(h.name, ())),
            last=tuple(h.center(float(b), scale) for b in used),
        )

    def _observe(self, h: Hyperparameter, scale: float) -> Observation:
        run, coming = self._run, list(h.bases())
        used = run.values.used(h) or coming
        base, next_base = representative(used, coming)
        dealt = run.rounds.dealt[h.name]
        limits = h.limits(next_base, len(dealt))
        multipliers = h.within_bounds([float(x) for x in used], scale, dealt) if h.is_bounded else dealt
        told, following = h.steered(base, scale), h.steered(next_base, scale)
        return Observation(told, following, h.floor, multipliers, h.peak(), limits)
