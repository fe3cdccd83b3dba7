"""The outer step at the end of a round; `hdet._phases.outer_step_of` says what it is."""

from __future__ import annotations

from hdet._phases.outer_step_of import OuterStep
from hdet._phases.phase import Phase, Round, State
from hdet._run.rounds import Stage
from hdet._run.run import Run


class TakeOuterStep(Phase):
    """Applies a part of each round's weight change, but the last round's whole."""

    name = "outer step"

    def __init__(self, run: Run) -> None:
        self._run = run
        self.outer = OuterStep(run.settings.averaging.outer_step)

    @property
    def holds_weights(self) -> bool:
        return self.outer.active

    def begin(self) -> None:
        if not self._run.at.noisy:  # noisy replicas did not begin from one place
            self.outer.begin(self._run.tensors.parameters())

    def after(self, rnd: Round) -> None:
        if rnd.last:
            self.outer.forget()
        self.outer.take()
        rnd.record |= {"outer_step": self.outer.amount, "outer_momentum": self.outer.momentum}

    def undone(self, rnd: Round) -> None:
        self.outer.reset()
        self.after(rnd)

    def finish(self, rnd: Round) -> None:
        self.outer.reset()

    def join(self) -> None:
        self.outer.check_join(self._run.settings.local or self._run.rounds.explores)

    def reset(self) -> None:
        self.outer.reset()

    def state_dict(self) -> State:
        at = self._run.at
        return self.outer.state_dict(begun=at.stage is Stage.TRAINING and at.step_in_round > 0)

    def check_state(self, state: State) -> None:
        self.outer.check_state(state, self._run.tensors.parameters())

    def load_state_dict(self, state: State, own: State) -> None:
        self.outer.load_state_dict(state, self._run.tensors.parameters())
