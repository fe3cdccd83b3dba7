"""A learned schedule as an ordinary torch scheduler: `ReplayLR`, and the file that it reads.

The file holds knots: the center of every hyperparameter at the first and the last step of each round.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hdet._arguments import check_count
from hdet._explore.hyperparameter import is_of
from hdet._hooks import unwrap
from hdet._user_warning import warn
from hdet.records.reading import UnreadableError, read_json
from hdet.records.record import RoundRecord
from hdet.records.schedule import IN_GROUPS, KIND, VERSION, check_schedule, notices, reaches_the_end

_MOST_BYTES = 1 << 28


def make_schedule(records: Iterable[RoundRecord]) -> dict[str, Any]:
    """The learned schedule of a run as plain JSON: the centers of each hyperparameter in each of its places.

    `steps` count from 0, as schedulers do: optimizer step s uses the value of step s.

    Raises:
        ValueError: if no round states the places of its hyperparameters.
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
        raise ValueError("there is no round to export: export a run after its first round")
    ended = rounds[-1].last
    steps = rounds[-1].step if ended or rounds[-1].total_steps is None else rounds[-1].total_steps
    complete = ended and reaches_the_end(schedules, steps)
    about = {"kind": KIND, "version": VERSION, "total_steps": steps, "complete": complete}
    how = {name: getattr(rounds[-1], name) for name in ("outer_step", "outer_momentum", "gradients")}
    how["tail_average_taken"] = bool(rounds[-1].tail_average)
    return {**about, **how, "hyperparameters": schedules}


class ReplayLR(LRScheduler):
    """Replay a run's learned schedule in a plain run, like any torch scheduler.

    At the recorded steps, the first and the last of each round, the values equal the recorded centers exactly; in
    between they are interpolated linearly. After the end the last value is held. Learning rates, and whatever else the
    run explored in parameter groups (weight decay, momentum), are written into the groups; values that the forward pass
    reads (dropout, label smoothing) are in `values`. Groups that the run did not explore are left alone. A tensor
    learning rate has the precision of its dtype: float32 rounds to about seven digits.

    A schedule learned with an outer step or with local gradients is valid only for training of that kind; otherwise
    there is a warning. There is also one if the run ended with its tail average.

    Args:
        optimizer: with as many parameter groups as in the run.
        schedule: a file that `hdet export` wrote, or its content.
        total_steps: stretch the schedule to this many steps; by default it keeps its length.
        which: the optimizer's index, if the run had several.
        only: names of the hyperparameters to replay, "learning_rate" for those of all parameter groups; by default all
            that the run explored.
        last_epoch: as in torch.

    Raises:
        TypeError: if a value in the schedule has the wrong type.
        ValueError: if the schedule is inconsistent or does not fit the optimizer.

    Example::

        scheduler = hdet.records.ReplayLR(optimizer, "schedule.json")
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
        check_count("which", which, 0, "optimizers, its index")
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
            warn(
                f"the run was cut off before step {told['total_steps']}; its values of step {last} are held from there"
            )
        for notice in notices(told):
            warn(notice)
        super().__init__(optimizer, last_epoch)

    @property
    def values(self) -> dict[str, float]:
        """The current values by name, or by place ("learning_rate 0/1/lr") for a hyperparameter with several."""
        step = self._step()
        several = {name for name, place in self._curves if sum(other == name for other, _ in self._curves) > 1}
        return {
            f"{name} {place}" if name in several else name: curve.at(step)
            for (name, place), curve in self._curves.items()
        }

    def get_lr(self) -> list[float | Tensor]:
        """The learning rate of each group at this step. Also writes the groups' other values, as OneCycleLR does."""
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
        """The position only: pass the schedule to the constructor again."""
        return {key: value for key, value in super().state_dict().items() if key not in _NOT_SAVED}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from `state_dict()`.

        Raises:
            TypeError, ValueError: for the state of another scheduler.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be what ReplayLR.state_dict() gave, got {type(state_dict).__name__}")
        check_count("last_epoch of state_dict", state_dict.get("last_epoch"), 0)
        groups = len(self.optimizer.param_groups)
        for name in ("base_lrs", "_last_lr"):
            rates = state_dict.get(name)
            if not isinstance(rates, (list, tuple)) or len(rates) != groups:
                raise ValueError(
                    f"{name} of state_dict must have a rate for each of the {groups} parameter groups, got "
                    f"{str(rates)[:80]}; load what the state_dict() of a ReplayLR with the same groups gave"
                )
        super().load_state_dict({key: value for key, value in state_dict.items() if key not in _NOT_SAVED})

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


def _checked(schedule: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(schedule, Mapping):
        return check_schedule(schedule)
    if not isinstance(schedule, (str, os.PathLike)):
        raise TypeError(
            "schedule must be a file that `hdet export` wrote, or its content as a dict, got "
            f'{type(schedule).__name__}; write for example "schedule.json"'
        )
    try:
        return check_schedule(read_json(Path(schedule), _MOST_BYTES))
    except UnreadableError as error:
        raise ValueError(f"schedule must be what `hdet export` writes, got {str(schedule)!r}: {error}") from error


def _chosen(hyperparameters: Mapping[str, Any], only: Sequence[str] | None) -> Mapping[str, Any]:
    """The hyperparameters to replay."""
    if only is None:
        return hyperparameters
    if (
        not isinstance(only, Collection)
        or isinstance(only, str)
        or not all(isinstance(name, str) for name in only)
        or not only
    ):
        raise ValueError(f'only must be a list of names of hyperparameters, got {only!r}; write ["learning_rate"]')
    chosen = {}
    for name in only:
        found = {key: told for key, told in hyperparameters.items() if is_of(key, name)}
        if not found:
            raise ValueError(f"only must be names that schedule has, got {name!r}; it has {sorted(hyperparameters)}")
        chosen.update(found)
    return chosen


def _curves(hyperparameters: Mapping[str, Any]) -> dict[tuple[str, str], _Curve]:
    found = {}
    for name, told in hyperparameters.items():
        for column, place in enumerate(told["places"]):
            found[name, place] = _Curve(told["steps"], [row[column] for row in told["centers"]])
    return found


def _placed(
    curves: Mapping[tuple[str, str], _Curve], optimizer: Optimizer, which: int
) -> list[tuple[int, list[str], _Curve]]:
    """Parameter group, entry and curve of every value in this optimizer's groups."""
    found = [(IN_GROUPS.fullmatch(place), name, curve) for (name, place), curve in curves.items()]
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
        if not _holds_number(groups[group], entry):
            raise ValueError(
                f"schedule has {name}, but {type(optimizer).__name__} has no {entry[0]!r} in its groups that takes a "
                'number there; say what else to replay, for example only=["learning_rate"]'
            )
    written = [(group, *entry) for group, entry, _, _ in own]
    twice = next((place for place in written if written.count(place) > 1), None)
    if twice is not None:
        raise ValueError(
            f"schedule must have one curve for each place, got several for {twice[1]!r} of group {twice[0]}; say which "
            'to replay, for example only=["learning_rate"]'
        )
    return [(group, entry, curve) for group, entry, _, curve in own]


def _holds_number(group: Mapping[str, Any], entry: Sequence[str]) -> bool:
    """Whether the parameter group has a number there that a center may replace."""
    found = None if entry[0] == "params" else group.get(entry[0])
    if len(entry) > 1:
        index = int(entry[1])
        found = found[index] if isinstance(found, (list, tuple)) and index < len(found) else None
    return isinstance(found, (Real, Tensor)) and not isinstance(found, bool)
