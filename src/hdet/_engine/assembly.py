"""The phases of an ensemble, in their order, and the engine that calls them."""

from __future__ import annotations

from hdet._engine.engine import Engine
from hdet._phases.agreement import Agreement
from hdet._phases.averaging import Averaging
from hdet._phases.control import Control
from hdet._phases.descent import WatchDescent
from hdet._phases.guard.phase import Guard
from hdet._phases.local_gradients import GradientSharing
from hdet._phases.outer_step import TakeOuterStep
from hdet._phases.phase import Phase
from hdet._phases.recording import Recording
from hdet._phases.rollback.phase import GoBack
from hdet._phases.scores import Scores
from hdet._phases.tail_average.phase import TailAverage
from hdet._phases.uneven_data import UnevenData
from hdet._run.run import Run
from hdet._run.settings import Settings


def assemble(settings: Settings) -> Engine:
    """The engine of an ensemble with these settings."""
    run = Run(settings)
    return Engine(run, phases(run))


def phases(run: Run) -> list[Phase]:
    """The phases at the end of a round. Their order is part of the algorithm."""
    return [
        UnevenData(run),  # first: replicas without data need not agree
        Agreement(run),  # before averaging: replicas must be at the same step
        GradientSharing(run),
        Scores(run),
        Averaging(run),
        Guard(run),  # needs the scores, and mends what averaging cannot
        Control(run),
        TakeOuterStep(run),  # from the average
        GoBack(run),  # keeps the result of the outer step
        TailAverage(run),  # averages the result of the outer step
        WatchDescent(run),
        Recording(run),  # last: records what the others did
    ]
