"""Local gradients: keeps DDP from sharing gradients; the first step shows if something else shares them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hdet._phases.phase import Phase, Round
from hdet._run.run import Run
from hdet._tensors.local_gradients import LocalGradients


class GradientSharing(Phase):
    """Turns DDP's sharing off and on. Compares the sums of the first gradients, which must differ."""

    name = "local gradients"

    def __init__(self, run: Run) -> None:
        self._run = run
        self._local = run.settings.local
        self._switch = LocalGradients(run.settings.model if self._local else None)
        self._switch.start()

    def begin(self) -> None:
        self._switch.note(self._run.tensors.trained())

    def tell(self, rnd: Round) -> None:
        rnd.tell(self.name, self._switch.told(rnd.device))

    def hear(self, rnd: Round) -> None:
        self._switch.read([row[0] for row in rnd.heard(self.name)])

    def after(self, rnd: Round) -> None:
        rnd.record["gradients"] = "local" if self._local else "shared"

    def undone(self, rnd: Round) -> None:
        self.after(rnd)

    def finish(self, rnd: Round) -> None:
        self._switch.restore()

    def resumed(self) -> None:
        if self._run.at.finished:
            self._switch.restore()
        else:
            self._switch.start()

    def release(self) -> None:
        self._switch.restore()

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Share gradients within this context."""
        with self._switch.sharing(self._run.replicas.size):
            yield
