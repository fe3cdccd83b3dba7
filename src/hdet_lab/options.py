"""All options of one run, in one object that can be saved and loaded."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from hdet.records.schema import Field, MismatchError, fields, record, text
from hdet_lab.errors import LabError, OptionError
from hdet_lab.option import REQUIRED, Rule, at_least_0, one_of, option, options_of, positive, whole
from hdet_lab.option import spread as is_spread
from hdet_lab.tasks import TASKS, MissingDataError, OptimizerKind, Size, Task, make

CONTROLLERS = ("none", "fixed", "softmax", "line_search", "slope", "auto")
_WITH_PROBE = ("line_search", "slope", "auto")
EXPLORABLE = ("learning_rate", "weight_decay", "momentum", "beta2", "dropout", "label_smoothing")
REGULARISERS = frozenset({"weight_decay", "dropout", "label_smoothing"})
SIZES = ("smoke", "standard", "long")
OPTIMIZERS = ("adamw", "sgd")
GRADIENTS = ("shared", "local")


@dataclass(frozen=True)
class RunOptions:
    """One run. Runs with equal options on the same machine give the same result.

    One field defines an option completely: its flag, type, check and `--help` line are derived from it.

    Raises:
        OptionError: for an invalid value.
    """

    task: str = option(REQUIRED, ", ".join(sorted(TASKS)), one_of(sorted(TASKS)), group="task")
    size: Size = option("standard", ", ".join(SIZES), one_of(SIZES), group="task")
    seed: int = option(
        0, "seed for weights, batches and slots",
        whole(0), Rule(lambda seed: seed < 2**63, "less than 2**63"), group="task",
    )  # fmt: skip
    data: str | None = option(None, "a file to use in place of the task's own data", group="task")
    steps: int | None = option(None, "optimizer steps; default: those of the size", whole(1), group="task")
    replicas: int = option(2, "replicas, which share the global batch", whole(1), group="task")
    optimizer: OptimizerKind = option("adamw", "adamw, or sgd with momentum", one_of(OPTIMIZERS), group="task")
    peak_lr: float | None = option(None, "peak of OneCycleLR; default: the task's own", positive("1e-3"), group="task")
    controller: str = option(
        "softmax",
        f"{', '.join(CONTROLLERS)}; auto finds the rate first in runs of more than 500 steps, none is plain OneCycleLR "
        "and DDP, fixed fans out and moves nothing, softmax is the paper's",
        one_of(CONTROLLERS),
    )
    temperature: float = option(0.1, "of the softmax controller", positive("0.1"), group="softmax")
    warmup_steps: int | None = option(
        None, "before the controller moves anything; default: a third of the run", whole(0), group="softmax"
    )
    explore: str = option(
        "", f"what to explore: {', '.join(EXPLORABLE)}; default: learning_rate, with --spread",
        metavar="NAME=SPREAD,...", group="fan-out",
    )  # fmt: skip
    spread: float | None = option(
        None, "spread of the learning rate: 0.1 tries 0.9 to 1.1 times, 2 about 1/2 to 2 times; default: 1/9, or 2 if "
        "the controller has a probe",
        is_spread("0.1"), group="fan-out",
    )  # fmt: skip
    gradients: Literal["shared", "local"] = option(
        "shared", "shared, or local: replicas train on their own between converges", one_of(GRADIENTS),
        group="fan-out",
    )  # fmt: skip
    outer_step: float | None = option(
        None, "fraction of a round's weight change to apply at converge; default: the controller's choice",
        Rule(lambda part: 0 < part <= 1, "in (0, 1]", "0.5"), group="fan-out",
    )  # fmt: skip
    outer_momentum: float | None = option(
        None, "outer momentum, for long rounds of local gradients (0.9 in DiLoCo); --outer-step is then 0.7",
        Rule(lambda part: 0 <= part < 1, "in [0, 1)", "0.9"), group="fan-out",
    )  # fmt: skip
    tail_average: float | None = option(
        None, "part of the run, at its end, whose round ends are averaged; default: the controller's choice",
        Rule(lambda part: 0 <= part <= 1, "in [0, 1]", "0.5"), metavar="PART", group="fan-out",
    )  # fmt: skip
    average_state: bool = option(True, "average the optimizer state of local gradients", group="fan-out")
    weight_decay: float | None = option(
        None, "weight decay of the dense parameters; default: the task's", at_least_0("0.1")
    )
    dropout: float = option(0.0, "of the model")
    label_smoothing: float = option(0.0, "of the training loss")
    # Such a run is the run of the remaining steps: the finder's batches are used again, and flights are passed from
    # first to last.
    charge: bool = option(
        False, "shorten the run by the cost of probe and finder, so that it costs as much as a plain run",
        group="fan-out",
    )  # fmt: skip
    interval: int | Literal["auto"] = option(
        "auto", "steps per round, or auto: a 200th of the run, between 1 and 1000", whole(1, or_word="auto"),
        group="fan-out",
    )  # fmt: skip
    per_group: bool | None = option(
        None, "explore each parameter group on its own; default: flights without a probe", group="fan-out"
    )
    checkpoint_every: int | None = option(
        None, "save the run this often; continue it with `hdet resume RUN`", whole(1), metavar="STEPS"
    )
    start: str | None = option(None, "start from the weights in this run's folder", metavar="RUN")
    warm_noise: float = option(
        0.0, "each replica's own noise on the weights, relative to their size", at_least_0("0.01")
    )
    evaluate_every: int | None = option(
        None, "write the held-out loss this often, to held_out.jsonl", whole(1), metavar="STEPS"
    )

    def __post_init__(self) -> None:
        for name, about in options_of(type(self)).items():
            for rule in about.rules:
                rule.check(name, getattr(self, name))
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
        """Whether the probe uses held-out data, so that the loss on the half it draws from is no longer a test."""
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
            one_of(EXPLORABLE).check("explore", name)
            if name in found:
                raise OptionError(f"explore must name {name} once, got {self.explore!r}")
            try:
                found[name] = float(spread)
            except ValueError:
                raise OptionError(f"explore must be like weight_decay=0.3, got {part!r}") from None
            is_spread("0.3").check(f"the spread of {name}", found[name])
        return found

    def _check_effect(self) -> None:
        """Refuse options that would be ignored."""
        others = ", ".join(name for name in CONTROLLERS if name != "none")
        for name in _in_group("fan-out"):
            if not self.fans_out and self._given(name):
                raise OptionError(f"{name} has no effect with --controller none; leave it out, or choose of {others}")
        for name in _in_group("softmax"):
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
            raise OptionError("per_group has no effect if the learning rate is not explored; leave it out")

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

    def peak_lr_of(self, task: Task) -> float:
        """The peak that the run starts with: its own, or its task's."""
        return task.peak_lr if self.peak_lr is None else self.peak_lr

    def plain(self) -> RunOptions:
        """The same run with the plain schedule, without options that then have no effect."""
        names = (*_in_group("fan-out"), *_in_group("softmax"))
        defaults = {name: type(self).__dataclass_fields__[name].default for name in names}
        return self.replace(controller="none", **defaults)

    def replace(self, **changes: Any) -> RunOptions:
        """A copy with some changes."""
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """The options as numbers, strings and None, by name."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> RunOptions:
        """The inverse of `to_json()`.

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


def _in_group(group: str) -> list[str]:
    return [name for name, about in options_of(RunOptions).items() if about.group == group]
