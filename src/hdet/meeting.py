"""Where the replicas meet at the end of a round: they tell each other how they are, and are averaged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hdet import converge
from hdet.agreement import round_end
from hdet.guard.health import Health
from hdet.guard.quarantine import Census, ended, restore_state, take_census
from hdet.guard.quarantine import full as is_full
from hdet.joining import Joining
from hdet.judge import Judge, Judged
from hdet.local_gradients import LocalGradients
from hdet.replicas import LostReplicaError, collective_device
from hdet.rounds import Rounds
from hdet.settings import Settings
from hdet.tensors import Tensors

_NO_MORE_DATA = "the end of its data"


class Meeting:
    """What the replicas of one ensemble do together.

    Args:
        settings: of the ensemble.
        tensors: what is averaged.
        rounds: where the run is, and who the replicas are.
        judge: what they are compared by.
        health: how this one is.
        joining: whether its data have ended.
        switch: whether its gradients are local.
    """

    def __init__(
        self,
        settings: Settings,
        tensors: Tensors,
        rounds: Rounds,
        judge: Judge,
        health: Health,
        joining: Joining,
        switch: LocalGradients,
    ) -> None:
        self._settings, self._tensors, self._rounds = settings, tensors, rounds
        self._judge, self._health, self._joining, self._switch = judge, health, joining, switch

    def to_average(self) -> list[Tensor]:
        """What is averaged at the end of this round."""
        if not self._rounds.diverges:
            return []
        if self._settings.local:
            self._tensors.fill_state()  # a replica all of whose steps were skipped has none yet
        return self._tensors.to_average()

    def agree(
        self, tensors: Sequence[Tensor], full: bool, call: round_end.Call = "the end of a round"
    ) -> tuple[Judged, Census]:
        """Check that all replicas are at the same place with the same tensors; return what they are judged by."""
        at, replicas, gone = self._rounds.at, self._rounds.replicas, self._joining.ended
        device = self._device(tensors)
        compared = self._rounds.explores
        scores = self._judge.end(at.round, full and compared, replicas, device)
        how = self._health.condition(device, full=full, joining=self._joining.open, ended=gone)
        place = f"the end of round {at.round}" if call == "the end of a round" else call
        replicas.arrive(f"{_NO_MORE_DATA if gone else place} (step {at.step})", "" if gone else call)
        options, explored = [*self._settings.options().items()], self._settings.hyperparameters
        numbers = torch.cat([scores, self._switch.told(device), how])
        try:
            table = round_end.agree(
                replicas, call, at.step, converge.layout(tensors), options, explored, numbers, ended
            )
        except LostReplicaError as error:
            raise error.and_then(converge.UNTOUCHED) from error
        self._switch.read([row[len(scores)] for row in table])
        if gone:
            full = any(is_full(row) for row in table if not ended(row))
        judged = self._judge.read(table, full and compared)
        census = take_census(table, judged, self._health.guarded)
        return census.view(judged), census

    def average(self, tensors: Sequence[Tensor], judged: Judged, census: Census) -> None:
        """Average the replicas that count, give all of them the result, and see that it is finite."""
        if census.lost:
            raise self._health.diverged(self._health.lost(census))
        if census.sick and not tensors:
            tensors = self._tensors.to_average()
        converge.average(tensors, self._rounds.replicas, of=census.averaged, atomic=self._settings.atomic)
        if not census.all_well:
            own = not self._settings.average_state
            restore_state(census, self._tensors.state(), self._rounds.replicas, own)
        self._rounds.at.equal = True
        self._health.look_back(judged, census)

    def average_own_state(self) -> None:
        """When the run ends: plain training with shared gradients may follow, which needs equal state."""
        if self._settings.average_state:
            return
        state = self._tensors.own_state()
        layout = torch.tensor([converge.layout(state)], dtype=torch.float64, device=self._device(state))
        same = round_end.Claim(
            "the optimizer state", "every replica must have taken a step", float(layout), checksum=True
        )
        round_end.check_agreement(self._rounds.replicas.gather(layout), [same])
        converge.average(state, self._rounds.replicas, atomic=self._settings.atomic)

    def score(self, number: int) -> float:
        """The loss of the weights, which all replicas hold, on a probe that no round has seen. Collective."""
        self._tensors.reshard()
        at, replicas = self._rounds.at, self._rounds.replicas
        replicas.arrive(f"the end of the run (step {at.step})", "the end of the run")
        try:
            return self._judge.loss(at.round + 1 + number, replicas, self._device(()))
        except LostReplicaError as error:
            raise error.and_then("the weights of this replica are those of the last step") from error

    def follow(self, numbers: Sequence[float], leader: int) -> list[float]:
        """The numbers of replica `leader`, in place of these."""
        told = torch.tensor(numbers, dtype=torch.float64, device=self._device(()))
        self._rounds.replicas.broadcast(told, leader)
        return told.tolist()

    def _device(self, tensors: Sequence[Tensor]) -> torch.device:
        held = tensors or self._tensors.parameters()
        return collective_device(held) if held else self._rounds.replicas.device
