"""Recording: collects the other phases' results in one `RoundRecord` for the sinks."""

from __future__ import annotations

import time

from hdet._find_lr.found_rate import FoundRate
from hdet._phases.phase import Phase, Round
from hdet._run.run import Run
from hdet.records.record import RoundRecord, SearchRecord


class Recording(Phase):
    """Calls the sinks after everything else, so that a sink that raises leaves no round half ended."""

    name = "recording"

    def __init__(self, run: Run) -> None:
        self._run = run
        self.on_round = run.settings.on_round

    def prepare(self, rnd: Round) -> None:
        rnd.recorded = bool(self.on_round) and rnd.step > 0

    def after(self, rnd: Round) -> None:
        settings, now = self._run.settings, time.perf_counter()
        rnd.record |= {
            "round": rnd.number,
            "step": rnd.step,
            "full": rnd.full,
            "steps": rnd.steps,
            "total_steps": settings.total_steps,
            "last": rnd.last,
            "round_seconds": now - self._run.clock,
            "converge_seconds": now - rnd.began - rnd.probe_seconds_at_end if rnd.compares else 0.0,
            "search": None if rnd.number or self._run.found is None else search_record(self._run.found),
            "replica": self._run.replicas.ranks.rank,
        }

    def undone(self, rnd: Round) -> None:
        self.after(rnd)

    def ended(self, rnd: Round) -> None:
        if rnd.recorded:
            events = [*self._first_events(rnd), *rnd.events]
            record = RoundRecord(**rnd.record, events=tuple(events))
            for call in self.on_round:
                call(record)

    def _first_events(self, rnd: Round) -> list[str]:
        """The events of the first round: the controller's choices and reasons, and the search's result."""
        if rnd.number:
            return []
        why = [f"{name}: {text}" for name, text in self._run.settings.plan.why.items()]
        return why if self._run.found is None else [*why, f"found: {self._run.found}"]


def search_record(found: FoundRate) -> SearchRecord:
    """The record of a search."""
    return SearchRecord(
        rate=found.rate,
        start=found.rate / found.scale,
        interval=found.interval,
        whole=found.whole,
        factor=found.factor,
        first_loss=found.first_loss,
        coarse=tuple((rate, loss) for rate, loss in found.coarse),
        fine=tuple((rate, loss) for rate, loss in found.fine),
        steps=found.steps,
        cost=found.cost,
        seconds=found.seconds,
        doubts=found.doubts,
    )
