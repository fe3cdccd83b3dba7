"""Agreement: replicas are averaged only if they are at the same step, with equal options and schedule."""

from __future__ import annotations

import math
from typing import get_args

import torch

from hdet._phases.phase import Call, Phase, Round
from hdet._replicas.claims import SAME_SCHEDULE, Claim, base_claims, check_agreement, checksum, same
from hdet._replicas.store import same_calls
from hdet._run.run import Run

_CALLS = get_args(Call)
_SAME_STEPS = "every replica must take the same number of steps; for data that end unevenly use `with ensemble.join():`"
_SAME_ARGUMENTS = "give every replica the same arguments"


class Agreement(Phase):
    """Compares the claims of all phases. Bases are sent as a sum, and compared one by one only if the sums differ."""

    name = "agreement"

    def __init__(self, run: Run) -> None:
        self._run = run

    def tell(self, rnd: Round) -> None:
        settings = self._run.settings
        explored = [(h.name, h.spread, h.ladder, len(list(h.bases()))) for h in settings.hyperparameters]
        options = checksum([*settings.told().items(), *explored])
        total = math.fsum(claim.value for claim in base_claims(settings.hyperparameters))
        self._place = [
            Claim("the call", same_calls(), _CALLS.index(rnd.call), words=_CALLS),
            Claim("the step", _SAME_STEPS, rnd.step),
        ]
        self._options = Claim("the ensemble's options", _SAME_ARGUMENTS, options, checksum=True)
        self._bases = Claim("the sum of all bases", SAME_SCHEDULE, total)
        rnd.claim(*self._place, self._options, self._bases)

    def hear(self, rnd: Round) -> None:
        table, present = rnd.heard_claims, rnd.present
        columns = dict(zip(rnd.claims, zip(*table, strict=True), strict=True))
        bases, totals = self._bases, columns.pop(self._bases)
        others = [claim for claim in columns if claim not in (*self._place, self._options)]
        check_agreement({claim: columns[claim] for claim in (*self._place, *others, self._options)}, present)
        if all(same(totals[rank], totals[present[0]]) for rank in present):
            return
        each = base_claims(self._run.settings.hyperparameters)
        values = torch.tensor([claim.value for claim in each], dtype=torch.float64, device=rnd.device)
        gathered = self._run.replicas.gather(values)
        check_agreement(dict(zip(each, zip(*gathered, strict=True), strict=True)), present)
        check_agreement({bases: totals}, present)
