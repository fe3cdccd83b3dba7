"""The way in: `Ensemble`, the one object with state. `step()` reads as the protocol.

optimizer.step()      before: fan-out, this replica's values go into the parameter groups
                      after: the bases come back
scheduler.step()      any torch schedule; it only ever sees the base
ensemble.step(loss)   score the loss; at the end of a round converge, control and deal
"""

from __future__ import annotations

import math
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from hdet import checks, no_effect
from hdet import converge as averaging
from hdet.agreement.agreement import agreed, claim, settle
from hdet.agreement.fingerprint import Claims
from hdet.agreement.round_end import check_same_replica
from hdet.assignment import Design
from hdet.controllers import Controller, Limits, Report, Steering
from hdet.guard.health import Health
from hdet.hooks import Hooks, innermost
from hdet.hyperparameters.hyperparameter import Hyperparameter
from hdet.joining import Joining, joined
from hdet.judge import AnyProbe, Judge, Judged
from hdet.local_gradients import Gradients, LocalGradients
from hdet.meeting import Meeting
from hdet.outer_step import Nesterov, OuterStep
from hdet.probe.probe import Probe
from hdet.range_test.find_lr import find_lr
from hdet.range_test.found_rate import FoundRate
from hdet.record import OnRound, RoundRecord
from hdet.recording import Recorder
from hdet.replicas import Replicas
from hdet.rollback.recovery import Recovery
from hdet.rollback.rollback import Rollback, Verdict
from hdet.rounds import Rounds
from hdet.score import Loss, as_loss
from hdet.settings import read_settings
from hdet.tail import Tail, probes_at_end
from hdet.tensors import Tensors
from hdet.values import Values
from hdet.warm_init import take_noise

_MOST_UNSEEN = 100
_VERSION = 2


