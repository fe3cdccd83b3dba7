"""Scores: the replicas' mean losses over a round, and the losses of their weights on the probe."""

from __future__ import annotations

import math

from torch import Tensor

from hdet._options.safety import Rollback
from hdet._phases.phase import Phase, Round, State
from hdet._phases.rollback.alarm import early_steps
from hdet._probe.judge import Judge
from hdet._probe.score import Loss, OwnLoss, Score, as_loss
from hdet._replicas import LostReplicaError
from hdet._run.run import Run
from hdet._tensors import converge


class Scores(Phase):
    """Sums this replica's losses, scores its weights, and reads all replicas' results."""

    name = "scores"

    def __init__(self, run: Run) -> None:
        self._run = run
        self._judge = Judge(run.settings.probe, run.settings.model)
        self._own_loss = OwnLoss()
        rollback = run.settings.safety.rollback
        self._early = early_steps(rollback.window) if isinstance(rollback, Rollback) else 0

    @property
    def score(self) -> Score:
        """The mean training loss of the round so far."""
        return self._judge.score

    def check_loss(self, loss: Loss | None) -> Tensor | float | None:
        """Validate the loss and return it as added up; raises if it is invalid or missing. Changes nothing."""
        if loss is not None:
            return as_loss(loss)
        given, at = self._run.settings, self._run.at
        judged = given.controller.needs_score and given.explored and not self._judge.probes
        rollback = given.safety.rollback
        if (judged or rollback is not None) and not (at.finished or at.closed):
            who = type(rollback or given.controller).__name__
            raise ValueError(
                f"{who} judges by the losses, but none was given; pass this replica's own training loss: step(loss)"
            )
        return None

    def step(self, loss: Loss | None) -> None:
        loss = self.check_loss(loss)
        if loss is not None:
            self._judge.score.add(loss)

    def counted(self) -> None:
        at = self._run.at
        if at.step == 1:
            self._judge.score.mark_first()
        if 0 < self._early <= at.step_in_round:
            self._judge.score.mark()

    def begin(self) -> None:
        at = self._run.at
        if self._judge.probes and self._run.rounds.explores and at.round > 0 and not at.cut:
            with self._run.values.at_center():  # not in round 0, which may start from noisy copies of a checkpoint
                self._judge.begin(at.round, self._run.replicas)

    def tell(self, rnd: Round) -> None:
        rnd.tell(self.name, self._judge.end(rnd.number, rnd.full and rnd.explores, self._run.replicas, rnd.device))
        rnd.probe_seconds_at_end = self._judge.seconds_at_end

    def hear(self, rnd: Round) -> None:
        judged = self._judge.read(rnd.heard(self.name), rnd.full and rnd.explores)
        rnd.all_scores = rnd.scores = judged.scores
        rnd.probe, rnd.start, rnd.given, rnd.early, rnd.first = judged[1:]

    def decide(self, rnd: Round) -> None:
        rnd.score_probe = lambda number: self._score_probe(rnd, number)
        if rnd.compares:
            return
        rnd.scores = rnd.all_scores = (math.nan,) * rnd.replicas
        score = self._judge.score
        rnd.loss = self._own_loss.read(score, rnd.steps, now=rnd.last, seldom=not rnd.recorded)
        rnd.loss_steps = self._own_loss.steps
        if rnd.loss is not None and rnd.step <= rnd.loss_steps:
            rnd.first = score.read_first()

    def after(self, rnd: Round) -> None:
        rnd.record |= {"scores": rnd.scores, "probe": rnd.probe, "start": rnd.start, "loss": rnd.loss}
        rnd.record["probe_seconds"] = self._judge.seconds

    def undone(self, rnd: Round) -> None:
        self.after(rnd)

    def ended(self, rnd: Round) -> None:
        self._judge.reset()

    def reset(self) -> None:
        self._judge.reset()

    def state_dict(self) -> State:
        return self._judge.score.first_losses() if self._run.at.step_in_round else {}

    def own_state_dict(self) -> State:
        return self._judge.state_dict() if self._run.at.step_in_round else {}

    def load_state_dict(self, state: State, own: State) -> None:
        self._judge.reset()
        if own:
            self._judge.load_state_dict(own)
        elif state:
            self._judge.score.load_state_dict(state)

    def _score_probe(self, rnd: Round, number: int) -> float:
        run = self._run
        run.tensors.reshard()
        run.replicas.arrive(f"the end of the run (step {rnd.step})", "the end of the run")
        try:
            return self._judge.loss(rnd.number + 1 + number, run.replicas, rnd.device)
        except LostReplicaError as error:
            raise error.and_then(converge.LAST_WEIGHTS) from error
