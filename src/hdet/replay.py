"""A learned schedule as an ordinary torch scheduler: `ReplayLR`, and the file that it reads.

The file holds knots: the centers of every hyperparameter at the first and the last step of each round.
"""

from __future__ import annotations

import bisect
import json
import math
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hdet.arguments import check_count
from hdet.hooks import unwrap
from hdet.record import RoundRecord
from hdet.tail import was_taken

VERSION = 1
_KIND = "hdet-schedule"
_IN_GROUPS = re.compile(r"(?P<optimizer>\d+)/(?P<group>\d+)/(?P<entry>[^/]+(/\d+)?)")


def make_schedule(records: Iterable[RoundRecord]) -> dict[str, Any]:
    """The learned schedule of a run, as plain JSON: for each hyperparameter its centers in each of its places.

    `steps` are counted from 0, as schedulers do: the value of step s is the one that optimizer step s is taken with.

    Raises:
        ValueError: if no round has said where its hyperparameters live.
    """
    rounds = list(records)
    schedules: dict[str, Any] = {}
    for record in rounds:
        for name, row in record.hyperparameters.items():
            if not record.steps or not row.places or len(row.last) != len(row.places):
                continue
            told = schedules.setdefault(name, {"places": list(row.places), "steps": [], "centers": []})
            if told["places"] != list(row.places):
                raise ValueError(f"the parameter groups of {name} changed in step {record.step}: nothing to replay")
            first, last = record.step - record.steps, record.step - 1
            for step, centers in ((first, row.first), (last, row.last)):
                if len(centers) == len(row.places) and (not told["steps"] or step > told["steps"][-1]):
                    told["steps"].append(step)
                    told["centers"].append(list(centers))
    if not schedules:
        raise ValueError("there is no round to export: a run is exported after its first round")
    ended = rounds[-1].last
    steps = rounds[-1].step if ended or rounds[-1].total_steps is None else rounds[-1].total_steps
    about = {"kind": _KIND, "version": VERSION, "total_steps": steps, "complete": ended}
    how = {name: getattr(rounds[-1], name) for name in ("outer_step", "outer_momentum", "gradients")}
    how["tail_average_taken"] = was_taken(rounds[-1].events)
    return {**about, **how, "hyperparameters": schedules}


