"""Averaging: replaces the replicas' tensors by their mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hdet._phases.phase import Phase, Round
from hdet._replicas.claims import Claim, check_agreement
from hdet._run.run import Run
from hdet._tensors import converge


class Averaging(Phase):
    """Averages the replicas that count; every replica gets the result."""

    name = "averaging"

    def __init__(self, run: Run) -> None:
        self._run = run

    def tell(self, rnd: Round) -> None:
        if rnd.tensors is None:
            rnd.tensors = self._to_average() if self._run.rounds.diverges else []
        layout = converge.layout(rnd.tensors)
        rnd.claim(Claim("the tensors to average", "build the same model and optimizer", layout, checksum=True))

    def after(self, rnd: Round) -> None:
        if not rnd.compares:
            return
        if rnd.lost:
            raise self._run.diverged(rnd.lost)
        tensors = rnd.tensors or (self._run.tensors.to_average() if rnd.sick else [])
        self._average(tensors, rnd.averaged)
        self._run.made_equal()

    def finish(self, rnd: Round) -> None:
        """Average the state that each replica kept to itself: plain training with shared gradients may follow."""
        if self._run.settings.averaging.state:
            return
        state = self._run.tensors.own_state()
        same = Claim(
            "the optimizer state", "every replica must have taken a step", converge.layout(state), checksum=True
        )
        told = torch.tensor([same.value], dtype=torch.float64, device=rnd.device)
        check_agreement({same: [row[0] for row in self._run.replicas.gather(told)]})
        self._average(state)

    def _to_average(self) -> list[Tensor]:
        if self._run.settings.local:
            self._run.tensors.fill_state()  # a replica that skipped all its steps has none yet
        return self._run.tensors.to_average()

    def _average(self, tensors: Sequence[Tensor], of: Sequence[int] | None = None) -> None:
        converge.average(tensors, self._run.replicas, of=of, atomic=self._run.settings.safety.atomic)
