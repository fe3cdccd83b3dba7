"""What replicas leave for each other in the process group's store: where each of them is, and what they agree on.

Nothing here is a collective. A replica that is gone, or that is elsewhere, is missed and named instead of waited for
without an end.
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
_ANSWER = 0.5  # seconds that an answer of the store is waited for at least
_ABSENT = "?"  # no note is that
_READING = 5.0  # seconds that whoever serves the store stays for the others to read why everybody leaves


Look = Callable[[], float]


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

    Attributes:
        settled: which call of `settle` was the last one.
        server_is_stopped: whether it is, as far as that is known.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float | None = None) -> None:
        self._kept = _Answering(distributed_c10d._get_process_group_store(group), lambda: self.patience)
        # torchrun may start replicas again with the store of those before them, and with their notes in it.
        self._prefix = f"hdet/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._serves = dist.get_rank() == 0  # the store, perhaps
        self.timeout = group_timeout(group) if timeout is None else timeout
        self._life: int | None = None  # how many boards this rank has made in this store, with this one
        self._met = 0
        self._left: dict[str, set[int]] = {}  # who has left a note of a name: nobody takes one down
        self.settled = 0
        self._until: float | None = None
        self.server_is_stopped: Callable[[], bool] = lambda: False
        self._gave_up = False

    @property
    def _store(self) -> Any:
        """The store, to be asked now. Whoever asks a stopped process would wait for it without an end."""
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
        """Seconds that a stopped process which serves the store is waited for; by default the timeout."""
        return self.timeout if self._until is None else max(0.0, self._until - time.monotonic())

    @contextmanager
    def patient_until(self, moment: float) -> Iterator[None]:
        """Within it that process is waited for up to this moment, or an earlier one that was given before."""
        before = self._until
        self._until = moment if before is None else min(before, moment)
        try:
            yield
        finally:
            self._until = before

    @property
    def is_silent(self) -> bool:
        """Whether a request to the store is waiting for its answer, although it was given up."""
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
        """Show `mine` to the first replica, which decides from everybody's; its decision, on every replica.

        Args:
            mine: what this replica shows.
            decide: what the first replica makes of everybody's.
            look: called now and then while this replica waits: in how many seconds it wants to be, next. May raise.

        Raises:
            MissingError: on every replica that came, if some do not.
        """
        number = self._store.add(f"{self._prefix}/settled/{self._rank}", 1)
        self.settled = number
        try:
            return self._settle(number, mine, decide, look)
        except MissingError:
            raise
        except RuntimeError:  # what `look` has raised: this meeting has not been
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
        """Say that this replica has read `name`; if its process may serve the store, stay until all `readers` have.

        They must not find the store gone instead. It waits for some seconds only: they may be dead.
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
        """Leave this replica's note of that name, in place of its last one."""
        self._store.set(self._key(f"{name}/{self._rank}"), value)

    def read(self, name: str, rank: int) -> str | None:
        """A replica's note of that name; None if there is none."""
        return self.shared(f"{name}/{rank}")

    def read_all(self, name: str) -> list[str | None]:
        """Everybody's note of that name, by replica: two requests at most where everybody has left one."""
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
        """A note that is nobody's own; None if there is none."""
        return self._peek(self._key(name))

    def share(self, name: str, value: str) -> None:
        """Leave a note that is nobody's own."""
        self._store.set(self._key(name), value)

    def replace(self, name: str, before: str | None, value: str) -> str:
        """Leave a note that is nobody's own, if it is still what it was `before`; what it is now."""
        return str(self._store.compare_set(self._key(name), before or "", value).decode())

    def _peek(self, key: str) -> str | None:
        """What is there; None if nothing is. One request: `get` would wait for a key that another removes before it."""
        value = str(self._store.compare_set(key, _ABSENT, _ABSENT).decode())
        return None if value == _ABSENT else value

    def _key(self, name: str) -> str:
        if self._life is None:
            self._life = self._store.add(f"{self._prefix}/boards/{self._rank}", 1)
        return f"{self._prefix}/{self._life}/{name}"

    def _collect(self, keys: Sequence[str], look: Look) -> tuple[list[str], list[int]]:
        """What is shown under these keys, once all are there, and the indices of those that do not come.

        Whoever learns meanwhile that somebody is lost takes down its own again.
        """
        began = time.monotonic()
        while True:
            absent = self._await(keys, self.timeout - (time.monotonic() - began), look)
            found = [] if absent else [value for value in map(self._peek, keys) if value is not None]
            if absent or len(found) == len(keys):
                return found, absent

    def _await(self, keys: Sequence[str], seconds: float, look: Look) -> list[int]:
        """The indices of the keys that are not there after so many seconds."""
        began = time.monotonic()
        while True:
            if self._store.check(list(keys)):
                return []
            waited = time.monotonic() - began
            if waited >= seconds:
                return [index for index, key in enumerate(keys) if not self._store.check([key])]
            time.sleep(_pause(waited, min(look(), seconds - waited)))


class _Answering:
    """A store whose requests are given up in time.

    torch waits without an end for a process that is stopped, or whose host is gone, before or after it was asked.

    Args:
        store: it.
        patience: seconds to wait for an answer now.
    """

    def __init__(self, store: Any, patience: Callable[[], float]) -> None:
        self._store, self._patience = store, patience
        self._asking: threading.Thread | None = None

    @property
    def is_silent(self) -> bool:
        """Whether a request was given up and has no answer yet."""
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
    """What to do where replicas, or ranks, have come to different calls.

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
