"""Everything that defines one run, in one value that can be written to a file and read back."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from hdet.schema import Field, MismatchError, fields, record, text
from hdet_lab.errors import LabError, OptionError
from hdet_lab.tasks import TASKS, MissingDataError, OptimizerKind, Size, Task, make

CONTROLLERS = ("none", "fixed", "softmax", "line_search", "slope", "auto")
_WITH_PROBE = ("line_search", "slope", "auto")
EXPLORABLE = ("learning_rate", "weight_decay", "momentum", "beta2", "dropout", "label_smoothing")
REGULARISERS = frozenset({"weight_decay", "dropout", "label_smoothing"})
_OF_FAN_OUT = (
    "explore", "spread", "gradients", "outer_step", "outer_momentum", "tail_average", "average_state", "interval",
    "per_group", "charge",
)  # fmt: skip
_OF_SOFTMAX = ("temperature", "warmup_steps")
SIZES = ("smoke", "standard", "long")
OPTIMIZERS = ("adamw", "sgd")


@dataclass(frozen=True)
class RunOptions:
    """One run. Two runs with equal options on one machine give the same result.

    Attributes:
        task: the name of the task.
        size: "smoke", "standard" or "long".
        seed: what weights, batches and slots are drawn from.
        data: a file to use in place of the task's own data.
        steps: optimizer steps; None for those of the size.
        replicas: how many there are; they share the task's global batch.
        optimizer: "adamw" or "sgd", with momentum.
        peak_lr: the peak of OneCycleLR; None for the task's own.
        controller: "none" is plain OneCycleLR and DDP, "fixed" fans out and converges and moves nothing,
            "softmax" is the paper's controller; the others are those of the library.
        temperature: that of the softmax controller.
        warmup_steps: steps before the controller moves anything; None for a third of the run.
        explore: what is explored, with its spread: "learning_rate=0.1,weight_decay=0.3". A spread below 1 is that of
            the linear ladder, one above 1 that of the log ladder. Empty for the learning rate, with `spread`.
        spread: of the learning rate; None for 1/9, or for the log ladder up to 2 where the controller has a probe.
        gradients: "shared", or "local": replicas train on their own between converges.
        outer_step: how much of a round's way is taken at converge; None for what the controller wants.
        outer_momentum: how much of the rounds before is taken again; None for none. With one, outer_step is 0.7 if it
            is None: `hdet.Nesterov`.
        tail_average: the part of the run at its end whose round ends are averaged; None for what the controller wants.
        average_state: average the optimizer state of local gradients too.
        weight_decay: of the dense parameters; None for the task's own.
        dropout, label_smoothing: of the model and of the training loss.
        charge: shorten the run by what probe and finder cost, so that its whole cost is that of a plain run. It is then
            the run of so many steps: a finder's batches are given back, and flights are passed from first to last.
        interval: steps per round; "auto" is a 200th of the run, between 1 and 1000.
        per_group: explore each parameter group on its own; None for the task's way, which is yes for flights.
        checkpoint_every: steps between checkpoints; None for no checkpoints.
        start: the folder of another run of the task, whose weights the run begins with; None for new ones.
        warm_noise: each replica begins with its own noise on the weights, of this size relative to them.
        evaluate_every: steps between evaluations on the held-out samples; None for one at the end.

    Raises:
        OptionError: for a value that cannot work.
    """

    task: str
    size: Size = "standard"
    seed: int = 0
    data: str | None = None
    steps: int | None = None
    replicas: int = 2
    optimizer: OptimizerKind = "adamw"
    peak_lr: float | None = None
    controller: str = "softmax"
    temperature: float = 0.1
    warmup_steps: int | None = None
    explore: str = ""
    spread: float | None = None
    gradients: Literal["shared", "local"] = "shared"
    outer_step: float | None = None
    outer_momentum: float | None = None
    tail_average: float | None = None
    average_state: bool = True
    weight_decay: float | None = None
    dropout: float = 0.0
    label_smoothing: float = 0.0
    charge: bool = False
    interval: int | Literal["auto"] = "auto"
    per_group: bool | None = None
    checkpoint_every: int | None = None
    start: str | None = None
    warm_noise: float = 0.0
    evaluate_every: int | None = None

    def __post_init__(self) -> None:
        _one_of("task", self.task, sorted(TASKS))
        _one_of("size", self.size, SIZES)
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        _one_of("controller", self.controller, CONTROLLERS)
        _whole("seed", self.seed, 0)
        if self.seed >= 2**63:
            raise OptionError(f"seed must be less than 2**63, got {self.seed}")
        _whole("replicas", self.replicas, 1)
        _whole("steps", self.steps, 1)
        _whole("warmup_steps", self.warmup_steps, 0)
        _whole("checkpoint_every", self.checkpoint_every, 1)
        _whole("evaluate_every", self.evaluate_every, 1)
        if self.interval != "auto":
            _whole("interval", self.interval, 1)
        _number("peak_lr", self.peak_lr, 0 < (self.peak_lr or 1) < math.inf and self.peak_lr != 0, "positive", "1e-3")
        _number("temperature", self.temperature, 0 < self.temperature < math.inf, "positive", "0.1")
        _number("spread", self.spread, _is_spread(self.spread or 0.0), "in [0, 1), or above 1", "0.1")
        _number("outer_step", self.outer_step, 0 < (self.outer_step or 1) <= 1, "in (0, 1]", "0.5")
        _number("outer_momentum", self.outer_momentum, 0 <= (self.outer_momentum or 0) < 1, "in [0, 1)", "0.9")
        _number("tail_average", self.tail_average, 0 <= (self.tail_average or 0) <= 1, "in [0, 1]", "0.5")
        _number("weight_decay", self.weight_decay, 0 <= (self.weight_decay or 0) < math.inf, "at least 0", "0.1")
        _number("warm_noise", self.warm_noise, 0 <= self.warm_noise < math.inf, "at least 0", "0.01")
        _one_of("gradients", self.gradients, ("shared", "local"))
        self._check_effect()
        self._check_explored()
        if self.replicas == 1 and self.controller not in ("none", "auto"):  # a long run with auto does not fan out
            raise OptionError("replicas must be 2 or more to fan out, got 1; or choose --controller none")

    @property
    def fans_out(self) -> bool:
        """Whether this is more than plain training."""
        return self.controller != "none"

    @property
    def probes(self) -> bool:
        """Whether the replicas are scored on a probe."""
        return self.controller in _WITH_PROBE

    @property
    def probes_held_out(self) -> bool:
        """Whether that probe is of held-out data, so that the loss on the half it draws from is no test any more."""
        return self.probes and not REGULARISERS.isdisjoint(self.explored())

    def explored(self) -> dict[str, float]:
        """The spread of each explored hyperparameter, by name.

        >>> RunOptions("text", explore="learning_rate=2,weight_decay=0.3").explored()
        {'learning_rate': 2.0, 'weight_decay': 0.3}
        """
        if not self.explore:
            default = 2.0 if self.probes else 1 / 9
            return {"learning_rate": default if self.spread is None else self.spread}
        found = {}
        for part in self.explore.split(","):
            name, _, spread = part.partition("=")
            _one_of("explore", name, EXPLORABLE)
            if name in found:
                raise OptionError(f"explore must name {name} once, got {self.explore!r}")
            try:
                found[name] = float(spread)
            except ValueError:
                raise OptionError(f"explore must be like weight_decay=0.3, got {part!r}") from None
            _number(f"the spread of {name}", found[name], _is_spread(found[name]), "in [0, 1), or above 1", "0.3")
        return found

    def _check_effect(self) -> None:
        """Refuse what would be ignored."""
        others = ", ".join(name for name in CONTROLLERS if name != "none")
        for name in _OF_FAN_OUT:
            if not self.fans_out and self._given(name):
                raise OptionError(f"{name} has no effect with --controller none; leave it out, or choose of {others}")
        for name in _OF_SOFTMAX:
            if self.controller != "softmax" and self._given(name):
                raise OptionError(
                    f"{name} has no effect with --controller {self.controller}; leave it out, or choose softmax"
                )
        if not self.average_state and self.gradients != "local":
            raise OptionError(
                "average_state has no effect with shared gradients; leave it out, or add --gradients local"
            )
        if self.charge and not self.probes:
            raise OptionError(
                f"charge has no effect with --controller {self.controller}, which has no probe to pay for; leave it "
                f"out, or choose of {', '.join(_WITH_PROBE)}"
            )
        if self.tail_average and not self.probes:
            raise OptionError(
                f"tail_average needs a probe, which --controller {self.controller} does not have; leave it out, or "
                f"choose of {', '.join(_WITH_PROBE)}"
            )
        if self.explore and self.spread is not None:
            raise OptionError(
                f"spread has no effect beside --explore; leave it out and write --explore learning_rate={self.spread:g}"
            )
        if self.per_group is not None and "learning_rate" not in self.explored():
            raise OptionError("per_group has no effect where the learning rate is not explored; leave it out")

    def _given(self, name: str) -> bool:
        return bool(getattr(self, name) != type(self).__dataclass_fields__[name].default)

    def _check_explored(self) -> None:
        for name in self.explored():
            if name in ("dropout", "label_smoothing") and not getattr(self, name):
                raise OptionError(f"to explore {name}, give it a value to start from: --{name.replace('_', '-')} 0.1")
        if self.optimizer == "sgd" and "beta2" in self.explored():
            raise OptionError("sgd has no beta2 to explore; explore momentum, or choose --optimizer adamw")
        acts_before = {"dropout", "label_smoothing"} & set(self.explored())
        if acts_before and self.gradients == "shared" and self.controller not in ("none", "fixed"):
            raise OptionError(f"{min(acts_before)} can be judged with local gradients only: add --gradients local")

    def make_task(self) -> Task:
        """The task, checked against the number of replicas.

        Raises:
            LabError: if its data are missing or unusable.
        """
        try:
            task = make(self.task, self.size, self.seed, self.data, self.steps, self.dropout, self.label_smoothing)
            task.batch(0, self.replicas - 1, self.replicas)
        except ValueError as error:
            raise OptionError(str(error)) from error
        except MissingDataError as error:
            raise LabError(str(error)) from error
        return task

    def plain(self) -> RunOptions:
        """The same under the plain schedule, without what then has no effect."""
        names = (*_OF_FAN_OUT, *_OF_SOFTMAX)
        defaults = {name: type(self).__dataclass_fields__[name].default for name in names}
        return self.replace(controller="none", **defaults)

    def replace(self, **changes: Any) -> RunOptions:
        """The same with some changes."""
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """As numbers, strings and None, by name."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RunOptions:
        """Back from `to_json()`.

        >>> options = RunOptions("digits", interval=5)
        >>> RunOptions.from_json(options.to_json()) == options
        True
        """
        unknown = sorted(set(values) - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            raise OptionError(f"there is no option {unknown[0]}; was it written by another version of hdet?")
        known = {name: field._replace(required=True) for name, field in fields(cls).items() if name in values}
        try:
            return cls(**record({"task": Field(text), **known})(values))
        except MismatchError as error:
            raise OptionError(str(error)) from None


def _is_spread(spread: float) -> bool:
    return 0 <= spread < 1 or 1 < spread < math.inf


def _one_of(name: str, value: str, choices: tuple[str, ...] | list[str]) -> None:
    if value not in choices:
        raise OptionError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _whole(name: str, value: object, least: int) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise OptionError(f"{name} must be a whole number of at least {least}, got {value!r}")


def _number(name: str, value: float | None, holds: bool, rule: str, example: str) -> None:
    if value is not None and not holds:
        raise OptionError(f"{name} must be {rule}, got {value!r}; for example {example}")
