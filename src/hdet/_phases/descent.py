"""Descent: if the losses do not fall, the record says so, and a warning when that is first seen."""

from __future__ import annotations

from dataclasses import replace

from hdet._phases.phase import Phase, Round, State
from hdet._probe.score import typical
from hdet._run.run import Run
from hdet._user_warning import warn
from hdet.controllers.confidence import words_not_learning
from hdet.records.trend import Descent, words


class WatchDescent(Phase):
    """Follows the losses, so that the record of a run that does not learn never calls its learning rate right."""

    name = "descent"

    def __init__(self, run: Run) -> None:
        self._run = run
        self._descent = Descent(run.settings.total_steps)

    def decide(self, rnd: Round) -> None:
        if rnd.losses:
            self._descent.update(typical(rnd.losses), rnd.steps, rnd.first)
        elif rnd.loss is not None:
            self._descent.update(rnd.loss, rnd.loss_steps, rnd.first)

    def after(self, rnd: Round) -> None:
        trend = self._descent.trend(rnd.step, rnd.last)
        problem = words(trend)
        if problem and (rnd.last or not self._descent.said):
            rnd.events.append(problem)
        if problem and not self._descent.said:
            self._descent.said = True
            warn(problem)
        rnd.record |= trend._asdict()
        if problem or trend.shows_nothing:
            rows = rnd.record.get("hyperparameters", {})
            rnd.record["hyperparameters"] = {
                name: replace(row, finding=words_not_learning(name, rnd.scales[name])) if row.finding else row
                for name, row in rows.items()
            }

    def undone(self, rnd: Round) -> None:
        self._descent.go_back()
        self.after(rnd)

    def reset(self) -> None:
        self._descent.reset()

    def state_dict(self) -> State:
        return self._descent.state_dict()

    def load_state_dict(self, state: State, own: State) -> None:
        self._descent.load_state_dict(state or None)
