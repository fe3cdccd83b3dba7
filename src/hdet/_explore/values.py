"""This replica's values of all hyperparameters, in parameter groups and in what the forward pass reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.optim import Optimizer

from hdet._explore.fan_out import FanOut
from hdet._explore.hyperparameter import Hyperparameter
from hdet._explore.in_forward import InForward
from hdet._explore.in_groups import InGroups


class Values:
    """Writes values and puts bases back.

    Args:
        optimizers: the optimizers to watch.
        hyperparameters: the hyperparameters to write.

    Attributes:
        fan_out: the values in parameter groups, written for the duration of a step.
    """

    def __init__(self, optimizers: Sequence[Optimizer], hyperparameters: Sequence[Hyperparameter]) -> None:
        self.fan_out = FanOut(optimizers, [h for h in hyperparameters if isinstance(h, InGroups)])
        self._forward = [h for h in hyperparameters if isinstance(h, InForward)]
        self._now: tuple[Mapping[str, float], Mapping[str, float]] = ({}, {})

    def set(self, scales: Mapping[str, float], multipliers: Mapping[str, float]) -> None:
        """Set this replica's factors, by hyperparameter, from the next step on."""
        self._now = scales, multipliers
        self.fan_out.set(scales, multipliers)
        for h in self._forward:
            h.write(scales[h.name], multipliers[h.name])

    @contextmanager
    def at_center(self) -> Iterator[None]:
        """Let the forward pass read the centers within this context."""
        scales, multipliers = self._now
        for h in self._forward:
            h.write(scales[h.name], 1.0)
        try:
            yield
        finally:
            for h in self._forward:
                h.write(scales[h.name], multipliers[h.name])

    def used(self, h: Hyperparameter) -> list[float | Tensor]:
        """The bases of the last step."""
        return self.fan_out.used(h.name) if isinstance(h, InGroups) else list(h.bases())

    def close(self) -> None:
        """Restore all bases for good."""
        self.fan_out.close()
        for h in self._forward:
            h.restore()

    def state_dict(self) -> dict[str, list[float]]:
        """The bases that no optimizer saves, by hyperparameter."""
        return {h.name: list(h.bases()) for h in self._forward}

    def check_state(self, state: Mapping[str, Sequence[float]]) -> None:
        """Raise if `state` belongs to other hyperparameters."""
        ours = {h.name: len(h.cells) for h in self._forward}
        saved = {name: len(bases) for name, bases in state.items()}
        if ours != saved:
            raise ValueError(
                f"the state was saved for the values {saved} (places by name) that the forward pass reads, this "
                f"ensemble has {ours}; resume with the same model and hyperparameters"
            )

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Resume from `state_dict()`."""
        for h in self._forward:
            h.restore(state[h.name])
