"""Two replicas as seen from one of them, without processes: for tests that never converge."""

from contextlib import contextmanager

import hdet.rounds
from hdet.replicas import Replicas


@contextmanager
def pretended(rank=0, size=2):
    """Within it every ensemble believes to be replica `rank` of `size`."""

    class Pretended(Replicas):
        def __init__(self, process_group=None):
            super().__init__(process_group)
            self.rank, self.size = rank, size

    hdet.rounds.Replicas = Pretended
    try:
        yield
    finally:
        hdet.rounds.Replicas = Replicas
