"""Warnings that point to the user's line, however deep in here they arise."""

from __future__ import annotations

import os
import sys
import warnings

import torch

_HERE = os.path.dirname(__file__) + os.sep
_INSIDE = (_HERE, os.path.dirname(torch.__file__) + os.sep, "<")
_LAB = os.path.join(_HERE, "lab", "")


def warn(text: str) -> None:
    """Warn of something in the first line, going outwards, that is neither in here nor in torch."""
    frame, level = sys._getframe(1), 2
    while frame is not None and _is_inside(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1  # type: ignore[assignment]
    warnings.warn(text, stacklevel=level)


def _is_inside(path: str) -> bool:
    return path.startswith(_INSIDE) and not path.startswith(_LAB)
