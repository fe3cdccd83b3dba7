"""The command `hdet` until torch is imported, which takes seconds: Ctrl-C in that time is not an error.

Neither this module nor the package's `__init__` imports torch or hdet. Continue in `cli.py`.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from types import FrameType

from hdet_lab.version import hdet_version

_SIGNALS = 128  # higher exit codes stand for signals


def main() -> int:
    """Return the exit code of `hdet_lab.cli.main`.

    A stopped command exits at once: tearing torch down takes as long as a short run.
    """
    if sys.argv[1:] == ["--version"]:
        print(f"hdet {hdet_version()}")
        return 0
    before = signal.signal(signal.SIGINT, _stop)
    from hdet_lab.cli import main as command  # noqa: PLC0415

    signal.signal(signal.SIGINT, before)
    code = command()
    if code > _SIGNALS:
        from hdet_lab.launch import end_server  # noqa: PLC0415

        end_server()
        gc.collect()  # free the launcher's semaphores, or Python warns about them
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _stop(number: int, frame: FrameType | None) -> None:
    """Exit at once. An exception during an import may surface as any other error, and nothing is open yet."""
    os.write(2, b"\nhdet: stopped\n")
    os._exit(130)
