"""The version of hdet, without importing it, which takes seconds."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def hdet_version() -> str:
    """The version of the installed package; "unknown" for sources that are not installed."""
    try:
        return version("hdet")
    except PackageNotFoundError:
        return "unknown"
