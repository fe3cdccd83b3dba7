"""`OneCycleAutoLR`: the paper's scheduler, a drop-in for torch's OneCycleLR.

The published argument names are translated into this library's words here and nowhere else.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any, Literal, ParamSpec

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from hdet._arguments import Rule, answers, check_count, check_names, check_number
from hdet._explore.in_groups import InGroups
from hdet._explore.slots import check_spread
from hdet._find_lr.found_rate import FoundRate
from hdet._hooks import unwrap
from hdet._probe.score import Loss
from hdet._replicas.agreement import agreed, claim
from hdet._run.no_effect import last_acting_step, warm_up_told
from hdet._run.settings import instead
from hdet._tensors.deepspeed import check_deepspeed
from hdet._user_warning import warn
from hdet.controllers import Fixed, Softmax
from hdet.controllers.softmax import RULES
from hdet.ensemble import Ensemble

P = ParamSpec("P")
Decay = Literal["one_cycle", "geometric"]
_AUTO = "auto"
_FREE = ("averaging", "safety", "replicas", "seed", "observe_only", "on_round")
"""The arguments of `hdet.Ensemble` that the scheduler leaves to the user."""
_INSTEAD = {
    **instead('ensemble={{"{}": {}}}'),
    **{name: f'ensemble={{"{name}": ...}}' for name in _FREE},
    **dict.fromkeys(("probe", "gradients", "design"), "hdet.Ensemble(...) beside torch's OneCycleLR"),
    "auto_lr_decay": "decay=...",
    **dict.fromkeys(
        ("max_scale", "auto_lr_max_scale"),
        "hdet.Ensemble(..., controller=hdet.controllers.Softmax(max_scale=...)) beside torch's OneCycleLR",
    ),
    "controller": "enable_auto_lr=True",
    "hyperparameters": "ensemble_lr_spread_ratio=1/9",
    "interval": "model_sync_interval=100",
    "model": "model=model",
    "optimizer": "OneCycleAutoLR(optimizer, ...)",
    "start_step": "last_epoch=start_step",
    "total_steps": "total_steps=10_000",
}


def _searching(init: Callable[P, None]) -> Callable[P, None]:
    """Make a constructor find the rate where it is to: with `max_lr="auto"`, once all replicas have a scheduler."""

    @functools.wraps(init)
    def within(*args: P.args, **kwargs: P.kwargs) -> None:
        optimizer = kwargs.get("optimizer", args[1] if len(args) > 1 else None)
        groups = [(group, dict(group)) for group in getattr(optimizer, "param_groups", ())]
        init(*args, **kwargs)
        given = inspect.signature(init).bind(*args, **kwargs).arguments
        scheduler = given["self"]
        if not isinstance(given["max_lr"], str) or scheduler.last_epoch > 0:  # then the optimizer has the rates
            return
        try:
            scheduler.ensemble.find_lr(given["loader"], given["loss_fn"], scheduler=scheduler)
        except BaseException:
            scheduler.ensemble.close()
            for group, before in groups:
                group.clear()
                group.update(before)
            raise

    return within


class OneCycleAutoLR(OneCycleLR):
    """OneCycleLR whose replicas fan out around it, converge, and steer it by their losses.

    With `ensemble_lr_spread_ratio=0` it is OneCycleLR, bit for bit, and sends nothing. With a spread every
    parameter group's rate fans out from the first step on, and every `model_sync_interval` steps the replicas
    are averaged. With `enable_auto_lr` the losses given to `step(loss)` move the rates (`hdet.controllers.Softmax`).

    Args:
        optimizer, max_lr, ..., last_epoch: as in torch's OneCycleLR. `max_lr` may also be what `hdet.find_lr` has
            found, or "auto": then it is found here, from the model, the loader and the loss_fn.
        auto_lr_warmup_steps: steps before the losses begin to move the rates.
        ensemble_lr_spread_ratio: the spread, in [0, 1): rates from 1 - spread to 1 + spread times the center.
        model_sync_interval: the interval, in optimizer steps, between converges.
        rank, world_size: taken from torch.distributed when it is initialised, as it must be for more than one.
        enable_auto_lr: let the losses move the rates.
        loss_scale: the softmax temperature: the loss difference that makes the odds e to 1.
        lr_of_lr: how much of the velocity is taken each round.
        momentum_of_lr: how much of the velocity is kept each round, in [0, 1).
        model: as in `hdet.Ensemble`.
        loader, loss_fn: for max_lr="auto", as in `hdet.find_lr`; the groups' present rates only say how they relate.
            Where gradients are accumulated, clipped or scaled, write `max_lr=hdet.find_lr(...)`, which can be told.
        decay: what the rates follow without a signal once the losses move them: "one_cycle", the schedule itself, or
            "geometric", a constant factor per round down to OneCycleLR's last rate.
        ensemble: other arguments of `hdet.Ensemble`, by name: averaging, safety, replicas, seed, observe_only and
            on_round. For example `ensemble={"safety": hdet.Safety(guard=True)}`.

    Give the losses of all but the last micro-batch of a step to `scheduler.ensemble.step(loss)`. Save and load
    through `state_dict()`: the object itself, which holds a process group, cannot be pickled. Within SequentialLR and
    the like no loss reaches it: use `hdet.Ensemble` beside them.

    Attributes:
        ensemble: the `hdet.Ensemble` behind it: `consensus()`, `converge()`, `mid_round` and more.

    Example::

        scheduler = OneCycleAutoLR(optimizer, max_lr=9e-4, total_steps=10_000, ensemble_lr_spread_ratio=1 / 9,
                                   model_sync_interval=100, auto_lr_warmup_steps=3_000, enable_auto_lr=True)
        ...
        scheduler.step(loss)
    """

    ensemble: Ensemble
    _ready = False  # torch's constructor takes a first step before there is an ensemble

    @_searching
    @agreed("hdet.OneCycleAutoLR")
    @answers("hdet.OneCycleAutoLR", _INSTEAD)
    def __init__(
        self,
        optimizer: Optimizer,
        max_lr: float | list[float] | FoundRate | Literal["auto"],
        total_steps: int | None = None,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: Literal["cos", "linear"] = "cos",
        cycle_momentum: bool = True,
        base_momentum: float | list[float] = 0.85,
        max_momentum: float | list[float] = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        last_epoch: int = -1,
        auto_lr_warmup_steps: int = 100000,
        ensemble_lr_spread_ratio: float = 0.0,
        model_sync_interval: int = 1000,
        rank: int = 0,
        world_size: int = 1,
        enable_auto_lr: bool = False,
        loss_scale: float = 0.002,
        lr_of_lr: float = 0.5,
        momentum_of_lr: float = 0.9,
        *,
        model: nn.Module | None = None,
        loader: Iterable[Any] | None = None,
        loss_fn: Callable[[nn.Module, Any], Tensor] | None = None,
        decay: Decay = "one_cycle",
        ensemble: Mapping[str, Any] | None = None,
    ) -> None:
        check_deepspeed(optimizer, model)
        options = _ensemble_options(ensemble)
        spread = ensemble_lr_spread_ratio
        check_spread(spread, "linear", name="ensemble_lr_spread_ratio")
        given = _max_lr(max_lr, optimizer, {"model": model, "loader": loader, "loss_fn": loss_fn})
        steps = _check_total_steps(total_steps, epochs, steps_per_epoch)
        check_count("model_sync_interval", model_sync_interval)
        check_count("auto_lr_warmup_steps", auto_lr_warmup_steps, least=0)
        check_count("world_size", world_size, unit="replicas")
        auto = enable_auto_lr and spread > 0
        published = {
            "loss_scale": loss_scale,
            "lr_of_lr": lr_of_lr,
            "momentum_of_lr": momentum_of_lr,
        }
        controller = _softmax(published, auto_lr_warmup_steps)
        if decay not in ("one_cycle", "geometric"):
            raise ValueError(f'decay must be "one_cycle" or "geometric", got {decay!r}')
        _warn_without_effect(enable_auto_lr, spread, auto_lr_warmup_steps, model_sync_interval, steps, decay)
        self._world_size = world_size
        self._decay = None
        if auto and decay == "geometric" and not options.get("observe_only"):
            self._decay = _GeometricDecay(auto_lr_warmup_steps, model_sync_interval, steps)
        super().__init__(
            optimizer,
            given,
            total_steps,
            epochs,
            steps_per_epoch,
            pct_start,
            anneal_strategy,
            cycle_momentum,
            base_momentum,
            max_momentum,
            div_factor,
            final_div_factor,
            three_phase,
            last_epoch,
        )
        self._rates = _learning_rates(unwrap(optimizer), float(spread))
        with warm_up_told():  # above, with the published names
            self.ensemble = Ensemble(
                optimizer,
                self._rates,
                total_steps=self.total_steps,
                interval=model_sync_interval,
                controller=controller if auto else Fixed(),
                model=model,
                **options,
            )
        if self.last_epoch > 0:
            self.ensemble.start_from(self.last_epoch)
        claim({"arguments": {"decay": decay, "enable_auto_lr": enable_auto_lr, "last_epoch": self.last_epoch}})
        self._ready = True

    def step(self, epoch: int | Loss | None = None, *, loss: Loss | None = None) -> None:
        """Advance the schedule, then the ensemble. Call it after each `optimizer.step()`.

        Args:
            epoch: an int is an epoch, as in torch; anything else is this replica's loss.
            loss: this replica's own training loss; required when the losses move the rates.
        """
        if not self._ready:
            super().step()
            return
        if isinstance(epoch, Tensor) or not (epoch is None or isinstance(epoch, numbers.Integral)):
            if loss is not None:
                raise TypeError("loss was given twice; write step(loss) or step(loss=loss)")
            epoch, loss = None, epoch
        loss = self.ensemble.check_loss(loss)  # raises before the schedule has moved
        if self._step_count == 1:
            self._check_launched()
        self.ensemble.restore_bases()
        super().step(epoch)  # type: ignore[arg-type]
        self.ensemble.step(loss)
        if self.last_epoch >= self.total_steps and not self.ensemble.closed:
            self.ensemble.finish()

    def get_lr(self) -> list[float | Tensor]:
        """The base of each parameter group: OneCycleLR's curve, or the geometric decay after the hand-over."""
        decay = self._decay
        if decay is None or self.last_epoch < decay.handover or (self._ready and self.ensemble.replicas.size == 1):
            return super().get_lr()
        start = self._curve_at(decay.handover)
        super().get_lr()  # for its side effect: it cycles the momentum
        done = decay.done(self.last_epoch)
        return [
            lr * (group["min_lr"] / lr) ** done if done < 1 and lr > 0 else group["min_lr"]
            for lr, group in zip(start, self.optimizer.param_groups, strict=True)
        ]

    def get_last_lr(self) -> list[float | Tensor]:
        """The center of each parameter group: the schedule times the factor that the losses have moved it by."""
        last = super().get_last_lr()
        if not self._ready:
            return last
        scales = self.ensemble.scales
        return [rate.center(lr, scales[rate.name]) for rate, lr in zip(self._rates, last, strict=True)]

    def get_replica_lr(self) -> list[float | Tensor]:
        """The learning rate that this replica trains with, for each parameter group."""
        multipliers = self.ensemble.multipliers
        return [lr * multipliers[rate.name] for rate, lr in zip(self._rates, self.get_last_lr(), strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """OneCycleLR's state, and the ensemble's under "ensemble". No rank, no world size."""
        state = {key: value for key, value in super().state_dict().items() if key not in _NOT_SAVED}
        return {**state, "ensemble": self.ensemble.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or one of torch's OneCycleLR, which the ensemble goes on from."""
        schedule = dict(state_dict)
        ensemble = schedule.pop("ensemble", None)
        if ensemble is not None:
            self.ensemble.load_state_dict(ensemble)
        else:
            self.ensemble.start_from(schedule["last_epoch"])
        before = self.base_lrs
        super().load_state_dict(schedule)
        self._rates_multiplied([_ratio(new, old) for new, old in zip(self.base_lrs, before, strict=True)])

    def __repr__(self) -> str:
        """One line, mostly the ensemble's."""
        try:
            return f"{type(self).__name__}({self.ensemble!r})"
        except Exception:  # shown in tracebacks too, of a constructor that has raised for example
            return object.__repr__(self)

    def _curve_at(self, step: int) -> list[float | Tensor]:
        """OneCycleLR's rates at `step`. Leaves the momentum of `step` behind."""
        now, self.last_epoch = self.last_epoch, step
        try:
            return super().get_lr()
        finally:
            self.last_epoch = now

    def _without_ensemble(self, memo: dict[int, Any]) -> None:
        """Put a copy that is only the schedule into `memo` of a deepcopy."""
        memo[id(self)] = alone = object.__new__(type(self))
        left_out = {"ensemble", "_ready", "_rates"}
        vars(alone).update({key: deepcopy(value, memo) for key, value in vars(self).items() if key not in left_out})
        if self.ensemble.replicas.size == 1:
            alone._decay = None

    def _rates_multiplied(self, ratios: list[float]) -> None:
        """The floors of the ensemble's rates go along with the schedule."""
        for rate, ratio in zip(self._rates, ratios, strict=True):
            if ratio != 1:
                object.__setattr__(rate, "floor", rate.floor * ratio)

    def _check_launched(self) -> None:
        if self._world_size > 1 and self.ensemble.replicas.size == 1:
            raise RuntimeError(
                f"world_size={self._world_size} was given, but torch.distributed is not initialised, so the replicas "
                "cannot be averaged; call torch.distributed.init_process_group() before training"
            )


# Arguments, which the constructor gets again, and what is saved in another form.
_NOT_SAVED = {"ensemble", "_ready", "_rates", "_decay", "_world_size"}


def _ratio(new: float | Tensor, old: float | Tensor) -> float:
    return float(new) / float(old) if float(old) > 0 else 1.0


class _GeometricDecay:
    """The published decay: from the hand-over on, the same factor at each of the K converges that are left.

    With (1 - gamma)^K = min_lr / eta at the hand-over, the last converge arrives at OneCycleLR's floor.
    """

    def __init__(self, warmup_steps: int, interval: int, total_steps: int) -> None:
        self.handover = min(max(1, math.ceil(warmup_steps / interval)) * interval, total_steps)
        self._interval = interval
        self._total_steps = total_steps
        self.rounds = math.ceil((total_steps - self.handover) / interval) + 1

    def done(self, step: int) -> float:
        """The part of the K converges that lie at or before `step`, which is not before the hand-over."""
        if step >= self._total_steps:
            return 1.0
        return ((step - self.handover) // self._interval + 1) / self.rounds


def _ensemble_options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The arguments of `hdet.Ensemble` that the user gives.

    Raises:
        TypeError: for one that there is not, and for those that the scheduler gives itself.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(
            f"ensemble must be a dict of arguments of hdet.Ensemble, got {given!r}; write for example "
            'ensemble={"seed": 1}'
        )
    check_names("ensemble= of hdet.OneCycleAutoLR", given, _FREE, _INSTEAD)
    return dict(given)


def _learning_rates(optimizer: Optimizer, spread: float) -> list[InGroups]:
    return [
        InGroups(
            name=f"learning_rate/{number}",
            key="lr",
            optimizers=(optimizer,),
            group=number,
            spread=spread,
            floor=min(float(group["min_lr"]), float(group["initial_lr"])),
        )
        for number, group in enumerate(optimizer.param_groups)
    ]


def _softmax(published: dict[str, float], warmup_steps: int) -> Softmax:
    """The controller, its options checked under their published names."""
    ours = {_OURS[name]: value for name, value in published.items()}
    for name, value in published.items():
        check_number(name, value, RULES[_OURS[name]])
    return Softmax(**ours, warmup_steps=warmup_steps)


_OURS = {
    "loss_scale": "temperature",
    "lr_of_lr": "step_size",
    "momentum_of_lr": "momentum",
}
_MAX_LR = Rule(lambda x: 0 <= x < math.inf, "be at least 0 and finite", '1e-3, or "auto"')


def _max_lr(max_lr: Any, optimizer: Optimizer, needed: Mapping[str, object]) -> float | list[float]:
    """What the schedule is made with: for "auto" the present rates, until the search is over.

    Raises:
        TypeError, ValueError: for what is no rate, and for a search that lacks something or is not wanted.
    """
    if isinstance(max_lr, str) and max_lr == _AUTO:
        missing = [name for name, value in needed.items() if value is None]
        if missing:
            raise ValueError(
                f'max_lr="auto" needs model, loader and loss_fn, and there is no {missing[0]}; write for example '
                'OneCycleAutoLR(optimizer, max_lr="auto", total_steps=10_000, model=model, loader=loader, '
                "loss_fn=lambda model, batch: cross_entropy(model(batch[0]), batch[1]))"
            )
        return [float(group["lr"]) for group in unwrap(optimizer).param_groups]
    if isinstance(max_lr, str):
        raise TypeError(f'max_lr must be a number or "auto", got {max_lr!r}')
    for name in ("loader", "loss_fn"):
        if needed[name] is not None:
            raise ValueError(f'{name} is for max_lr="auto", got max_lr={max_lr!r}; leave it out')
    given: float | list[float] = list(max_lr.rates[0]) if isinstance(max_lr, FoundRate) else max_lr
    _check_max_lr(given, optimizer)
    return given


def _check_max_lr(max_lr: Any, optimizer: Optimizer) -> None:
    several = isinstance(max_lr, (list, tuple))
    groups = len(getattr(optimizer, "param_groups", ()))
    if several and len(max_lr) != groups:
        raise ValueError(
            f"max_lr must be one number, or one for each of the {groups} parameter groups, got {len(max_lr)} of them"
        )
    for lr in max_lr if several else [max_lr]:
        number = float(lr) if isinstance(lr, Tensor) else lr
        check_number("max_lr", number, _MAX_LR)


def _check_total_steps(total_steps: int | None, epochs: int | None, steps_per_epoch: int | None) -> int:
    if total_steps is not None:
        check_count("total_steps", total_steps)
        return total_steps
    if epochs is None or steps_per_epoch is None:
        raise ValueError(
            f"total_steps must be given, or epochs and steps_per_epoch, got total_steps=None, epochs={epochs}, "
            f"steps_per_epoch={steps_per_epoch}; write for example total_steps=10_000"
        )
    check_count("epochs", epochs, unit="epochs")
    check_count("steps_per_epoch", steps_per_epoch)
    return epochs * steps_per_epoch


def _warn_without_effect(auto: bool, spread: float, warmup_steps: int, interval: int, steps: int, decay: str) -> None:
    problem = None
    last = last_acting_step(interval, steps)
    if auto and spread == 0:
        problem = "enable_auto_lr has no effect with ensemble_lr_spread_ratio=0: give a spread, for example 1/9"
    elif auto and (last == 0 or warmup_steps > last):
        problem = (
            f"enable_auto_lr has no effect: auto_lr_warmup_steps={warmup_steps} is not over at step {last}, the end of "
            f"the last full round that is followed by another; for this run of {steps} steps write for example "
            f"auto_lr_warmup_steps={steps // 3}, model_sync_interval={max(1, steps // 20)}"
        )
    elif decay != "one_cycle" and not auto:
        problem = f"decay={decay!r} has no effect without enable_auto_lr=True"
    if problem is not None:
        warn(problem)