class Ensemble:
    """Data-parallel replicas that train under different hyperparameters and are averaged every round.

    Every replica makes one. They compare what they were given, through the store and not by a collective, and all raise
    the same error where something is wrong or different on one of them.

    Args:
        optimizer: the optimizer, or a sequence of them that step together (Muon beside AdamW).
        hyperparameters: what to explore; by default one joint learning rate with the paper's spread.
        total_steps: optimizer steps of the whole run. The last one always converges. Without it, call
            `finish()` at the end.
        interval: optimizer steps per round; "auto" is total_steps / 200, between 1 and 1000.
        controller: what moves the centers between rounds; by default `Auto` where there is a probe, and nothing
            (`Fixed`) where there is none.
        probe: the same data for all replicas, which their weights are scored on at the end of each round: an
            `hdet.Probe`, or a callable that is given a number and returns the loss of the current weights on data
            that depend on the number alone.
        gradients: "shared", as DDP does at every step, or "local": replicas train on their own between converges and
            send nothing. Needed by what acts before gradients are shared (dropout, label smoothing).
        outer_step: how much of a round's way is taken when it ends, in (0, 1], or an `hdet.Nesterov`; see
            `hdet.outer_step`. The last round's is taken whole. By default what the controller wants, which mostly is 1.
        tail_average: the part of the run at its end, in [0, 1], whose round ends are averaged: when the run ends, the
            probe tells whether half of the way to that mean is better than the last weights; see `hdet.tail`. 0 for
            none. By default what the controller wants, where that is possible: `Auto` a half in runs of 2,000 steps
            and more. Costs a copy of what is trained and of `also`, in single precision at least. The probe is asked
            for 16 indices that no round has had.
        average_state: average the optimizer state of local gradients too. False: each replica keeps its own, which
            saves two thirds of the traffic with Adam; it is averaged once, when the run ends.
        design: how slots are dealt to several hyperparameters: "permutations", "orthogonal" or "turns"; by default
            what the controller wants.
        rollback: what to do when the run diverges: an `hdet.Rollback`; None to do nothing. Needs the losses, and one
            small gather at the end of each round. Data and schedule do not rewind.
        guard: leave out what is not finite: a step whose gradient is not is skipped on all replicas alike, a replica
            whose weights, optimizer state or score are not is left out of the average and given it. See docs/safety.md
            for what that costs.
        limits: how far any controller may move a scale, per round and overall: an `hdet.Limits`.
        atomic: a replica that is lost while the others average leaves their weights as they were. Costs a copy of them.
        act: False to observe: everything is measured and recorded, the centers stay on the schedule (except that a
            rollback cuts the learning rates).
        model: the trained module; its floating-point buffers (BatchNorm statistics) are averaged too.
        also: modules or tensors that follow the weights (EMA, SWA, fp32 masters), averaged along.
        process_group: the replicas; by default all ranks.
        mesh: a device mesh in place of a process group, for replicas that are sharded (FSDP2, tensor parallelism): its
            dimension "replicate" counts them (or "dp_replicate", or the first one), the others are the parts of each.
        seed: what the slots are dealt from; the same on every replica.
        start_step: optimizer steps that were taken before, when resuming without a saved state.
        on_round: called with a `RoundRecord` after each round, on every replica.

    Attributes:
        closed: whether `close()` was called: steps are plain from then on.

    Raises:
        TypeError, ValueError: for an argument that cannot work, with what to write instead.

    Example, in any data-parallel loop::

        ensemble = hdet.Ensemble(optimizer, total_steps=10_000, model=ddp_model)
        for batch in loader:
            loss = loss_fn(ddp_model(batch)); loss.backward()
            optimizer.step(); optimizer.zero_grad(); scheduler.step()
            ensemble.step(loss)
    """

    @agreed("hdet.Ensemble")
    def __init__(
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        hyperparameters: Sequence[Hyperparameter | Sequence[Hyperparameter]] | None = None,
        *,
        total_steps: int | None = None,
        interval: int | Literal["auto"] = "auto",
        controller: Controller | None = None,
        probe: AnyProbe | None = None,
        gradients: Gradients = "shared",
        outer_step: float | Nesterov | None = None,
        tail_average: float | None = None,
        average_state: bool = True,
        design: Design | None = None,
        rollback: Rollback | None = None,
        guard: bool = False,
        limits: Limits | None = None,
        atomic: bool = False,
        act: bool = True,
        model: nn.Module | None = None,
        also: Sequence[nn.Module | Tensor] = (),
        process_group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        seed: int = 0,
        start_step: int = 0,
        on_round: Sequence[OnRound] = (),
    ) -> None:
        self._settings = read_settings(
            optimizer, hyperparameters, total_steps=total_steps, interval=interval, controller=controller, probe=probe,
            gradients=gradients, outer_step=outer_step, tail_average=tail_average, average_state=average_state,
            design=design, rollback=rollback, guard=guard, limits=limits, atomic=atomic, act=act, model=model,
            process_group=process_group, mesh=mesh, seed=seed,
        )  # fmt: skip
        checks.check_followers(also, on_round)
        checks.check_start_step(start_step)
        self._on_round = tuple(on_round)
        self._found: FoundRate | None = None
        self._assemble(tuple(also), start_step)
        self._attach()
        self._agreed = self.replicas.ranks.size > 1
        claim(self._claims(), undo=self.close)

    def _assemble(self, also: Sequence[nn.Module | Tensor], start_step: int) -> None:
        """Make the parts; each of them holds what it needs of the others."""
        given = self._settings
        explorable, local, plan = given.hyperparameters, given.local, given.plan
        self._tensors = Tensors(given.optimizers, given.model, also, explorable, local, not given.average_state)
        self._steering = Steering(given.controller, [h.name for h in explorable], given.act, given.limits)
        self._rounds = Rounds(
            explorable, given.interval, given.total_steps, given.seed, given.where,
            design=given.design, until=plan.until, local=local,
        )  # fmt: skip
        self._rounds.start_from(start_step)
        self._values = Values(given.optimizers, explorable, self._before_step)
        self._fan_out = self._values.fan_out
        self._recorder = Recorder(explorable, given.optimizers, self._values, self._rounds)
        self._judge = Judge(given.probe, given.model)
        self._outer = OuterStep(given.outer_step)
        self._tail = Tail(given.tail_average, given.total_steps)
        self._recovery = Recovery(given.rollback, self._tensors, self._rounds)
        self._health = Health(given, self._tensors, self._rounds)
        self._joining = Joining()
        self._meeting = Meeting(given, self._tensors, self._rounds, self._judge, self._health, self._joining)
        self._switch = LocalGradients(given.model if local else None)

    def _attach(self) -> None:
        """Hook into the model, whose state in mid-round is not the average, and begin."""
        self._opened, self._finishing = False, False  # whether this round's start has been noted
        self._clock = time.perf_counter()
        self._unseen = 0
        self._in_consensus = self._saving = self._resumed = self.closed = False
        self._warned_state_dict = False
        self._hooks = Hooks(self)
        self._switch.start()
        self._values.set(self.scales, self._rounds.multipliers)  # the first forward pass comes before the first step
        for undo in (self._values.close, self._switch.restore):  # an ensemble that is dropped leaves nothing behind
            weakref.finalize(self, undo).atexit = False
        if self._settings.model is not None:
            self._hooks.before_module_state_dict(innermost(self._settings.model), self._before_state_dict)

    def _claims(self) -> Claims:
        """What must be the same on all replicas before the first step."""
        return self._settings.claims(self.replicas.size, self._rounds.at.step, self._tensors.followers_whole())

    # The protocol

    def step(self, loss: Loss | None = None, *, attempted: bool = False) -> None:
        """Count one optimizer step, or one micro-batch of it; converge at the end of a round.

        Nearly every call only adds the loss to the score: no collective, nothing read from the device.
        The call that ends a round is collective.

        Args:
            loss: this replica's own training loss. A controller that judges by it needs it.
            attempted: an optimizer step was due, whether it was taken or not. With local gradients a GradScaler skips
                steps on some replicas only: say so, that all reach the end of a round at the same call.
        """
        if self.closed:
            return
        self._joining.note_step()
        loss = self.check_loss(loss)
        if loss is not None:
            self._judge.score.add(loss)
        self._health.gradients.count()
        if self._fan_out.steps == 0 and not attempted:
            self._note_unseen()
        elif self._count():
            self._end_round(full=self._rounds.full)
        elif self._health.guarded and not (self._settings.local or self._joining.open) and self._health.gradients.stuck:
            self._end_round(full=False)  # one sick replica keeps all from training: do not wait for the round's end

    def check_loss(self, loss: Loss | None) -> Tensor | float | None:
        """What `step()` would add of this loss; raises as it would, and changes nothing."""
        if loss is not None:
            return as_loss(loss)
        judged = self._settings.controller.needs_score and self._settings.explored and not self._judge.probes
        if (judged or self._recovery.active) and not (self._rounds.at.finished or self.closed):
            who = type(self._settings.rollback or self._settings.controller).__name__
            raise ValueError(
                f"{who} judges by the losses, but none was given; pass this replica's own training loss: step(loss)"
            )
        return None

    def prepare(self, step_fn: Callable[[int], object], *, also: Sequence[Any] = ()) -> FoundRate | None:
        """Before the first step: let the controller do what it wants beforehand, such as find the learning rate.

        `Auto` does in long runs: see `hdet.find_lr`, whose arguments these are. The rate that is found scales the
        schedule of every explored learning rate; weights, optimizers and random numbers are as before. Collective.

        Returns:
            What was found; None if the controller wants nothing of the kind, or if the run goes on from a saved state.
        """
        given = self._settings
        if not given.plan.finds or self._resumed:
            return None
        if given.model is None or not isinstance(given.probe, Probe):
            raise ValueError(
                "prepare() needs the model and what to score it on: write model=model, probe=hdet.Probe(...)"
            )
        if self._rounds.at.step > 0:
            raise ValueError(f"prepare() comes before the first step, got {self._rounds.at.step} steps")
        checks.check_all_rates(given.hyperparameters, given.optimizers)
        with self._switch.sharing(self.replicas.size):
            found = find_lr(
                given.model, given.optimizers, step_fn, probe=given.probe, total_steps=self.total_steps,
                outer_step=min(self._outer.gain, 1.0), also=also, **given.group_or_mesh,
            )  # fmt: skip
        before = 1.0 if self._found is None else self._found.scale  # found.scale is that on the schedule
        self._found = found
        if given.act:
            self._steering.scale_by(found.scale / before, given.rates)
        self._values.set(self.scales, self._rounds.multipliers)
        return found

    def converge(self) -> None:
        """Average the replicas now and begin a new round. Collective; the controller ignores the cut round."""
        self._start()
        if self._fan_out.steps:
            self._count()
        self._end_round(full=False)

    def finish(self) -> None:
        """End the run: average the replicas and stop the fan-out. Collective; later steps are plain.

        Called by the last of `total_steps` steps; a second call does nothing.
        """
        self._start()
        if self._rounds.at.finished:
            return
        self._outer.reset()  # the last round's way is taken whole
        records: list[RoundRecord] = []
        self._finishing = True
        try:
            if not self._equal:
                self.converge()
            elif self._rounds.at.step and not self._rounds.over:  # else the last record is being made
                records = self._settle_tail([self._unjudged()])
        finally:
            self._finishing = False
        if not self._rounds.at.finished:
            self._meeting.average_own_state()
        self._rounds.finish()
        self._switch.restore()
        self._values.set(self.scales, self._rounds.multipliers)
        self._emit(records)

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Within it the model is the average of the replicas: evaluate it or save it.

        Afterwards every replica has its own weights and buffers back, bit for bit, and the round goes on.
        Collective: every replica enters. Costs one copy of the model in mid-round, of its buffers at a round's end.
        """
        if self._in_consensus:
            raise RuntimeError("consensus() is entered already; leave it before entering it again")
        self._start()
        tensors = [] if self._equal else self._tensors.weights()
        self._health.mend()
        counted = self._meeting.agree(tensors, full=False)[1].averaged if tensors else None
        kept = self._tensors.buffers()
        self._in_consensus, self._fan_out.ready = True, False
        self._tensors.reshard()
        try:
            with averaging.averaged(tensors, self.replicas, kept, counted), self._values.at_center():
                yield
        finally:
            self._in_consensus = False
            self._tensors.reshard()  # what was evaluated is not what is trained on

    @contextmanager
    def join(self) -> Iterator[None]:
        """Around a loop over data that end at different steps on different replicas. Collective: every replica enters.

        A replica whose data have ended goes along: it is left out of the averages and gets them. With shared gradients
        this is torch's join of DistributedDataParallel, which costs one small all-reduce per step, and at the end of
        the loop all replicas hold the weights of the one that trained longest; with local gradients nothing is sent
        between rounds, and all are averaged at the end.

        An error in a collective within it, DDP's included, becomes an `hdet.LostReplicaError` that says who is missing.
        """
        self._start()
        replicas = self.replicas
        if replicas.sharded:
            raise ValueError("join() is for whole replicas: the ranks of a sharded one must take every step together")
        if replicas.size == 1:
            yield
            return
        self._outer.check_join(self._settings.local or self._rounds.explores)
        if not self._settings.local:  # in a round without fan-out a replica whose data have ended has other weights
            self._tail.stop("as data may end at different steps")
        replicas.arrive(f"step {self._rounds.at.step}")
        with self._joining.within(replicas):
            if self._settings.local:
                yield
                self._go_along()
            else:
                with joined(self._settings.model, self._follow):
                    yield

    def close(self) -> None:
        """Remove every hook and give back the process group. Not collective; later steps are plain.

        The parameter groups hold the bases, so what a controller has moved ends with the ensemble.
        """
        self.closed = True
        self._tail.release()
        self._values.close()
        self._health.gradients.close()
        self._switch.restore()
        self._hooks.remove()
        self._rounds.close()

    # What can be seen

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run, if known."""
        return self._settings.total_steps

    @property
    def interval(self) -> int:
        """Optimizer steps per round."""
        return self._settings.interval

    @property
    def design(self) -> Design:
        """How slots are dealt."""
        return self._settings.design

    @property
    def seed(self) -> int:
        """What they are dealt from."""
        return self._settings.seed

    @property
    def last_checkpoint(self) -> str | None:
        """Where the run can be resumed from, for errors that end it; `hdet.save` and `load` set it."""
        return self._health.last_checkpoint

    @last_checkpoint.setter
    def last_checkpoint(self, path: str | None) -> None:
        self._health.last_checkpoint = path

    @property
    def replicas(self) -> Replicas:
        """Who the replicas are: fixed by the first optimizer step, looked up anew before it."""
        return self._rounds.replicas

    @property
    def mid_round(self) -> bool:
        """Whether a round is under way, in which the replicas hold different weights."""
        at = self._rounds.at
        begun = (at.step_in_round > 0 and not at.equal) or self._fan_out.steps > 0
        return begun and not at.finished and self._rounds.diverges

    @property
    def replicas_differ(self) -> bool:
        """Whether what replicas hold is their own: weights in mid-round, and optimizer state that is not averaged."""
        at = self._rounds.at
        if at.step == 0:
            self._note_noise()
        own_state = not self._settings.average_state and at.step > 0 and not at.finished
        return self.mid_round or own_state or (at.noisy and self._rounds.diverges)

    @property
    def holds_parts(self) -> bool:
        """Whether what this ensemble saves is a part of something: of where a round began and of the tail
        average, with sharded models.
        """
        return (self._outer.active or self._tail.active) and self._tensors.in_parts

    @property
    def progress(self) -> dict[str, int | bool]:
        """Where the run is: optimizer steps taken, rounds ended, steps of this round, and the like."""
        return self._rounds.state_dict()

    @property
    def scales(self) -> dict[str, float]:
        """The factor on each hyperparameter's schedule, by name: center = base * scale."""
        scales = self._steering.scales
        return dict.fromkeys(scales, 1.0) if self.closed else scales

    @property
    def multipliers(self) -> dict[str, float]:
        """This replica's multiplier of each hyperparameter, by name: value = center * multiplier."""
        multipliers = self._rounds.multipliers
        return dict.fromkeys(multipliers, 1.0) if self.closed else multipliers

    def restore_bases(self) -> None:
        """Put the bases back into the parameter groups, should a step that raised have left values there."""
        self._fan_out.restore()

    # Saving and resuming

    def state_dict(self) -> dict[str, Any]:
        """What cannot be recomputed. At a round's end it holds no rank: one file serves any number of replicas.

        In mid-round it belongs to its replica, like the weights: save one per replica.
        """
        self.restore_bases()
        state: dict[str, Any] = {
            "version": _VERSION,
            "progress": self._rounds.state_dict(),
            "controller": self._steering.state_dict(),
        }
        if self.replicas_differ:
            replicas = self.replicas
            state["mid_round"] = {"replica": replicas.rank, "replicas": replicas.size}
        if self._rounds.at.step_in_round > 0:
            state["judge"] = self._judge.state_dict()
        state["bases"] = self._values.state_dict()
        alarm = self._recovery.state_dict()
        if alarm is not None:
            state["alarm"] = alarm
        begun = self._opened and self._rounds.at.step_in_round > 0
        return state | self._outer.state_dict(begun=begun) | self._tail.state_dict(self._tensors.which())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict()`. Load weights after wrapping the model in DDP, which broadcasts rank 0's.

        Raises:
            ValueError: if the state is another replica's, or was saved for other hyperparameters.
        """
        if not isinstance(state_dict, dict) or state_dict.get("version") != _VERSION:
            raise ValueError("state_dict must come from Ensemble.state_dict() of this version of hdet")
        mid_round = state_dict.get("mid_round")
        if mid_round is not None and (self._settings.diverges or state_dict["progress"].get("noisy")):
            check_same_replica(mid_round, self.replicas)
        self._values.check_state(state_dict["bases"])
        self._tail.check_state(state_dict, self._tensors.stepped(), self._tensors.which())
        self._steering.load_state_dict(state_dict["controller"])
        self._forget_noise()
        self._judge.reset()
        if "judge" in state_dict:
            self._judge.load_state_dict(state_dict["judge"])
        self._rounds.load_state_dict(state_dict["progress"])
        if self._rounds.at.noisy and self._settings.model is not None:  # which of its parameters are is not saved
            self._tensors.set_noisy(list(self._settings.model.parameters()))
        self._outer.load_state_dict(state_dict, self._tensors.parameters())
        self._tail.load_state_dict(state_dict, self._tensors.stepped())
        self._values.load_state_dict(state_dict["bases"])
        self._recovery.load_state_dict(state_dict.get("alarm"))
        self._resume()
        self._resumed = self._rounds.at.step > 0

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Within it each replica saves or loads its own state.

        `model.state_dict()` does not warn in mid-round, and steps of the optimizer are not counted:
        torch.distributed.checkpoint takes one of length 0 to make its state.
        """
        if self._in_consensus:
            raise RuntimeError(
                "inside consensus() the model holds the average, which is no state of a replica; leave it first"
            )
        self._saving = True
        try:
            with self._fan_out.away():
                yield
        finally:
            self._saving = False

    @staticmethod
    def averaged_state(state_dict: dict[str, Any]) -> dict[str, Any]:
        """A state of mid-round for replicas whose weights were averaged: any number of them can go on from it.

        The round goes on with new slots. Its losses so far are one replica's, so its scores do not count.
        """
        progress = state_dict["progress"]
        state = {key: value for key, value in state_dict.items() if key not in ("mid_round", "judge")}
        return {**state, "progress": {**progress, "cut": progress["step_in_round"] > 0, "noisy": False}}

    @staticmethod
    def probes_at_end(tail_average: float, probe: AnyProbe | None, model: nn.Module | None) -> int:
        """How often a run with this tail average scores a probe when it ends; 0 if it cannot be averaged."""
        return probes_at_end(tail_average, probe, model)

    def start_from(self, step: int) -> None:
        """Go on at `step` without a saved state: a new controller, the same weights on all replicas."""
        self._forget_noise()
        self._judge.reset()
        self._outer.reset()
        self._tail.reset()
        self._rounds.start_from(step)
        self._steering.reset()
        self._resume()

    def _resume(self) -> None:
        self._unseen = 0
        self.restore_bases()
        self._fan_out.count()
        self._opened = self._rounds.at.step_in_round > 0
        self._recorder.forget()
        self._fan_out.ready = False
        if self._rounds.at.finished:
            self._switch.restore()
        else:
            self._switch.start()
        self._values.set(self.scales, self._rounds.multipliers)

    # Rounds

    @property
    def _equal(self) -> bool:
        """Whether the replicas are known to hold the same weights."""
        return not self._rounds.diverges or (self._rounds.at.equal and not self._fan_out.steps)

    def _start(self) -> None:
        if self.closed:
            raise RuntimeError("this ensemble is closed; make a new one to go on exploring")
        if self._rounds.start():
            if not self._agreed and self.replicas.ranks.size > 1:  # there were no replicas yet when it was made
                settle(self.replicas, "the first step of hdet.Ensemble", self._claims())
                self._agreed = True
            given = self._settings
            if self.replicas.size == 2:
                names = [h.name for h in given.explored]
                no_effect.warn_of_two_replicas(given.controller, given.plan, names, given.rates)
            self._begin_round()
            self._tail.reserve(self._tensors.stepped())
        if self._rounds.at.step == 0:
            self._note_noise()

    def _note_noise(self) -> None:
        """Before the first step: see whether a warm initialisation has made the replicas different."""
        noisy = take_noise(self._settings.model, self._tensors.trained())
        if noisy:
            self._tensors.set_noisy(noisy)
            self._rounds.begin_noisy()

    def _forget_noise(self) -> None:
        """The weights are loaded, or are the same on all replicas: whatever noise was given to them is gone."""
        take_noise(self._settings.model, self._tensors.trained())
        self._tensors.set_noisy(())

    def _begin_round(self) -> None:
        self._values.set(self.scales, self._rounds.multipliers)
        self._tensors.begin_round()
        self._health.begin_round()
        self._fan_out.ready = self._opened

    def _open_round(self) -> None:
        """Before the first step of a round, while all replicas hold the same weights: note where they begin."""
        self._opened = True
        if self._rounds.at.finished:
            return
        self._recorder.open()
        at = self._rounds.at
        if not at.noisy:  # there is no one place that all replicas began from
            self._outer.begin(self._tensors.parameters())
        if at.step > 0 and not at.step_in_round:
            self._recovery.keep_if_none()
        if self._judge.probes and self._rounds.explores and at.round > 0 and not at.cut:
            with self._values.at_center():  # round 0 is left out: noisy copies of a checkpoint may begin it
                self._judge.begin(at.round, self.replicas)

    def _count(self) -> bool:
        """Count the optimizer steps that were taken; whether the round ends with them."""
        self._unseen = 0
        return self._rounds.count(max(self._fan_out.count(), 1))

    def _follow(self) -> None:
        """Another replica takes a step, while this one has no more data."""
        self._joining.ended = True
        if not self._opened:
            self._open_round()
        if not self._rounds.at.finished and self._rounds.count(1):
            self._end_round(full=self._rounds.full)

    def _go_along(self) -> None:
        """End the rounds of the others, until nobody has data."""
        self._joining.ended = True
        while self._joining.open and not self._rounds.at.finished:
            if not self._opened:
                self._open_round()
            self._end_round(full=True)

    def _end_round(self, full: bool) -> None:
        records: list[RoundRecord] = []
        verdict: Verdict = "ok"
        self._health.mend()
        self._tensors.reshard()
        if not self._opened and self._fan_out.steps == 0 and self._rounds.at.step_in_round:
            self._open_round()  # every step of the round was skipped here, but not on other replicas
        if self._rounds.diverges or (self._recovery.active and not self._rounds.at.finished):
            record, verdict = self._converge(full)
            records.append(record)
        elif not self._rounds.at.finished:
            said = self._health.tell_skipped()
            if self._on_round:
                record = self._unjudged()
                records.append(replace(record, full=full, events=(*record.events, *said)))
        if self._rounds.over:
            self._outer.forget()
        self._outer.take()
        if verdict == "best":
            self._recovery.keep()
        if self._tail.active and not self._rounds.at.finished:
            self._tail.add(self._tensors.stepped(), self._rounds.at.step)
        if self._rounds.over or self._finishing:
            records = self._settle_tail(records)
        self._judge.reset()
        self._health.gradients.reset()
        self._rounds.next_round()
        self._tensors.set_noisy(())
        self._opened = False
        self._begin_round()
        self._clock = time.perf_counter()
        if self._rounds.over:
            self.finish()
        self._emit(records)  # last, so that a sink that raises leaves no round half ended

    def _settle_tail(self, records: list[RoundRecord]) -> list[RoundRecord]:
        """Leave the better of the last weights and the tail average, and tell so in the last record."""
        began = time.perf_counter()
        with self._values.at_center():
            told = self._tail.settle(self._meeting.score, self._settings.act)
        if told is None or not records:
            return records
        took, last = time.perf_counter() - began, records[-1]
        seconds = {name: getattr(last, name) + took for name in ("round_seconds", "probe_seconds")}
        return [*records[:-1], replace(last, events=(*last.events, told), **seconds)]

    def _emit(self, records: Sequence[RoundRecord]) -> None:
        for record in records:
            for call in self._on_round:
                call(record)

    def _converge(self, full: bool) -> tuple[RoundRecord, Verdict]:
        """Compare, average and steer; or go back."""
        began = time.perf_counter()
        tensors = self._meeting.to_average()
        judged, census = self._meeting.agree(tensors, full)
        if self._joining.ended:  # go along with the others
            full = census.full
            self._rounds.catch_up(census.step)
        losses = census.losses(judged, self._health.guarded)
        verdict = self._recovery.watch(losses, self.last_checkpoint)
        if verdict == "alarm":
            record = self._roll_back(full, judged, began)
        else:
            self._meeting.average(tensors, judged, census)
            record = self._control(full, judged, time.perf_counter() - began - self._judge.seconds_at_end)
        if census.ended and census.healthy:  # their schedules stand still: steer by those who go on
            self._steering.numbers = self._meeting.follow(self._steering.numbers, census.healthy[0])
        self._joining.open = self._joining.open and not census.all_ended
        return replace(record, events=(*record.events, *census.events(self._rounds.at.step))), verdict

    def _roll_back(self, full: bool, judged: Judged, began: float) -> RoundRecord:
        """Put the best consensus back and go on from there with lower learning rates."""
        said = self._recovery.put_back(judged.scores)
        self._outer.reset()
        self._tail.reset()
        record = self._control(False, judged, time.perf_counter() - began - self._judge.seconds_at_end)
        self._steering.scale_by(self._recovery.cut, self._settings.rates, forget=True)
        rows = {name: replace(row, scale=self.scales[name]) for name, row in record.hyperparameters.items()}
        return replace(record, full=full, hyperparameters=rows, events=(*record.events, said))

    def _control(self, full: bool, judged: Judged, seconds: float) -> RoundRecord:
        at = self._rounds.at
        trained, proposed = self.scales, self.scales
        said: tuple[str, ...] = ()
        seen = self._recorder.observe(trained)
        if full and not self._rounds.over:  # after the last step there is nothing left to steer
            report = Report(at.step, judged.scores, seen, self.total_steps, judged.probe, judged.start)
            proposed = self._steering.update(report)
            said = self._steering.said
        rows = self._recorder.rows(seen, trained, proposed, self._steering)
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
            probe_seconds=self._judge.seconds,
            events=(*self._events(), *said),
            steps=at.step_in_round,
            total_steps=self.total_steps,
            last=self._rounds.over or self._finishing,
            outer_step=self._outer.amount,
            outer_momentum=self._outer.momentum,
            gradients="local" if self._settings.local else "shared",
            replica=self.replicas.ranks.rank,
        )

    def _unjudged(self) -> RoundRecord:
        """The record of a round in which nothing was gathered: where the schedule was, and what a controller picked."""
        return self._control(False, Judged((math.nan,) * self.replicas.size, None, None), 0.0)

    def _events(self) -> tuple[str, ...]:
        """What to tell beside the numbers: in the first round, what the controller has picked and why."""
        if self._rounds.at.round:
            return ()
        why = tuple(f"{name}: {text}" for name, text in self._settings.plan.why.items())
        return why if self._found is None else (*why, f"found: {self._found}")

    # Small steps

    def _before_step(self) -> None:
        if self._in_consensus:
            raise RuntimeError("optimizer.step() inside consensus() would train the average; leave it first")
        self._start()
        if self._rounds.at.step == 0 and self._settings.plan.finds and self._found is None:
            no_effect.warn_not_prepared()
        if not self._opened:
            self._open_round()
        self._fan_out.ready = True

    def _before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        if self.mid_round and not (self._in_consensus or self._saving or self._warned_state_dict):
            self._warned_state_dict = True
            warnings.warn(
                "model.state_dict() in mid-round holds this replica's weights, not the average; save it "
                "inside `with ensemble.consensus():`, or one per replica to resume in mid-round",
                stacklevel=2,
            )

    def _note_unseen(self) -> None:
        self._unseen += 1
        if self._unseen >= _MOST_UNSEEN and (self._settings.explored or self._outer.active):
            raise RuntimeError(
                f"no optimizer step was seen in {_MOST_UNSEEN} calls of step(). Is this the optimizer that "
                "trains? A wrapper that does not call its hooks, or a captured graph, cannot fan out: pass "
                "the torch optimizer inside it. With more micro-batches than that per step, call step() once "
                "per optimizer step with the mean loss"
            )
