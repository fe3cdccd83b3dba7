"""Detects lost and misplaced replicas while one waits or after one has failed.

Before replicas meet, each leaves a note of its place. A replica that waits for long reads the notes now and then, so
all name an ended process, or a replica at another call, within seconds instead of at the group's timeout. A replica
whose collective failed calls the roll, and waiting replicas answer. The verdict is decided once, so all report the
same.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hdet._replicas.notes import LostReplicaError, Notes
from hdet._replicas.store import Board, MissingError

_FIRST_LOOK, _NEXT_LOOK = 1.0, 0.5  # seconds
_NEIGHBOURS = 8  # next replicas that this one watches, so that a look costs the same with a thousand replicas
_ROLL_CALL = 0.7  # seconds for everybody who is alive to say so, once the timeout is over
_SILENCE = 3.0  # the same while there is no hurry: somebody may be busy
_PAUSE = 0.05
_OWN_ERROR = 1.0  # seconds to find out whether an error is of this replica alone
_IN_FLIGHT = 1.0  # seconds for what a process has sent before it ended
_NO_TIME = timedelta(milliseconds=1)


def lookout_of(group: dist.ProcessGroup) -> Lookout:
    """The one lookout of a group in this process: its counters cover everything that replicas do in the group."""
    if group not in _lookouts:
        _lookouts[group] = Lookout(Board(group))
    return _lookouts[group]


class Lookout(Notes):
    """One replica's view of its group while it waits or after it has failed."""

    def __init__(self, board: Board) -> None:
        super().__init__(board)
        self._answered: str | None = None
        self._answered_at = -_SILENCE
        self._ended_at: float | None = None

    def settle(self, mine: str, decide: Callable[[list[str]], str]) -> str:
        """Show `mine` to the first replica: see `Board.settle`.

        Raises:
            LostReplicaError: if somebody is lost or elsewhere.
            MissingError: if some do not come.
        """
        try:
            with self._patient(time.monotonic()):
                decided = self.board.settle(mine, decide, self.looks())
                if not self._processes:  # while it can be asked
                    self._states([0])
            return decided
        except (LostReplicaError, MissingError):
            raise
        except RuntimeError as error:
            raise self._store_is_gone() from error

    def looks(self) -> Callable[[], float]:
        """A function to call repeatedly while waiting: it checks if it is time; returns the seconds to the next check.

        Raises:
            LostReplicaError: when called, if somebody is lost or elsewhere.
        """
        began = time.monotonic()
        due = began + _FIRST_LOOK

        def look() -> float:
            nonlocal due
            if time.monotonic() >= due:
                with self._patient(began):
                    self._look(began)
                due = time.monotonic() + self._pause()
            return due - time.monotonic()

        return look

    def wait(self, work: dist.Work) -> None:
        """Wait for a collective of a backend that blocks its caller, and check for lost replicas meanwhile.

        Raises:
            LostReplicaError: if somebody is lost or elsewhere.
            RuntimeError: what the collective raises.
        """
        look, pause = self.looks(), _FIRST_LOOK
        while True:
            try:
                work.wait(timedelta(seconds=pause))
                return
            except RuntimeError:
                if work.is_completed():  # it has failed, or has ended just now
                    work.wait()
                    return
            look()
            pause = self._pause()

    def outlast(self, work: dist.Work) -> None:
        """Check for lost replicas until a collective of a non-blocking backend is done or has failed.

        Raises:
            LostReplicaError: if somebody is lost or elsewhere.
        """
        look, began = self.looks(), time.monotonic()
        while not work.is_completed() and (waited := time.monotonic() - began) < self.board.timeout:
            time.sleep(max(0.0, min(waited / 10, _PAUSE, look())))

    def gather(self) -> None:
        """Wait for all replicas before a process group is created, during which none could answer.

        Raises:
            LostReplicaError: if somebody is lost or elsewhere.
        """
        began = time.monotonic()
        if not self.board.meet(self.looks()):
            found = self.call_the_roll(began)
            if found:
                raise found

    def part(self, readers: int) -> None:
        """Before all fail with the same error: the process that serves the store waits for this many readers."""
        self.board.leave(f"settled/{self.board.settled}", readers)

    def explain(
        self, error: Exception, began: float, wrappers: Sequence[DistributedDataParallel] = ()
    ) -> LostReplicaError | None:
        """Find who is dead, stalled or elsewhere after `error` in communication; None if no replica is.

        If a collective raised the error, the remaining replicas report, which may take until they fail too: the group's
        timeout after they `began` to wait; their waiting in the `wrappers` is ended here. Any other error is this
        replica's own; it is left for the others to read, unless another replica is known to have failed before.
        """
        if isinstance(error, LostReplicaError):
            return None
        sure, own = _sure(error), f"raised {type(error).__name__}: {error}"
        try:
            with self._patient(began):
                if sure:
                    for wrapper in wrappers:
                        _break_off(wrapper)
                    return self.call_the_roll(began)
                found = self._others_failed(own, began) if _may_be_of_a_collective(error) else None
                if found is None:
                    self.say_failed(own)
                    self._decide([self.board.rank], said={self.board.rank: own})
                return found
        except RuntimeError:
            return self._store_is_gone() if sure else None

    # While waiting

    def _pause(self) -> float:
        """Seconds until the next look; shorter if the roll was just called."""
        return self._poll() if time.monotonic() - self._answered_at < _SILENCE else _NEXT_LOOK

    @contextmanager
    def _patient(self, began: float) -> Iterator[None]:
        """Within it a stopped process that serves the store is waited for until the timeout since then is over."""
        with self.board.patient_until(began + self.board.timeout):
            yield

    def _poll(self) -> float:
        """Seconds between two looks at the answers."""
        return max(_PAUSE, self.board.size / 1000)

    def _look(self, began: float) -> None:
        try:
            verdict = self._verdict()
            found = verdict and self._hear(verdict)
            if not found:
                self._answer()
                lost = self._any_ended(self._neighbours())
                self._ended_at = (self._ended_at or time.monotonic()) if lost else None
                gone = lost and time.monotonic() - (self._ended_at or 0.0) >= _IN_FLIGHT
                found = self.call_the_roll(began) if gone else self._compare_places()
            late = time.monotonic() - began > self.board.timeout - 3 * _NEXT_LOOK
            if not found and late:  # the others may leave before this one
                self._last_seen = self._places()
        except LostReplicaError:
            raise
        except RuntimeError:
            found = self._store_is_gone()
        if found:
            raise found

    def _neighbours(self) -> list[int]:
        size = self.board.size
        return [(self.board.rank + k) % size for k in range(1, min(_NEIGHBOURS, size - 1) + 1)]

    def _any_ended(self, ranks: Sequence[int]) -> bool:
        return "ended" in self._states(ranks).values()

    def _answer(self) -> None:
        """Answer each roll call once: this replica is here and waits."""
        called = self.board.shared("called")
        if called is None or called == self._answered or not self._concerns(json.loads(called)[0]):
            return
        self._answered, self._answered_at = called, time.monotonic()
        self.say_failed(None)

    def _compare_places(self) -> LostReplicaError | None:
        """An error if the next replica is at another call than this one, where all must make the same."""
        there = self.board.read("at", self._neighbours()[0])
        if there is None:
            return None
        number, call, _ = json.loads(there)
        if number != self._arrivals or call == self._call or not (call and self._call):
            return None
        notes = [json.loads(note) if note else None for note in self.board.read_all("at")]
        here = {rank: note for rank, note in enumerate(notes) if note and note[0] == self._arrivals and note[1]}
        return self._tell_odd({r: c for r, (_, c, _) in here.items()}, {r: place for r, (_, _, place) in here.items()})

    # After an error

    def _others_failed(self, own: str, began: float) -> LostReplicaError | None:
        """The replicas that fail within a moment, with an error other than this replica's `own`.

        A silent replica may still be computing, as this one was until now.
        """
        over = time.monotonic() + _OWN_ERROR
        late = over - began >= self.board.timeout
        while True:
            verdict = self._verdict()
            if verdict and set(json.loads(verdict)["said"].values()) != {own}:
                return self._hear(verdict)
            notes = {rank: note for rank, note in enumerate(self._failed()) if rank != self.board.rank}
            raised = {rank: note[1] for rank, note in notes.items() if note and note[1] not in (None, own)}
            how = self._states([rank for rank, note in notes.items() if note is None])
            gone = [rank for rank, state in how.items() if state == "ended"]
            if raised or gone:
                return self._decide([*raised, *gone], said=raised, gone=gone)
            if time.monotonic() >= over:
                stopped = [rank for rank, state in how.items() if state == "stopped"]
                return self._decide(stopped) if stopped and late else None
            time.sleep(self._poll())

    def call_the_roll(self, began: float) -> LostReplicaError | None:
        """Ask all replicas to answer until the missing ones are known."""
        self.say_failed(None)
        board, called = self.board, time.monotonic()
        board.share("called", json.dumps([self._arrivals, board.rank]))
        over = began + board.timeout + _ROLL_CALL
        while True:
            verdict = self._verdict()
            if verdict:
                return self._hear(verdict)
            notes = self._failed()
            raised = {rank: note[1] for rank, note in enumerate(notes) if note and note[1] and rank != board.rank}
            silent = [rank for rank, note in enumerate(notes) if note is None]
            how = self._states(silent)
            gone, stopped, unknown = ([r for r in silent if how[r] == of] for of in ("ended", "stopped", None))
            if raised or gone:
                return self._decide([*raised, *gone], said=raised, gone=gone)
            now = time.monotonic()
            if stopped and now >= over - _ROLL_CALL:
                return self._decide(stopped)
            if not silent or (now >= over and now - called >= _ROLL_CALL):
                return self._decide_by_place(silent)
            if unknown and now - called >= _SILENCE:
                return self._decide(unknown)
            time.sleep(self._poll())

    def _decide_by_place(self, silent: Sequence[int]) -> LostReplicaError | None:
        """The replicas at another place, if all have answered; among the `silent` ones if there are any."""
        places = self._places()
        elsewhere = [rank for rank, place in enumerate(places) if place != self._place]
        if silent:
            return self._decide([rank for rank in silent if rank in elsewhere] or silent)
        known = {rank: place or "a place that is not known" for rank, place in enumerate(places)}
        return self._tell_odd(known, known) if elsewhere else None


