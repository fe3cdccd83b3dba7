"""The tail average at the end of a round and of the run; `weights.py` defines it."""

from __future__ import annotations

import time

from hdet._phases.phase import Phase, Round, State
from hdet._phases.tail_average.weights import Tail
from hdet._run.run import Run


class TailAverage(Phase):
    """Averages the weights at round ends, and keeps the better weights when the run ends."""

    name = "tail average"

    def __init__(self, run: Run) -> None:
        self._run = run
        self.tail = Tail(run.settings.averaging.tail, run.settings.total_steps)

    @property
    def holds_weights(self) -> bool:
        return self.tail.active

    def dealt(self, first: bool) -> None:
        if first:
            self.tail.reserve(self._run.tensors.stepped())

    def after(self, rnd: Round) -> None:
        if self.tail.active:
            self.tail.add(self._run.tensors.stepped(), rnd.step)

    def undone(self, rnd: Round) -> None:
        self.tail.reset()
        self.after(rnd)

    def finish(self, rnd: Round) -> None:
        assert rnd.score_probe is not None
        began = time.perf_counter()
        with self._run.values.at_center():
            told = self.tail.conclude(rnd.score_probe, self._run.settings.observe_only)
        if told is None:
            return
        took = time.perf_counter() - began
        rnd.events.append(told.text)
        rnd.record["tail_average"] = told.taken
        for name in ("round_seconds", "probe_seconds"):
            rnd.record[name] = rnd.record.get(name, 0.0) + took

    def join(self) -> None:
        if not self._run.settings.local:  # in a round without fan-out one whose data have ended has other weights
            self.tail.stop("as data may end at different steps")

    def release(self) -> None:
        self.tail.release()

    def reset(self) -> None:
        self.tail.reset()

    def state_dict(self) -> State:
        return self.tail.state_dict(self._run.tensors.which())

    def check_state(self, state: State) -> None:
        self.tail.check_state(state, self._run.tensors.stepped(), self._run.tensors.which())

    def load_state_dict(self, state: State, own: State) -> None:
        self.tail.load_state_dict(state, self._run.tensors.stepped())
