"""Opens, counts and ends the rounds of a run. The phases do the work at their ends; the engine knows none by name."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

from hdet._engine.forgotten import ForgottenCalls
from hdet._engine.gather import compare, ending
from hdet._hooks import WeakHook
from hdet._phases.phase import Call, Phase, Round
from hdet._probe.score import Loss
from hdet._run import no_effect
from hdet._run.rounds import Stage
from hdet._run.run import Run

P = TypeVar("P", bound=Phase)


class Engine:
    """The engine of one `Ensemble`.

    Args:
        run: the state that the phases share.
        phases: the phases at the end of a round, in order.

    Attributes:
        at_end: called when the run is over.
    """

    def __init__(self, run: Run, phases: Sequence[Phase]) -> None:
        self.run = run
        self.at_end: Callable[[], None] = WeakHook(None)
        self.forgotten = ForgottenCalls(run)
        self._fan_out = run.values.fan_out
        self._fan_out.ask(WeakHook(self._before_step))
        self.use(phases)
        run.write_values()  # the first forward pass comes before the first step
        for undo in (run.values.close, *(phase.release for phase in phases)):  # runs when the ensemble is dropped
            weakref.finalize(self, undo).atexit = False

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases at the end of a round, in order."""
        return self._phases

    def use(self, phases: Sequence[Phase]) -> None:
        """Replace the phases or their order."""
        self._phases = tuple(phases)
        self._steps = [p.step for p in phases if type(p).step is not Phase.step]
        self._counts = [p.counted for p in phases if type(p).counted is not Phase.counted]
        self._enders = [p.ends_round for p in phases if type(p).ends_round is not Phase.ends_round]

    def phase(self, kind: type[P]) -> P:
        """The phase of that class."""
        return next(p for p in self._phases if isinstance(p, kind))

    # While a round is trained

    def start(self) -> None:
        """Before the first step: fix the replicas and check that they agree."""
        run = self.run
        if run.at.closed:
            raise RuntimeError("this ensemble is closed; make a new one to continue exploring")
        if run.rounds.start():
            run.agree()
            given = run.settings
            if run.replicas.size == 2:
                names = [h.name for h in given.explored]
                no_effect.warn_of_two_replicas(given.controller, given.plan, names, given.rates)
            self._dealt(first=True)
        if run.at.step == 0:
            run.note_noise()

    def open(self) -> None:
        """Before the first step of a round, while all replicas hold the same weights."""
        if self.run.at.stage is Stage.DEALT:
            self.run.at.enter(Stage.TRAINING)
            for phase in self._phases:
                phase.begin()

    def step(self, loss: Loss | None, attempted: bool) -> None:
        """`Ensemble.step()`: usually only calls the phases' `step()`."""
        for note in self._steps:
            note(loss)
        if self._fan_out.steps == 0 and not attempted:
            self.forgotten.note_unseen()
        elif self.count():
            self.end_round(full=self.run.rounds.full)
        elif any([ends() for ends in self._enders]):  # noqa: C419  a generator takes longer, at every step
            self.end_round(full=False)

    def resume(self) -> None:
        """Continue from another step after all parts have moved there."""
        self.forgotten.reset()
        self._fan_out.restore()
        self._fan_out.count()
        self._fan_out.ask_again()
        for phase in self._phases:
            phase.resumed()
        self.run.write_values()

    def close(self) -> None:
        """Steps are plain from now on. Not collective."""
        self.run.at.enter(Stage.CLOSED)
        self.run.values.close()
        for phase in self._phases:
            phase.release()
        self.run.rounds.close()
        self.at_end()

    # When it ends

    def end_now(self, call: Call) -> None:
        """End the round before it is full. Collective."""
        self.start()
        if self._fan_out.steps:
            self.count()
        self.end_round(full=False, call=call)

    def finish(self) -> None:
        """End the run. Collective; a second call does nothing."""
        self.start()
        if self.run.at.finished:
            return
        if self._fan_out.steps:
            self.count()
        self.end_round(full=False, call="ensemble.finish()", last=True)

    def end_round(self, full: bool, call: Call = "the end of a round", last: bool = False) -> None:
        """Everything that happens at the end of a round, in order. Collective."""
        run, phases = self.run, self._phases
        if run.at.finished:
            return
        run.tensors.reshard()
        if self._fan_out.steps == 0 and run.at.step_in_round:
            self.open()  # every step of the round was skipped here, but not on other replicas
        rnd = ending(run, call, full, last)
        for phase in phases:
            phase.prepare(rnd)
        if rnd.compares:
            compare(run, phases, rnd)
        for phase in phases:
            phase.decide(rnd)
        for phase in phases:
            (phase.undone if rnd.alarm else phase.after)(rnd)
        if rnd.last:
            for phase in phases:
                phase.finish(rnd)
        self._deal(rnd)
        for phase in phases:
            phase.ended(rnd)

    # Small steps

    def count(self) -> bool:
        """Count the optimizer steps taken; return whether they complete the round."""
        self.forgotten.reset()
        ends = self.run.rounds.count(max(self._fan_out.count(), 1))
        for note in self._counts:
            note()
        return ends

    def _before_step(self) -> None:
        at = self.run.at
        if at.stage is Stage.CONSENSUS:
            raise RuntimeError("optimizer.step() inside consensus() would train the average; leave it first")
        if self._fan_out.ready:
            self.forgotten.note_uncounted()
            return
        self.start()
        if at.step == 0 and self.run.settings.plan.finds and self.run.found is None:
            no_effect.warn_not_searched()
        self.open()
        self._fan_out.go_on()

    def _deal(self, rnd: Round) -> None:
        """Deal the next round, or end the run."""
        run = self.run
        if rnd.steps:
            run.rounds.next_round()
        run.tensors.set_noisy(())
        if rnd.last:
            run.rounds.finish()
            self.at_end()
        else:
            run.at.enter(Stage.DEALT)
        self._dealt()
        run.start_clock()

    def _dealt(self, first: bool = False) -> None:
        self.run.write_values()
        self.run.tensors.begin_round()
        for phase in self._phases:
            phase.dealt(first)
        training = self.run.at.stage is Stage.TRAINING  # resumed in mid-round
        (self._fan_out.go_on if training else self._fan_out.ask_again)()
