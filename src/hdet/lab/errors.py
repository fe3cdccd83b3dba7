"""What the lab tells its user in one line instead of a traceback."""

from __future__ import annotations


class LabError(Exception):
    """Something the user can mend; the message says how."""

    exit_code = 1


class OptionError(LabError, ValueError):
    """An option that cannot work."""

    exit_code = 2


class FolderError(LabError):
    """The run folder cannot be used."""


class ReplicaFailedError(LabError):
    """A replica raised; the message holds its traceback."""


class InterruptedRunError(LabError):
    """The user stopped the run.

    Attributes:
        threads: whether replicas still run as threads of this process, which ends with them.
    """

    exit_code = 130

    def __init__(self, message: str, threads: bool = False) -> None:
        super().__init__(message)
        self.threads = threads


ONE_LINE = {kind.__name__: kind for kind in (OptionError, FolderError, LabError)}
"""Errors that a replica reports by their message alone, by name."""
