"""The replicas' messages in the process group's store: each one's place, and what they agree on.

Nothing here is a collective. A replica that is gone or elsewhere is named instead of being waited for forever.
"""

from __future__ import annotations

import functools
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.5  # seconds between two looks at the store: a twentieth of those waited so far
_STOPPED_PAUSE = 0.05
_ANSWER = 0.5  # minimum seconds to wait for an answer of the store
_ABSENT = "?"  # never a valid note
_READING = 5.0  # seconds that the process serving the store waits for the others to read why all fail


Look = Callable[[], float]


class MissingError(RuntimeError):
    """Some replicas did not come.

    Attributes:
        ranks: the missing replicas.
        seconds: how long the others waited for them.
    """

    def __init__(self, ranks: Sequence[int], seconds: float) -> None:
        super().__init__(f"{who(ranks)} did not come within {seconds:.3g} s")
        self.ranks, self.seconds = list(ranks), seconds


class Board:
    """The store of a process group, as one replica sees it. Every replica must make the same boards in the same order.

    Args:
        group: the replicas.
        timeout: seconds to wait for one of them; by default the group's.

    Attributes:
        settled: number of the last call of `settle`.
        server_is_stopped: whether the process that serves the store is stopped, as far as is known.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float | None = None) -> None:
        self._kept = _Answering(distributed_c10d._get_process_group_store(group), lambda: self.patience)
        # torchrun may restart replicas with the previous store, which still holds their notes.
        self._prefix = f"hdet/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._serves = dist.get_rank() == 0  # the store, perhaps
        self.timeout = group_timeout(group) if timeout is None else timeout
        self._life: int | None = None  # number of boards that this rank has made in this store, including this one
        self._met = 0
        self._left: dict[str, set[int]] = {}  # by name, the replicas that left a note: notes stay
        self.settled = 0
        self._until: float | None = None
        self.server_is_stopped: Callable[[], bool] = lambda: False
        self._gave_up = False

    @property
    def _store(self) -> Any:
        """The store, unless its process is stopped: a request would then block forever."""
        over = time.monotonic() + self.patience
        while self.server_is_stopped():
            if self._gave_up or time.monotonic() >= over:
                self._gave_up = True
                raise RuntimeError("the process that serves the store is stopped")
            time.sleep(_STOPPED_PAUSE)
        self._gave_up = False
        return self._kept

    @property
    def patience(self) -> float:
        """Seconds to wait for a stopped process that serves the store; by default the timeout."""
        return self.timeout if self._until is None else max(0.0, self._until - time.monotonic())

    @contextmanager
    def patient_until(self, moment: float) -> Iterator[None]:
        """Within this context wait for that process until this moment, or an earlier one set before."""
        before = self._until
        self._until = moment if before is None else min(before, moment)
        try:
            yield
        finally:
            self._until = before

    @property
    def is_silent(self) -> bool:
        """Whether an abandoned request to the store is still waiting for its answer."""
        return self._kept.is_silent

    @property
    def rank(self) -> int:
        """Which replica this is."""
        return self._rank

    @property
    def size(self) -> int:
        """How many there are."""
        return self._size

    def settle(self, mine: str, decide: Callable[[list[str]], str], look: Look = lambda: math.inf) -> str:
        """Send `mine` to the first replica, which decides from all; return its decision on every replica.

        Args:
            mine: this replica's message.
            decide: makes the first replica's decision from all messages.
            look: called now and then while this replica waits; returns the seconds until its next call. May raise.

        Raises:
            MissingError: on every replica that came, if some do not.
        """
        number = self._store.add(f"{self._prefix}/settled/{self._rank}", 1)
        self.settled = number
        try:
            return self._settle(number, mine, decide, look)
        except MissingError:
            raise
        except RuntimeError:  # `look` has raised: cancel this meeting
            with suppress(RuntimeError):
                self._store.delete_key(f"{self._prefix}/settle/{number}/{self._rank}")
                self._store.add(f"{self._prefix}/settled/{self._rank}", -1)
            raise

    def _settle(self, number: int, mine: str, decide: Callable[[list[str]], str], look: Look) -> str:
        shown = [f"{self._prefix}/settle/{number}/{rank}" for rank in range(self._size)]
        decided, last = (f"{self._prefix}/settle/{n}/decided" for n in (number, number - 1))
        self._store.set(shown[self._rank], mine)
        if self._rank > 0:
            missing = self._await([decided], self.timeout + 1.0, look)  # the first one waits as long, then names them
            answer = "" if missing else self._peek(decided) or ""
        else:
            everybodys, absent = self._collect(shown, look)
            answer = f"-{absent}" if absent else decide(everybodys)
            self._store.set(decided, answer)
            for key in () if absent else (*shown, last):  # all have come here, so all have read the last decision
                self._store.delete_key(key)
        if not answer:
            raise MissingError([r for r, key in enumerate(shown) if not self._store.check([key])], self.timeout)
        if answer.startswith("-"):
            raise MissingError(json.loads(answer[1:]), self.timeout)
        return answer

    def leave(self, name: str, readers: int, seconds: float = _READING) -> None:
        """Note that this replica has read `name`; if its process may serve the store, wait until all `readers` have.

        Otherwise they would find the store gone. It waits for some seconds only, because they may be dead.
        """
        with suppress(RuntimeError):
            read = self._store.add(self._key(f"read/{name}"), 1)
            began = time.monotonic()
            while self._serves and read < readers and time.monotonic() - began < seconds:
                time.sleep(0.02)
                read = self._store.add(self._key(f"read/{name}"), 0)

    def meet(self, look: Look) -> bool:
        """Wait until all replicas are here; False if some are not within the timeout."""
        self._met += 1
        key = self._key(f"met/{self._met}")
        here, began = int(self._store.add(key, 1)), time.monotonic()
        while here < self._size and time.monotonic() - began < self.timeout:
            time.sleep(_pause(time.monotonic() - began, look()))
            here = int(self._store.add(key, 0))
        if here == self._size and self._rank == 0 and self._met > 1:
            self._store.delete_key(self._key(f"met/{self._met - 1}"))
        return here == self._size

    def write(self, name: str, value: str) -> None:
        """Write this replica's note of that name, replacing its previous one."""
        self._store.set(self._key(f"{name}/{self._rank}"), value)

    def read(self, name: str, rank: int) -> str | None:
        """A replica's note of that name; None if there is none."""
        return self.shared(f"{name}/{rank}")

    def read_all(self, name: str) -> list[str | None]:
        """All replicas' notes of that name, by replica: at most two requests if all have left one."""
        keys = [self._key(f"{name}/{rank}") for rank in range(self._size)]
        left = self._left.setdefault(name, set())
        unknown = [rank for rank in range(self._size) if rank not in left]
        if unknown and self._store.check([keys[rank] for rank in unknown]):
            left.update(unknown)
        found = {rank: self._peek(keys[rank]) for rank in range(self._size) if rank not in left}
        there = sorted(left)
        left.update(rank for rank, note in found.items() if note is not None)
        values = self._store.multi_get([keys[rank] for rank in there]) if there else []
        found |= {rank: value.decode() for rank, value in zip(there, values, strict=True)}
        return [found[rank] for rank in range(self._size)]

    def shared(self, name: str) -> str | None:
        """A shared note; None if there is none."""
        return self._peek(self._key(name))

    def share(self, name: str, value: str) -> None:
        """Write a shared note."""
        self._store.set(self._key(name), value)

    def replace(self, name: str, before: str | None, value: str) -> str:
        """Write a shared note if it still equals `before`; return its current value."""
        return str(self._store.compare_set(self._key(name), before or "", value).decode())

    def _peek(self, key: str) -> str | None:
        """The value of a key; None if absent. One request: `get` would block on a key that another replica removes."""
        value = str(self._store.compare_set(key, _ABSENT, _ABSENT).decode())
        return None if value == _ABSENT else value

    def _key(self, name: str) -> str:
        if self._life is None:
            self._life = self._store.add(f"{self._prefix}/boards/{self._rank}", 1)
        return f"{self._prefix}/{self._life}/{name}"

    def _collect(self, keys: Sequence[str], look: Look) -> tuple[list[str], list[int]]:
        """The values of these keys once all exist, and the indices of those that never appear.

        A replica that learns meanwhile of a lost one removes its own value again.
        """
        began = time.monotonic()
        while True:
            absent = self._await(keys, self.timeout - (time.monotonic() - began), look)
            found = [] if absent else [value for value in map(self._peek, keys) if value is not None]
            if absent or len(found) == len(keys):
                return found, absent

    def _await(self, keys: Sequence[str], seconds: float, look: Look) -> list[int]:
        """The indices of the keys that are still absent after so many seconds."""
        began = time.monotonic()
        while True:
            if self._store.check(list(keys)):
                return []
            waited = time.monotonic() - began
            if waited >= seconds:
                return [index for index, key in enumerate(keys) if not self._store.check([key])]
            time.sleep(_pause(waited, min(look(), seconds - waited)))


