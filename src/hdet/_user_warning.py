"""Warnings that point to the user's line, however deep in the library they arise."""

from __future__ import annotations

import os
import sys
import warnings

import torch

_INSIDE = (*(os.path.dirname(path) + os.sep for path in (__file__, torch.__file__)), "<")


def warn(text: str) -> None:
    """Warn at the innermost line of the call stack that is neither in this library nor in torch."""
    frame, level = sys._getframe(1), 2
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1  # type: ignore[assignment]
    warnings.warn(text, stacklevel=level)
