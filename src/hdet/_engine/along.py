"""A replica whose data have ended follows the others: it ends their rounds with them."""

from __future__ import annotations

from hdet._engine.engine import Engine
from hdet._run.run import Data


def follow(engine: Engine) -> None:
    """Follow a step of another replica after this one's data have ended."""
    run = engine.run
    run.note_data(Data.ENDED)
    if not run.at.finished:
        engine.open()
        if run.rounds.count(1):
            engine.end_round(full=run.rounds.full)


def go_along(engine: Engine) -> None:
    """End the rounds with the others until no replica has data."""
    run = engine.run
    run.note_data(Data.ENDED)
    while run.data is Data.ENDED and not run.at.finished:
        engine.open()
        engine.end_round(full=True)
