"""What replicas leave for each other in the process group's store: where each of them is, and what they agree on.

Nothing here is a collective. A replica that is gone, or that is elsewhere, is missed and named instead of waited for
without an end.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.distributed import distributed_c10d

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.5  # seconds between two looks at the store: a twentieth of those waited so far


class MissingError(RuntimeError):
    """Some replicas did not come.

    Attributes:
        ranks: which.
        seconds: how long they were waited for.
    """

    def __init__(self, ranks: Sequence[int], seconds: float) -> None:
        super().__init__(f"{who(ranks)} did not come within {seconds:.3g} s")
        self.ranks, self.seconds = list(ranks), seconds


class Board:
    """The store of a process group, as one replica sees it. Every replica must make the same boards in the same order.

    Args:
        group: the replicas.
        timeout: seconds to wait for one of them; by default the group's.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float | None = None) -> None:
        self._store = distributed_c10d._get_process_group_store(group)
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self.timeout = group_timeout(group) if timeout is None else timeout
        self._number: int | None = None  # of those that notes are left on
        self._left: set[str] = set()

    def settle(self, mine: str, decide: Callable[[list[str]], str]) -> str:
        """Show `mine` to the first replica, which decides from everybody's; its decision, on every replica.

        Raises:
            MissingError: on every replica that came, if some do not.
        """
        number = self._store.add(f"hdet/settled/{self._rank}", 1)
        shown = [f"hdet/settle/{number}/{rank}" for rank in range(self._size)]
        decided, last = (f"hdet/settle/{n}/decided" for n in (number, number - 1))
        self._store.set(shown[self._rank], mine)
        if self._rank > 0:
            missing = self._await([decided], self.timeout + 1.0)  # the first replica waits as long, and says who lacks
            answer = "" if missing else self._store.get(decided).decode()
        else:
            absent = self._await(shown, self.timeout)
            answer = decide([self._store.get(key).decode() for key in shown]) if not absent else f"-{absent}"
            self._store.set(decided, answer)
            for key in () if absent else (*shown, last):  # all have come here, so all have read the last decision
                self._store.delete_key(key)
        if not answer:
            raise MissingError([r for r, key in enumerate(shown) if not self._store.check([key])], self.timeout)
        if answer.startswith("-"):
            raise MissingError(json.loads(answer[1:]), self.timeout)
        return answer

    def write(self, name: str, value: str) -> None:
        """Leave a note that all can read, in place of the last one of that name."""
        key = self._key(f"{name}/{self._rank}")
        self._store.set(key, value)
        self._left.add(key)

    def read(self, name: str, wait: float = 0.0) -> list[str | None]:
        """Everybody's note of that name, by replica; None where there is none after `wait` seconds."""
        keys = [self._key(f"{name}/{rank}") for rank in range(self._size)]
        absent = set(self._await(keys, wait))
        return [None if rank in absent else self._store.get(key).decode() for rank, key in enumerate(keys)]

    def close(self) -> None:
        """Take down what this replica has left."""
        for key in self._left:
            self._store.delete_key(key)
        self._left.clear()

    def _key(self, name: str) -> str:
        if self._number is None:
            self._number = self._store.add(f"hdet/boards/{self._rank}", 1)
        return f"hdet/{self._number}/{name}"

    def _await(self, keys: Sequence[str], seconds: float) -> list[int]:
        """The indices of the keys that are not there after so many seconds."""
        began = time.monotonic()
        while True:
            if self._store.check(list(keys)):
                return []
            waited = time.monotonic() - began
            if waited >= seconds:
                return [index for index, key in enumerate(keys) if not self._store.check([key])]
            time.sleep(min(max(waited / 20, _FIRST_PAUSE), _LONGEST_PAUSE, seconds - waited))


def group_timeout(group: dist.ProcessGroup) -> float:
    """How long this group's collectives wait for a replica, in seconds."""
    found = []
    for device in group._device_types:
        try:
            found.append(group._get_backend(device).options._timeout.total_seconds())
        except (AttributeError, RuntimeError):  # a backend without options, or of a device that is not there
            continue
    return float(min(found, default=dist.default_pg_timeout.total_seconds()))


def who(ranks: Sequence[int], noun: str = "replica") -> str:
    """Replicas, or ranks, in words.

    >>> who([2]), who([0, 1, 3])
    ('replica 2', 'replicas 0, 1 and 3')
    """
    if len(ranks) == 1:
        return f"{noun} {ranks[0]}"
    shown = [str(rank) for rank in (ranks if len(ranks) <= 8 else ranks[:7])]
    last = shown.pop() if len(ranks) <= 8 else f"{len(ranks) - 7} more"
    return f"{noun}s {', '.join(shown)} and {last}"


def counted(number: int, noun: str) -> str:
    """A number of things in words.

    >>> counted(1, "step"), counted(3, "step")
    ('1 step', '3 steps')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
