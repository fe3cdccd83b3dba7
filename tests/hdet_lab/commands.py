"""The commands of the lab as users call them, in processes of their own."""

import os
import subprocess

SMOKE = ("--size", "smoke", "--steps", "12", "--controller", "softmax")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def run(*command, timeout=100, **environment):
    """What a command prints and returns."""
    return subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=ENVIRONMENT | environment,
    )
