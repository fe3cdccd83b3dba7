"""The command `hdet` until torch is there: importing it takes seconds, and Ctrl-C in them is not an error.

It lies beside the package because everything inside imports torch first. Go on with `hdet.lab.cli`.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> int:
    """The exit code of `hdet.lab.cli.main`."""
    before = signal.signal(signal.SIGINT, _stop)
    from hdet.lab.cli import main as command  # noqa: PLC0415

    signal.signal(signal.SIGINT, before)
    return command()


def _stop(number: int, frame: FrameType | None) -> None:
    """End at once. An exception in the middle of an import may come out as any other error; nothing is open yet."""
    os.write(2, b"\nhdet: stopped\n")
    os._exit(130)
