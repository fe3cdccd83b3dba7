"""Tables of plain text."""

from __future__ import annotations

import math
from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, the others to the right.

    >>> print(table(["rate", "loss"], [["1e-3", "0.5"]]))
    rate  loss
    1e-3   0.5
    """
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def number(value: float | None, digits: int = 4) -> str:
    """A loss as text; "diverged" if it is not finite.

    >>> number(1.23456), number(float("inf"))
    ('1.2346', 'diverged')
    """
    return "diverged" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"
