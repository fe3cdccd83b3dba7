"""The way in: `Ensemble`, the one object that users hold. `step()` reads as the protocol.

optimizer.step()      before: fan-out, this replica's values go into the parameter groups
                      after: the bases come back
scheduler.step()      any torch schedule; it only ever sees the base
ensemble.step(loss)   score the loss; at the end of a round converge, control and deal
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from hdet._arguments import answers, check_count
from hdet._engine import state
from hdet._engine.along import follow, go_along
from hdet._engine.assembly import assemble
from hdet._engine.gather import compare, ending
from hdet._explore.hyperparameter import Hyperparameter
from hdet._explore.slots import Design
from hdet._find_lr.find_lr import find_lr
from hdet._find_lr.found_rate import FoundRate
from hdet._hooks import Hooks, WeakHook, innermost
from hdet._options.averaging import Averaging
from hdet._options.safety import Safety
from hdet._phases.local_gradients import GradientSharing
from hdet._phases.scores import Scores
from hdet._phases.uneven_data import UnevenData, joined
from hdet._probe.judge import AnyProbe
from hdet._probe.probe import Probe
from hdet._probe.score import Loss
from hdet._replicas import Replicas, Where
from hdet._replicas.agreement import agreed, claim
from hdet._run.one_line import one_line
from hdet._run.rounds import Stage
from hdet._run.settings import Arguments, instead, read_settings
from hdet._run.tail_fit import probes_at_end
from hdet._tensors import converge
from hdet._tensors.local_gradients import Gradients
from hdet._user_warning import warn
from hdet.controllers import Controller
from hdet.records.record import OnRound


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
        design: how slots are dealt to several hyperparameters: "permutations", "orthogonal" or "turns"; by default
            what the controller wants.
        model: the trained module; its floating-point buffers (BatchNorm statistics) are averaged too.
        averaging: what is averaged and how much of it counts (outer step, tail average, optimizer state, what follows
            the weights): an `hdet.Averaging`.
        safety: what to do about numbers that are not finite, a run that diverges and replicas that are lost: an
            `hdet.Safety`.
        replicas: who they are: a process group, or a device mesh for replicas that are sharded (FSDP2, tensor
            parallelism), whose dimension "replicate" counts them (or "dp_replicate", or the first one) and whose other
            dimensions are the parts of each. By default all ranks.
        seed: what the slots are dealt from; the same on every replica.
        observe_only: measure and record everything, and leave the centers on the schedule (except that a rollback cuts
            the learning rates).
        on_round: called with a `RoundRecord` after each round, on every replica.

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
    @answers("hdet.Ensemble", instead("{}={}"))
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
        design: Design | None = None,
        model: nn.Module | None = None,
        averaging: Averaging | None = None,
        safety: Safety | None = None,
        replicas: Where | None = None,
        seed: int = 0,
        observe_only: bool = False,
        on_round: Sequence[OnRound] = (),
    ) -> None:
        given = dict(locals())  # the arguments, by name
        del given["self"]
        self._settings = read_settings(Arguments(**given))
        self.engine = assemble(self._settings)
        self._run, self._scores = self.engine.run, self.engine.phase(Scores)
        self._end_calls: list[Callable[[Ensemble], None]] = []
        self.engine.at_end = WeakHook(self._over)
        self._may_warn_of_state_dict = True
        self._hooks = Hooks(self)
        if model is not None:  # in mid-round its state is not the average
            self._hooks.before_module_state_dict(innermost(model), self._before_state_dict)
        if self._settings.safety.guard:
            for module in (model, *self._settings.averaging.followers):
                if isinstance(module, nn.Module):
                    self._hooks.after_module_load(innermost(module), self._after_load)
        claim(self._run.claims(), undo=self.close)

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
        if self._run.at.stage is not Stage.CLOSED:
            self.engine.step(loss, attempted)

    def check_loss(self, loss: Loss | None) -> Tensor | float | None:
        """What `step()` would add of this loss; raises as it would, and changes nothing."""
        return self._scores.check_loss(loss)

    def find_lr(
        self,
        loader: Iterable[Any] | Callable[[int], Any],
        loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
        *,
        scheduler: Any = None,
        **options: Any,
    ) -> FoundRate | None:
        """Before the first step: find the learning rate and let it take effect. Collective.

        `hdet.find_lr` with this ensemble's model, optimizers and length, and `found.apply` of what it finds. The record
        of the first round tells of it (`RoundRecord.search`). Weights, optimizers and random numbers are as before.

        Args:
            loader: this replica's batches; or, without a loss_fn, a `step_fn(index)` for use with the ensemble's probe.
            loss_fn: `loss_fn(model, batch)`, the mean loss.
            scheduler: the schedule of the optimizer, if there is one; a list for several optimizers.
            **options: others of `hdet.find_lr`, such as accumulate and clip_grad_norm.

        Returns:
            What was found; None if the run goes on from a saved state.
        """
        given, run = self._settings, self._run
        if run.resumed:
            return None
        if given.model is None:
            raise ValueError("find_lr() needs the model: write hdet.Ensemble(..., model=model)")
        if run.at.step > 0:
            raise ValueError(f"find_lr() comes before the first step, got {run.at.step} steps")
        if loss_fn is None and isinstance(given.probe, Probe):
            options = {"probe": given.probe, **options}
        with self.engine.phase(GradientSharing).sharing():
            search: Any = find_lr  # either of its forms
            found: FoundRate = search(
                given.model, given.optimizers, loader, loss_fn, total_steps=self.total_steps,
                outer_step=min(given.averaging.gain, 1.0), replicas=given.replicas, **options,
            )  # fmt: skip
        run.found = found
        if not given.observe_only:
            found.apply(given.optimizers, scheduler)
        run.write_values()
        run.start_clock()
        return found

    @property
    def found(self) -> FoundRate | None:
        """The learning rate that was found before the first step, of which the first record tells."""
        return self._run.found

    @found.setter
    def found(self, found: FoundRate | None) -> None:
        self._run.found = found

    def converge(self) -> None:
        """Average the replicas now and begin a new round. Collective; the controller ignores the cut round."""
        self.engine.end_now("ensemble.converge()")

    def finish(self) -> None:
        """End the run: average the replicas and stop the fan-out. Collective; later steps are plain.

        Called by the last of `total_steps` steps; a second call does nothing.
        """
        self.engine.finish()

    @contextmanager
    def consensus(self) -> Iterator[None]:
        """Within it the model is the average of the replicas: evaluate it or save it.

        Afterwards every replica has its own weights and buffers back, bit for bit, and the round goes on.
        Collective: every replica enters. Costs one copy of the model in mid-round, of its buffers at a round's end.
        """
        run, engine = self._run, self.engine
        if run.at.stage is Stage.CONSENSUS:
            raise RuntimeError("consensus() is entered already; leave it before entering it again")
        engine.start()
        rnd = ending(run, "ensemble.consensus()", full=False)
        rnd.tensors = [] if run.equal else run.tensors.weights()
        for phase in engine.phases:
            phase.prepare(rnd)
        if rnd.tensors:
            compare(run, engine.phases, rnd)
        kept = run.tensors.buffers()
        before = run.at.enter(Stage.CONSENSUS)
        run.values.fan_out.ask_again()
        run.tensors.reshard()
        try:
            with converge.averaged(rnd.tensors, self.replicas, kept, rnd.averaged), run.values.at_center():
                yield
        finally:
            run.at.enter(before)
            run.tensors.reshard()  # what was evaluated is not what is trained on

    @contextmanager
    def join(self) -> Iterator[None]:
        """Around a loop over data that end at different steps on different replicas. Collective: every replica enters.

        A replica whose data have ended goes along: it is left out of the averages and gets them. With shared gradients
        this is torch's join of DistributedDataParallel, which costs one small all-reduce per step, and at the end of
        the loop all replicas hold the weights of the one that trained longest; with local gradients nothing is sent
        between rounds, and all are averaged at the end.

        An error in a collective within it, DDP's included, becomes an `hdet.LostReplicaError` that says who is missing.
        """
        engine, run, local = self.engine, self._run, self._settings.local
        engine.start()
        replicas = self.replicas
        if replicas.sharded:
            raise ValueError("join() is for whole replicas: the ranks of a sharded one must take every step together")
        if replicas.size == 1:
            yield
            return
        for phase in engine.phases:
            phase.join()
        replicas.arrive(f"ensemble.join() (step {run.at.step})", "ensemble.join()")
        with engine.phase(UnevenData).within(self._settings.model):
            if local:
                yield
                go_along(engine)
            else:
                with joined(self._settings.model, functools.partial(follow, engine)):
                    yield

    def close(self) -> None:
        """Remove every hook and give back the process group. Not collective; later steps are plain.

        The parameter groups hold the bases, so what a controller has moved ends with the ensemble.
        """
        self._hooks.remove()
        self.engine.close()

    def at_end(self, call: Callable[[Ensemble], None]) -> None:
        """For `hdet.save`: have `call(self)` called when the run is over: after `finish()`, or when this is closed."""
        if call not in self._end_calls:
            self._end_calls.append(call)

    def _over(self) -> None:
        while self._end_calls:
            self._end_calls.pop()(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ensemble:
        """A closed copy, as `copy.deepcopy` makes of a scheduler: optimizers are copied without their hooks."""
        warn(
            "a copy of an Ensemble is closed, as copied optimizers have no hooks: with it steps are plain. For a run "
            "of its own make a new one, hdet.Ensemble(copied_optimizer, ...), and give it "
            "load_state_dict(ensemble.state_dict())"
        )
        given = self._settings
        for shared in (self.replicas, self.replicas.ranks, given.replicas, given.probe):
            memo[id(shared)] = shared  # there is one set of processes, and of data, whatever is copied
        memo[id(given.on_round)] = ()  # open files, and what else records are told to
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        vars(copied).update(copy.deepcopy(vars(self), memo))
        copied._run.at.enter(Stage.CLOSED)
        copied._end_calls = []
        copied.engine.phase(GradientSharing).release()
        return copied

    # What can be seen

    def __repr__(self) -> str:
        """One line: replica, step, what it trains with as center x multiplier, interval, controller."""
        try:
            return f"{type(self).__name__}({one_line(self._run)})"
        except Exception:  # shown in tracebacks too, of a constructor that has raised for example
            return object.__repr__(self)

    @property
    def closed(self) -> bool:
        """Whether `close()` was called: steps are plain from then on."""
        return self._run.at.closed

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
        return self._run.last_checkpoint

    @last_checkpoint.setter
    def last_checkpoint(self, path: str | None) -> None:
        self._run.last_checkpoint = path

    @property
    def replicas(self) -> Replicas:
        """Who the replicas are: fixed by the first optimizer step, looked up anew before it."""
        return self._run.replicas

    @property
    def mid_round(self) -> bool:
        """Whether a round is under way, in which the replicas hold different weights."""
        return self._run.mid_round

    @property
    def replicas_differ(self) -> bool:
        """Whether what replicas hold is their own: weights in mid-round, and optimizer state that is not averaged."""
        return self._run.replicas_differ

    @property
    def holds_parts(self) -> bool:
        """Whether what this ensemble saves is a part of something: of where a round began and of the tail
        average, with sharded models.
        """
        return any(phase.holds_weights for phase in self.engine.phases) and self._run.tensors.in_parts

    @property
    def progress(self) -> dict[str, int | bool]:
        """Where the run is: optimizer steps taken, rounds ended, steps of this round, and the like."""
        return self._run.rounds.state_dict()

    @property
    def scales(self) -> dict[str, float]:
        """The factor on each hyperparameter's schedule, by name: center = base * scale."""
        return self._run.scales

    @property
    def multipliers(self) -> dict[str, float]:
        """This replica's multiplier of each hyperparameter, by name: value = center * multiplier."""
        multipliers = self._run.rounds.multipliers
        return dict.fromkeys(multipliers, 1.0) if self.closed else multipliers

    def restore_bases(self) -> None:
        """Put the bases back into the parameter groups, should a step that raised have left values there."""
        self._run.values.fan_out.restore()

    # Saving and resuming

    def state_dict(self) -> dict[str, Any]:
        """What cannot be recomputed. At a round's end it holds no rank: one file serves any number of replicas.

        In mid-round it belongs to its replica, like the weights: save one per replica.
        """
        return state.saved_state(self.engine)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict()`. Load weights after wrapping the model in DDP, which broadcasts rank 0's.

        Raises:
            ValueError: if the state is another replica's, or was saved for other hyperparameters.
        """
        state.load_state(self.engine, state_dict)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Within it each replica saves or loads its own state.

        `model.state_dict()` does not warn in mid-round, and steps of the optimizer are not counted:
        torch.distributed.checkpoint takes one of length 0 to make its state.
        """
        if self._run.at.stage is Stage.CONSENSUS:
            raise RuntimeError(
                "inside consensus() the model holds the average, which is no state of a replica; leave it first"
            )
        with self._run.values.fan_out.away():
            yield

    @staticmethod
    def averaged_state(state_dict: dict[str, Any]) -> dict[str, Any]:
        """A state of mid-round for replicas whose weights were averaged: any number of them can go on from it.

        The round goes on with new slots. Its losses so far are one replica's, so its scores do not count.
        """
        return state.averaged_state(state_dict)

    @staticmethod
    def probes_at_end(tail: float, probe: AnyProbe | None, model: nn.Module | None) -> int:
        """How often a run with this tail average scores a probe when it ends; 0 if it cannot be averaged."""
        return probes_at_end(tail, probe, model)

    def start_from(self, step: int) -> None:
        """Go on at `step` without a saved state: a new controller, the same weights on all replicas."""
        check_count("step", step, least=0)
        state.start_from(self.engine, step)

    def _before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        held = self._run.at.stage is Stage.CONSENSUS or self._run.values.fan_out.is_away
        if self.mid_round and self._may_warn_of_state_dict and not held:
            self._may_warn_of_state_dict = False
            warn(
                "model.state_dict() in mid-round holds this replica's weights, not the average; save it "
                "inside `with ensemble.consensus():`, or one per replica to resume in mid-round"
            )

    def _after_load(self, module: nn.Module, incompatible: Any) -> None:
        for phase in self.engine.phases:
            phase.weights_loaded()
