"""Two replicas as seen from one of them, without processes: for tests that never converge."""

from contextlib import contextmanager

from hdet._replicas import Replicas, seated


@contextmanager
def pretended(rank=0, size=2):
    """Within it every ensemble believes to be replica `rank` of `size`."""
    replicas = Replicas()
    replicas.rank, replicas.size = rank, size
    with seated(replicas):
        yield
