"""Three real tasks on data that pip brings: `make("text", "smoke").evaluate(model)`."""

from __future__ import annotations

from typing import Any

from hdet_lab.tasks.digits import Digits
from hdet_lab.tasks.flights import Flights
from hdet_lab.tasks.task import Batch, MissingDataError, OptimizerKind, Preset, Size, Task, bare
from hdet_lab.tasks.text import Text

TASKS: dict[str, type[Task]] = {task.name: task for task in (Digits, Text, Flights)}


def make(name: str, *arguments: Any, **options: Any) -> Task:
    """The task of this name; the other arguments are those of `Task`.

    Raises:
        ValueError: for a name that is not in `TASKS`.
    """
    if name not in TASKS:
        raise ValueError(f"name must be one of {', '.join(sorted(TASKS))}, not {name!r}")
    return TASKS[name](*arguments, **options)


__all__ = [
    "TASKS",
    "Batch",
    "Digits",
    "Flights",
    "MissingDataError",
    "OptimizerKind",
    "Preset",
    "Size",
    "Task",
    "Text",
    "bare",
    "make",
]