_lookouts: weakref.WeakKeyDictionary[dist.ProcessGroup, Lookout] = weakref.WeakKeyDictionary()
_WORDS = (
    *("gloo", "NCCL", "Connection closed", "Connection reset", "Timed out waiting", "Wait timeout"),
    *("Application timeout caused pair closure", "monitoredBarrier"),  # gloo's, which do not name it
)


def _break_off(wrapper: DistributedDataParallel) -> None:
    """End the others' wait in a wrapper whose collective failed here.

    gloo notifies only replicas that wait for the lost one. The others wait for one another in a ring and notice nothing
    while this one keeps its connections: gloo closes all of them once a wait has timed out.
    """
    group = wrapper.process_group
    try:
        if group._get_backend(wrapper.join_device).name() != "gloo":
            return
    except RuntimeError:  # there is none of this device
        return
    for rank in range(dist.get_world_size(group)):
        if rank != dist.get_rank(group):
            with suppress(RuntimeError):
                work = dist.irecv(torch.zeros(1), group=group, group_src=rank)
                if work is not None:
                    work.wait(_NO_TIME)


def _may_be_of_a_collective(error: Exception) -> bool:
    """Whether torch's communication raises errors of this class: its own ones, and plain RuntimeErrors by gloo."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


def _sure(error: Exception) -> bool:
    """Whether an error says itself that it is of a collective, or that replicas did not come."""
    of_torch, missed = isinstance(error, dist.DistError), isinstance(error.__context__, MissingError)
    return of_torch or missed or any(word in str(error) for word in _WORDS)