class ReplayLR(LRScheduler):
    """Replay the schedule that a run has learned, in a plain run, like any torch scheduler.

    At the recorded steps, the first and the last of each round, the values are the recorded centers to the last digit;
    in between they lie on straight lines. After the end the last value stays. Learning rates, and whatever else the run
    explored in parameter groups (weight decay, momentum), are written into the groups; what the forward pass reads
    (dropout, label smoothing) is in `values`. Groups that the run did not explore are left alone. A learning rate that
    is a tensor holds what fits into it: a float32 one is rounded to about seven digits.

    What a run has learned with an outer step, or with local gradients, holds for training like that: elsewhere it is
    another schedule, and there is a warning. So there is if the run ended with its tail average.

    Args:
        optimizer: with as many parameter groups as in the run.
        schedule: a file that `hdet export` wrote, or its content.
        total_steps: stretch it to as many steps; by default it has its own length.
        which: the optimizer's index, where the run had several.
        only: names of the hyperparameters to replay, "learning_rate" for those of all parameter groups; by default all
            that the run explored.
        last_epoch: as in torch.

    Raises:
        ValueError: if the schedule does not fit the optimizer.

    Example::

        scheduler = hdet.ReplayLR(optimizer, "schedule.json")
        for batch in loader:
            ...
            optimizer.step(); scheduler.step()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedule: str | os.PathLike[str] | Mapping[str, Any],
        *,
        total_steps: int | None = None,
        which: int = 0,
        only: Sequence[str] | None = None,
        last_epoch: int = -1,
    ) -> None:
        optimizer = unwrap(optimizer)
        told = _checked(schedule)
        if total_steps is not None:
            check_count("total_steps", total_steps)
        self.total_steps = told["total_steps"] if total_steps is None else total_steps
        own = told["total_steps"]
        self._stretch = (own - 1) / (self.total_steps - 1) if self.total_steps != own and self.total_steps > 1 else 1.0
        chosen = _chosen(told["hyperparameters"], only)
        self._curves = _curves(chosen)
        self._writes = _placed(self._curves, optimizer, which)
        if not told["complete"]:
            last = max(curve["steps"][-1] for curve in chosen.values())
            warnings.warn(
                f"the run was cut off before step {told['total_steps']}; its values of step {last} are held from there",
                stacklevel=2,
            )
        for notice in notices(told):
            warnings.warn(notice, stacklevel=2)
        super().__init__(optimizer, last_epoch)

    @property
    def values(self) -> dict[str, float]:
        """What every hyperparameter is now, by name; by place ("learning_rate 0/1/lr") where it has several."""
        step = self._step()
        several = {name for name, place in self._curves if sum(other == name for other, _ in self._curves) > 1}
        return {
            f"{name} {place}" if name in several else name: curve.at(step)
            for (name, place), curve in self._curves.items()
        }

    def get_lr(self) -> list[float | Tensor]:
        """The learning rate of each group at this step. Writes what else is in the groups, as OneCycleLR does."""
        step = self._step()
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for number, path, curve in self._writes:
            group, value = self.optimizer.param_groups[number], curve.at(step)
            if path == ["lr"]:
                rates[number] = value
            elif len(path) == 1:
                group[path[0]] = value
            else:
                entries = list(group[path[0]])
                entries[int(path[1])] = value
                group[path[0]] = tuple(entries)
        return rates

    def state_dict(self) -> dict[str, Any]:
        """Where it is; the schedule itself is given to the constructor again."""
        return {key: value for key, value in super().state_dict().items() if key not in _NOT_SAVED}

    def _step(self) -> float:
        return self.last_epoch if self._stretch == 1.0 else self.last_epoch * self._stretch


_NOT_SAVED = {"_curves", "_writes", "_stretch", "total_steps"}


class _Curve:
    """The center in one place, step by step."""

    def __init__(self, steps: Sequence[int], values: Sequence[float]) -> None:
        self._steps, self._values = steps, values

    def at(self, step: float) -> float:
        right = bisect.bisect_left(self._steps, step)
        if right == len(self._steps):
            return self._values[-1]
        if self._steps[right] == step or right == 0:
            return self._values[right]
        low, high = self._steps[right - 1], self._steps[right]
        part = (step - low) / (high - low)
        return (1 - part) * self._values[right - 1] + part * self._values[right]


def _checked(schedule: str | os.PathLike[str] | Mapping[str, Any]) -> Mapping[str, Any]:
    told = schedule if isinstance(schedule, Mapping) else json.loads(Path(schedule).read_text())
    if not isinstance(told, Mapping) or told.get("kind") != _KIND:
        raise ValueError(f"schedule must be what `hdet export` writes, got {str(schedule)[:80]!r}; write for example "
                         '"schedule.json"')  # fmt: skip
    if told["version"] > VERSION:
        raise ValueError(f"schedule has version {told['version']}, this hdet reads up to {VERSION}; upgrade hdet")
    return cast("Mapping[str, Any]", told)


def _chosen(hyperparameters: Mapping[str, Any], only: Sequence[str] | None) -> Mapping[str, Any]:
    """Those that are to be replayed."""
    if only is None:
        return hyperparameters
    if isinstance(only, str) or not only:
        raise ValueError(f'only must be a list of names of hyperparameters, got {only!r}; write ["learning_rate"]')
    chosen = {}
    for name in only:
        found = {key: told for key, told in hyperparameters.items() if key == name or key.startswith(f"{name}/")}
        if not found:
            raise ValueError(f"only must be names that schedule has, got {name!r}; it has {sorted(hyperparameters)}")
        chosen.update(found)
    return chosen


def notices(told: Mapping[str, Any]) -> list[str]:
    """What makes plain training with a schedule another thing than the run was."""
    found = []
    taken, momentum = told.get("outer_step") or 1.0, told.get("outer_momentum") or 0.0
    if momentum:
        same = f"hdet.Nesterov({taken:g}, {momentum:g})"
        found.append(
            f"the schedule was learned with an outer optimizer, {same}, which goes another way than plain training; "
            f"replay it with the same one: hdet.Ensemble(..., outer_step={same})"
        )
    elif taken < 1:
        found.append(
            f"the schedule was learned with an outer step of {taken:g}, which forgives rates that are too "
            "high for plain training; replay it with the same one: "
            f"hdet.Ensemble(..., outer_step={taken:g})"
        )
    if told.get("gradients") == "local":
        found.append(
            "the schedule was learned with local gradients, where each replica steps on its own part of the batch; "
            'replay it with the same: hdet.Ensemble(..., gradients="local")'
        )
    if told.get("tail_average_taken"):
        found.append(
            "the run ended with its tail average, half of the way to the mean of the weights of its last rounds, which "
            "no schedule replays; for the same, average them as well: tail_average= of hdet.Ensemble"
        )
    return found


def _curves(hyperparameters: Mapping[str, Any]) -> dict[tuple[str, str], _Curve]:
    found = {}
    for name, told in hyperparameters.items():
        if any(center is None or not math.isfinite(center) for row in told["centers"] for center in row):
            raise ValueError(f"schedule holds centers of {name} that are not finite; export a run that did not diverge")
        for column, place in enumerate(told["places"]):
            found[name, place] = _Curve(told["steps"], [row[column] for row in told["centers"]])
    return found


def _placed(
    curves: Mapping[tuple[str, str], _Curve], optimizer: Optimizer, which: int
) -> list[tuple[int, list[str], _Curve]]:
    """Parameter group, entry and curve of all that this optimizer's groups hold."""
    found = [(_IN_GROUPS.fullmatch(place), name, curve) for (name, place), curve in curves.items()]
    own = [
        (int(match["group"]), match["entry"].split("/"), name, curve)
        for match, name, curve in found
        if match is not None and int(match["optimizer"]) == which
    ]
    groups = optimizer.param_groups
    if not own:
        raise ValueError(f"schedule holds nothing for optimizer {which} of its run; give `which` an index that it has")
    for group, entry, name, _ in own:
        if group >= len(groups):
            raise ValueError(
                f"schedule has {name} in parameter group {group}, but optimizer has {len(groups)} groups; make the "
                "groups as in the run that it comes from"
            )
        if entry[0] not in groups[group]:
            raise ValueError(
                f"schedule has {name}, but {type(optimizer).__name__} has no {entry[0]!r} in its groups; say what else "
                'to replay, for example only=["learning_rate"]'
            )
    return [(group, entry, curve) for group, entry, _, curve in own]
