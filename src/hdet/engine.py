"""How the rounds of an ensemble open and end: its parts, put together and called in order."""

from __future__ import annotations

import math
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor, nn

from hdet import no_effect
from hdet.agreement.agreement import settle
from hdet.agreement.fingerprint import Claims
from hdet.agreement.round_end import Call
from hdet.controllers import Report, Steering, words_not_learning
from hdet.descent import Descent, words
from hdet.guard.health import Health
from hdet.joining import Joining
from hdet.judge import Judge, Judged
from hdet.local_gradients import LocalGradients
from hdet.meeting import Meeting
from hdet.outer_step import OuterStep
from hdet.range_test.found_rate import FoundRate
from hdet.record import OnRound, RoundRecord
from hdet.recording import Recorder, search_record
from hdet.rollback.recovery import Recovery, in_words
from hdet.rollback.rollback import Verdict
from hdet.rounds import Rounds
from hdet.score import OwnLoss, typical
from hdet.settings import Settings
from hdet.tail import Tail
from hdet.tensors import Tensors
from hdet.values import Values
from hdet.warm_init import take_noise

_MOST_UNSEEN = 100
_FORGOTTEN = 1000  # optimizer steps, before the first call of `Ensemble.step()`


class Engine:
    """What runs behind one `Ensemble`. Each part is told of in its own module.

    Args:
        settings: what the ensemble was given.
        also: what follows the weights.
        start_step: optimizer steps that were taken before.
        on_round: what is given the records.

    Attributes:
        opened: whether this round's start has been noted.
        in_consensus: whether the model holds the average for a while: no step may be taken.
        closed: whether the ensemble is closed.
        found: what a search before the first step has found.
        resumed: whether the run goes on from a saved state.
        at_end: called when the run is over.
    """

    def __init__(
        self,
        settings: Settings,
        also: Sequence[nn.Module | Tensor],
        start_step: int,
        on_round: Sequence[OnRound],
    ) -> None:
        given = self.settings = settings
        explorable, local = given.hyperparameters, given.local
        self.tensors = Tensors(given.optimizers, given.model, also, explorable, local, not given.average_state)
        self.steering = Steering(given.controller, [h.name for h in explorable], given.act, given.limits)
        self.rounds = Rounds(
            explorable, given.interval, given.total_steps, given.seed, given.where,
            design=given.design, until=given.plan.until, local=local,
        )  # fmt: skip
        self.rounds.start_from(start_step)
        self.values = Values(given.optimizers, explorable, self._before_step)
        self.fan_out = self.values.fan_out
        self.recorder = Recorder(explorable, given.optimizers, self.values, self.rounds)
        self.judge = Judge(given.probe, given.model)
        self.outer = OuterStep(given.outer_step)
        self.tail = Tail(given.tail_average, given.total_steps)
        self.descent = Descent(given.total_steps)
        self.recovery = Recovery(given.rollback, self.tensors, self.rounds)
        self.health = Health(given, self.tensors, self.rounds)
        self.joining = Joining()
        self.switch = LocalGradients(given.model if local else None)
        self.meeting = Meeting(given, self.tensors, self.rounds, self.judge, self.health, self.joining, self.switch)
        self.opened = self.in_consensus = self.closed = self.resumed = False
        self.found: FoundRate | None = None
        self.at_end: Callable[[], None] | None = None
        self._on_round = tuple(on_round)
        self._finishing = self._counted = self._warned_uncounted = False
        self._unseen = 0
        self._own_loss = OwnLoss()
        self._clock = time.perf_counter()
        self._agreed = self.rounds.replicas.ranks.size > 1
        self.switch.start()
        self.write_values()  # the first forward pass comes before the first step
        for undo in (self.values.close, self.switch.restore):  # an ensemble that is dropped leaves nothing behind
            weakref.finalize(self, undo).atexit = False

    def claims(self) -> Claims:
        """What must be the same on all replicas before the first step."""
        return self.settings.claims(self.rounds.replicas.size, self.rounds.at.step, self.tensors.followers_whole())

    def write_values(self) -> None:
        """What this replica trains with from the next step on."""
        self.values.set(self.scales, self.rounds.multipliers)

    @property
    def scales(self) -> dict[str, float]:
        """The factor on each hyperparameter's schedule, by name: center = base * scale."""
        scales = self.steering.scales
        return dict.fromkeys(scales, 1.0) if self.closed else scales

    @property
    def equal(self) -> bool:
        """Whether the replicas are known to hold the same weights."""
        return not self.rounds.diverges or (self.rounds.at.equal and not self.fan_out.steps)

    @property
    def mid_round(self) -> bool:
        """Whether a round is under way, in which the replicas hold different weights."""
        at = self.rounds.at
        begun = (at.step_in_round > 0 and not at.equal) or self.fan_out.steps > 0
        return begun and not at.finished and self.rounds.diverges

    @property
    def replicas_differ(self) -> bool:
        """Whether what replicas hold is their own: weights in mid-round, and optimizer state that is not averaged."""
        at = self.rounds.at
        if at.step == 0:
            self.note_noise()
        own_state = not self.settings.average_state and at.step > 0 and not at.finished
        return self.mid_round or own_state or (at.noisy and self.rounds.diverges)

    # A round: start, open, count, end

    def start(self) -> None:
        """Before whatever comes first: fix who the replicas are, and see that they agree."""
        if self.closed:
            raise RuntimeError("this ensemble is closed; make a new one to go on exploring")
        if self.rounds.start():
            if not self._agreed and self.rounds.replicas.ranks.size > 1:  # there were no replicas yet when it was made
                settle(self.rounds.replicas, "the first step of hdet.Ensemble", self.claims())
                self._agreed = True
            given = self.settings
            if self.rounds.replicas.size == 2:
                names = [h.name for h in given.explored]
                no_effect.warn_of_two_replicas(given.controller, given.plan, names, given.rates)
            self._begin_round(first=True)
            self.tail.reserve(self.tensors.stepped())
        if self.rounds.at.step == 0:
            self.note_noise()

    def count(self) -> bool:
        """Count the optimizer steps that were taken; whether the round ends with them."""
        self._unseen, self._counted = 0, True
        ends = self.rounds.count(max(self.fan_out.count(), 1))
        if self.rounds.at.step == 1:
            self.judge.score.mark_first()
        if 0 < self.recovery.early <= self.rounds.at.step_in_round:
            self.judge.score.mark()
        return ends

    def note_unseen(self) -> None:
        """`Ensemble.step()` was called, but no optimizer step was seen since: a micro-batch, or a mistake."""
        self._unseen += 1
        if self._unseen >= _MOST_UNSEEN and (self.settings.explored or self.outer.active):
            raise RuntimeError(
                f"no optimizer step was seen in {_MOST_UNSEEN} calls of step(). Is this the optimizer that "
                "trains? A wrapper that does not call its hooks, or a captured graph, cannot fan out: pass "
                "the torch optimizer inside it. With more micro-batches than that per step, call step() once "
                "per optimizer step with the mean loss"
            )

    def follow(self) -> None:
        """Another replica takes a step, while this one has no more data."""
        self.joining.ended = True
        if not self.opened:
            self._open_round()
        if not self.rounds.at.finished and self.rounds.count(1):
            self.end_round(full=self.rounds.full)

    def go_along(self) -> None:
        """End the rounds of the others, until nobody has data."""
        self.joining.ended = True
        while self.joining.open and not self.rounds.at.finished:
            if not self.opened:
                self._open_round()
            self.end_round(full=True)

    def end_now(self, call: Call) -> None:
        """End the round before it is full. Collective."""
        self.start()
        if self.fan_out.steps:
            self.count()
        self.end_round(full=False, call=call)

    def resume(self) -> None:
        """After the parts have been put to another step: go on from there."""
        self._unseen = 0
        self.fan_out.restore()
        self.fan_out.count()
        self.opened = self.rounds.at.step_in_round > 0
        self.recorder.forget()
        self.health.note_load()
        self.fan_out.ready = False
        if self.rounds.at.finished:
            self.switch.restore()
        else:
            self.switch.start()
        self.write_values()

    def finish(self) -> None:
        """End the run. Collective; a second call does nothing."""
        self.start()
        if self.rounds.at.finished:
            return
        self.outer.reset()  # the last round's way is taken whole
        records: list[RoundRecord] = []
        self._finishing = True
        try:
            if not self.equal:
                self.end_now("ensemble.finish()")
            elif self.rounds.at.step and not self.rounds.over:  # else the last record is being made
                records = self._settle_tail([self._unjudged()])
        finally:
            self._finishing = False
        if not self.rounds.at.finished:
            self.meeting.average_own_state()
        self.rounds.finish()
        self.switch.restore()
        self.write_values()
        self._tell_end()
        self._emit(records)

    def restart_clock(self) -> None:
        """The round begins now: what was done before is no part of it."""
        self._clock = time.perf_counter()

    def close(self) -> None:
        """Steps are plain from now on. Not collective."""
        self.closed = True
        self.tail.release()
        self.values.close()
        self.health.gradients.close()
        self.switch.restore()
        self.rounds.close()
        self._tell_end()

    def _tell_end(self) -> None:
        if self.at_end is not None:
            self.at_end()

    def end_round(self, full: bool, call: Call = "the end of a round") -> None:
        """Compare, average, steer and deal the next round. Collective."""
        records: list[RoundRecord] = []
        verdict: Verdict = "ok"
        self.health.mend()
        self.tensors.reshard()
        if not self.opened and self.fan_out.steps == 0 and self.rounds.at.step_in_round:
            self._open_round()  # every step of the round was skipped here, but not on other replicas
        if self.rounds.diverges or (self.recovery.active and not self.rounds.at.finished):
            record, verdict = self._converge(full, call)
            records.append(record)
        elif not self.rounds.at.finished:
            said = self.health.tell_skipped()
            if self._on_round:
                record = self._unjudged()
                records.append(replace(record, full=full, events=(*record.events, *said)))
            elif self._follow_alone() is not None:
                self._tell_not_learning(words(self.descent.trend(self.rounds.at.step, self.rounds.over)), False)
        if self.rounds.over:
            self.outer.forget()
        self.outer.take()
        if verdict == "best":
            self.recovery.keep()
        if self.tail.active and not self.rounds.at.finished:
            self.tail.add(self.tensors.stepped(), self.rounds.at.step)
        if self.rounds.over or self._finishing:
            records = self._settle_tail(records)
        self.judge.reset()
        self.health.gradients.reset()
        self.rounds.next_round()
        self.tensors.set_noisy(())
        self.opened = False
        self._begin_round()
        self._clock = time.perf_counter()
        if self.rounds.over:
            self.finish()
        self._emit(records)  # last, so that a sink that raises leaves no round half ended

    # What a round's end is made of

    def _converge(self, full: bool, call: Call) -> tuple[RoundRecord, Verdict]:
        """Compare, average and steer; or go back."""
        began = time.perf_counter()
        tensors = self.meeting.to_average()
        judged, census = self.meeting.agree(tensors, full, call)
        if self.joining.ended:  # go along with the others
            full = census.full
            self.rounds.catch_up(census.step)
        losses = census.losses(judged, self.health.guarded)
        lost = self.health.lost(census) if census.lost else ""
        verdict = self.recovery.watch(losses, judged.early, self.health.last_checkpoint, lost)
        if losses:
            self.descent.update(typical(losses), self.rounds.at.step_in_round, judged.first)
        if verdict == "alarm":
            self.descent.go_back()
            record = self._roll_back(full, judged, began, lost or in_words(census.scores))
        else:
            self.meeting.average(tensors, judged, census)
            record = self._control(full, judged, time.perf_counter() - began - self.judge.seconds_at_end)
        if census.ended and census.healthy:  # their schedules stand still: steer by those who go on
            self.steering.numbers = self.meeting.follow(self.steering.numbers, census.healthy[0])
        self.joining.open = self.joining.open and not census.all_ended
        spoiled = self.health.tell_spoiled(census, went_back=verdict == "alarm")
        return replace(record, events=(*record.events, *spoiled, *census.events(self.rounds.at.step))), verdict

    def _roll_back(self, full: bool, judged: Judged, began: float, why: str) -> RoundRecord:
        """Put the best consensus back and go on from there with lower learning rates."""
        said = self.recovery.put_back(why)
        self.outer.reset()
        self.tail.reset()
        record = self._control(False, judged, time.perf_counter() - began - self.judge.seconds_at_end)
        self.steering.scale_by(self.recovery.cut, self.settings.rates, forget=True)
        rows = {name: replace(row, scale=self.scales[name]) for name, row in record.hyperparameters.items()}
        return replace(record, full=full, hyperparameters=rows, events=(*record.events, said))

    def _control(self, full: bool, judged: Judged, seconds: float) -> RoundRecord:
        """Let the controller see a full round, and record it; `seconds` were spent on comparing and averaging."""
        at = self.rounds.at
        trained, proposed = self.scales, self.scales
        said: tuple[str, ...] = ()
        seen = self.recorder.observe(trained)
        if full and not self.rounds.over:  # after the last step there is nothing left to steer
            report = Report(at.step, judged.scores, seen, self.settings.total_steps, judged.probe, judged.start)
            began = time.perf_counter()
            proposed = self.steering.update(report)
            seconds += time.perf_counter() - began
            said = self.steering.said
        rows = self.recorder.rows(seen, trained, proposed, self.steering)
        last = self.rounds.over or self._finishing
        trend = self.descent.trend(at.step, last)
        problem = words(trend)
        said += self._tell_not_learning(problem, last)
        if problem or trend.shows_nothing:
            rows = {
                name: replace(row, finding=words_not_learning(name, trained[name])) if row.finding else row
                for name, row in rows.items()
            }
        return RoundRecord(
            round=at.round,
            step=at.step,
            full=full,
            scores=judged.scores,
            hyperparameters=rows,
            probe=judged.probe,
            start=judged.start,
            round_seconds=time.perf_counter() - self._clock,
            converge_seconds=seconds,
            probe_seconds=self.judge.seconds,
            events=(*self._events(), *said),
            steps=at.step_in_round,
            total_steps=self.settings.total_steps,
            last=last,
            outer_step=self.outer.amount,
            outer_momentum=self.outer.momentum,
            gradients="local" if self.settings.local else "shared",
            **trend._asdict(),
            search=None if at.round or self.found is None else search_record(self.found),
            replica=self.rounds.replicas.ranks.rank,
        )

    def _tell_not_learning(self, problem: str, last: bool) -> tuple[str, ...]:
        """The event of losses that have not fallen, if so: when it is seen, with a warning, and when the run ends."""
        if not problem or self.descent.said:
            return (problem,) if problem and last else ()
        self.descent.said = True
        warnings.warn(problem, stacklevel=7)
        return (problem,)

    def _unjudged(self) -> RoundRecord:
        """The record of a round in which nothing was gathered: where the schedule was, and what a controller picked."""
        loss = self._follow_alone()
        record = self._control(False, Judged((math.nan,) * self.rounds.replicas.size, None, None), 0.0)
        return replace(record, loss=loss)

    def _follow_alone(self) -> float | None:
        """This replica's own loss, where nothing is gathered: what is told of the run's losses goes by it."""
        score, at = self.judge.score, self.rounds.at
        ends = self.rounds.over or self._finishing
        loss = self._own_loss.read(score, at.step_in_round, now=ends, seldom=not self._on_round)
        if loss is not None:
            first = score.read_first() if at.step <= self._own_loss.steps else None
            self.descent.update(loss, self._own_loss.steps, first)
        return loss

    def _events(self) -> tuple[str, ...]:
        """What to tell beside the numbers: in the first round, what the controller has picked and why."""
        if self.rounds.at.round:
            return ()
        why = tuple(f"{name}: {text}" for name, text in self.settings.plan.why.items())
        return why if self.found is None else (*why, f"found: {self.found}")

    def _settle_tail(self, records: list[RoundRecord]) -> list[RoundRecord]:
        """Leave the better of the last weights and the tail average, and tell so in the last record."""
        began = time.perf_counter()
        with self.values.at_center():
            told = self.tail.settle(self.meeting.score, self.settings.act)
        if told is None or not records:
            return records
        took, last = time.perf_counter() - began, records[-1]
        seconds = {name: getattr(last, name) + took for name in ("round_seconds", "probe_seconds")}
        return [*records[:-1], replace(last, events=(*last.events, told), **seconds)]

    def _emit(self, records: Sequence[RoundRecord]) -> None:
        for record in records:
            for call in self._on_round:
                call(record)

    # Small steps

    def _before_step(self) -> None:
        if self.in_consensus:
            raise RuntimeError("optimizer.step() inside consensus() would train the average; leave it first")
        if self.fan_out.ready:
            self._note_uncounted()
            return
        self.start()
        if self.rounds.at.step == 0 and self.settings.plan.finds and self.found is None:
            no_effect.warn_not_prepared()
        if not self.opened:
            self._open_round()
        self.switch.note(self.tensors.trained())
        self.fan_out.ready = True

    def _note_uncounted(self) -> None:
        """Optimizer steps are taken, but nobody calls `Ensemble.step()`: on all replicas alike, as each one counts."""
        needed = self.settings.diverges or self.outer.active or self.tail.active or self.recovery.active
        steps = self.fan_out.steps_of_all
        if steps < self.fan_out.patience or not needed or self.rounds.at.finished:
            return
        problem = (
            f"{steps} optimizer steps were taken without a call of ensemble.step(), so no round ends and the replicas "
            "are not averaged; call ensemble.step(loss) after each optimizer.step() (with OneCycleAutoLR, "
            "scheduler.step(loss)), or ensemble.finish() where plain training is to go on"
        )
        if not self._counted and steps >= _FORGOTTEN:
            raise RuntimeError(problem)
        if not self._warned_uncounted:
            self._warned_uncounted = True
            warnings.warn(problem, stacklevel=7)

    def _begin_round(self, first: bool = False) -> None:
        self.write_values()
        self.tensors.begin_round()
        self.health.begin_round(first)
        self.fan_out.ready = self.opened

    def _open_round(self) -> None:
        """Before the first step of a round, while all replicas hold the same weights: note where they begin."""
        self.opened = True
        if self.rounds.at.finished:
            return
        self.recorder.open()
        at = self.rounds.at
        if not at.noisy:  # there is no one place that all replicas began from
            self.outer.begin(self.tensors.parameters())
        if at.step > 0 and not at.step_in_round:
            self.recovery.keep_if_none()
        if self.judge.probes and self.rounds.explores and at.round > 0 and not at.cut:
            with self.values.at_center():  # round 0 is left out: noisy copies of a checkpoint may begin it
                self.judge.begin(at.round, self.rounds.replicas)

    def note_noise(self) -> None:
        """Before the first step: see whether a warm initialisation has made the replicas different."""
        noisy = take_noise(self.settings.model, self.tensors.trained())
        if noisy:
            self.tensors.set_noisy(noisy)
            self.rounds.begin_noisy()

    def forget_noise(self) -> None:
        """The weights are loaded, or are the same on all replicas: whatever noise was given to them is gone."""
        take_noise(self.settings.model, self.tensors.trained())
        self.tensors.set_noisy(())
