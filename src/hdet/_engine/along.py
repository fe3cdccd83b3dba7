"""A replica whose data have ended goes along: it ends the rounds of those that still train."""

from __future__ import annotations

from hdet._engine.engine import Engine
from hdet._run.run import Data


def follow(engine: Engine) -> None:
    """Another replica takes a step, while this one has no more data."""
    run = engine.run
    run.data = Data.ENDED
    if not run.at.finished:
        engine.open()
        if run.rounds.count(1):
            engine.end_round(full=run.rounds.full)


def go_along(engine: Engine) -> None:
    """End the rounds of the others, until nobody has data."""
    run = engine.run
    run.data = Data.ENDED
    while run.data is Data.ENDED and not run.at.finished:
        engine.open()
        engine.end_round(full=True)
