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
    """What runs behind an ensemble with these settings."""
    run = Run(settings)
    return Engine(run, phases(run))


def phases(run: Run) -> list[Phase]:
    """What happens at the end of a round. The order is part of the algorithm."""
    return [
        UnevenData(run),  # who has no more data? Only the others need to agree
        Agreement(run),  # nothing is averaged between replicas at different places
        GradientSharing(run),
        Scores(run),
        Averaging(run),
        Guard(run),  # needs the scores, and mends what averaging cannot
        Control(run),
        TakeOuterStep(run),  # from the average
        GoBack(run),  # keeps what the outer step has led to
        TailAverage(run),  # of the same
        WatchDescent(run),
        Recording(run),  # last: tells what the others have done
    ]
