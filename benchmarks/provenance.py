"""What a file of results begins with: the date, the command, the machine and the versions."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("torch", "hdet", "prodigyopt", "dadaptation", "schedulefree")
DATE = time.strftime("%Y-%m-%d")


def header(title: str, how: str, seeds: list[int]) -> str:
    """Markdown; `how` says by which command the figures can be had again."""
    packages = ", ".join(f"{name} {_version(name)}" for name in _PACKAGES)
    return (
        f"# {title}, {DATE}\n\n{how}\n\n"
        f"Machine: {os.cpu_count()} CPU cores ({_processor()}), {platform.system()}, no GPU used.\n"
        f"Versions: Python {platform.python_version()}, {packages}.\n"
        f"Seeds: {', '.join(map(str, seeds))}.\n\n"
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
