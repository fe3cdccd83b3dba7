"""Errors that the lab shows in one line instead of a traceback."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hdet
from hdet.records.reading import UnreadableError, why
from hdet.records.terminal import say

_PACKAGES = {Path(hdet.__file__).parent, Path(__file__).parent}


class LabError(Exception):
    """An error that the user can fix; the message says how."""

    exit_code = 1


class OptionError(LabError, ValueError):
    """An option that cannot work."""

    exit_code = 2


class FolderError(LabError):
    """The run folder cannot be used."""


class NoRateError(LabError):
    """The search before a run has found no learning rate."""


class ReplicaFailedError(LabError):
    """A replica raised; the message holds its traceback."""


class InterruptedRunError(LabError):
    """The user stopped the run.

    Attributes:
        threads: whether replicas still run as threads of this process, which ends with them.
        exit_code: 129 for SIGHUP, otherwise 130.
    """

    exit_code = 130

    def __init__(self, message: str, threads: bool = False, exit_code: int = 130) -> None:
        super().__init__(message)
        self.threads = threads
        self.exit_code = exit_code


ONE_LINE = {kind.__name__: kind for kind in (OptionError, FolderError, NoRateError, LabError)}
"""Errors that a replica reports without a traceback, by name."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors from writing `path` within this context into one line.

    Raises:
        FolderError: for an OSError, or if an existing file at `path` is invalid.
    """
    try:
        yield
    except (OSError, UnreadableError) as error:
        raise FolderError(f"cannot write {path}: {why(error)}") from error


@contextlib.contextmanager
def warnings_in_words(shown: bool = True) -> Iterator[None]:
    """Show warnings from hdet and the lab in one line, without the source location.

    Args:
        shown: False on replicas that would only repeat the first one.
    """
    before = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], filename: str, *where: Any, **more: Any) -> None:
        if not issubclass(category, UserWarning) or _PACKAGES.isdisjoint(Path(filename).parents):
            before(message, category, filename, *where, **more)
        elif shown:
            say(f"hdet: warning: {message}", sys.stderr)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before
