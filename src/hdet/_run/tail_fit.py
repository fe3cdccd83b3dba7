"""Decide whether a run's weights can be averaged over its last part."""

from __future__ import annotations

from torch import nn

PROBES = 16  # scored to compare the average with the last weights: docs/research.md, "The tail average"


def check_part(part: float, total_steps: int | None, probe: object, model: nn.Module | None) -> float:
    """Return the part of the run to average, as the user wrote it.

    Raises:
        ValueError: if it cannot be averaged; the message says what to write instead.
    """
    if part and total_steps is None:
        raise ValueError("tail is a part of the run, so the run's length must be known: write total_steps=...")
    reason = None if not part else unfit(probe, model)
    if reason is not None:
        raise ValueError(f"a tail average cannot be used: {reason}; leave it out, or write hdet.Averaging(tail=0)")
    return part


def unfit(probe: object, model: nn.Module | None) -> str | None:
    """Why the weights of this model cannot be averaged over time; None if they can."""
    if probe is None:
        return "it needs a probe, which compares it with the last weights (probe=hdet.Probe(...))"
    if model is None:
        return "it needs to know the model (model=model)"
    if any(getattr(module, "running_mean", None) is not None for module in model.modules()):
        return "the running statistics of its normalisation would not fit the averaged weights"
    return None


def probes_at_end(part: float, probe: object, model: nn.Module | None) -> int:
    """How many probes are scored when the run ends; 0 without an average."""
    return 2 * PROBES if part and unfit(probe, model) is None else 0