class _Answering:
    """A store whose requests time out.

    torch waits forever for a process that is stopped, or whose host is gone, before or after the request.

    Args:
        store: the store.
        patience: returns the seconds to wait for an answer now.
    """

    def __init__(self, store: Any, patience: Callable[[], float]) -> None:
        self._store, self._patience = store, patience
        self._asking: threading.Thread | None = None

    @property
    def is_silent(self) -> bool:
        """Whether an abandoned request has no answer yet."""
        return self._asking is not None and self._asking.is_alive()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(self._ask, getattr(self._store, name))

    def _ask(self, request: Callable[..., Any], *given: Any) -> Any:
        answers: list[Any] = []
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                answers.append(request(*given))
            except BaseException as error:
                errors.append(error)

        if not self.is_silent:
            self._asking = threading.Thread(target=ask, daemon=True, name="hdet asks the store")
            self._asking.start()
            self._asking.join(max(self._patience(), _ANSWER))
        if errors:
            raise errors[0]
        if not answers:
            raise RuntimeError("the process that serves the store does not answer")
        return answers[0]


def _pause(waited: float, most: float) -> float:
    """Seconds until the next look at the store: at `most` so many."""
    return max(0.0, min(max(waited / 20, _FIRST_PAUSE), _LONGEST_PAUSE, most))


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


def same_calls(noun: str = "replica") -> str:
    """What to do if replicas, or ranks, are at different calls.

    >>> same_calls("rank")
    'every rank must make the same calls in the same order'
    """
    return f"every {noun} must make the same calls in the same order"


def counted(number: int, noun: str) -> str:
    """A number of things in words.

    >>> counted(1, "step"), counted(3, "step")
    ('1 step', '3 steps')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
