"""Notes between the replicas of a group: each one's place, its failures, and who is lost."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from hdet._replicas.liveness import State, identity, state
from hdet._replicas.store import Board, same_calls, who

_FEW = 8  # replicas whose notes are read one by one
_ENDING = 0.3  # seconds for a process to end once its connections are closed
_READING = 2.0  # seconds that the process serving the store waits for the others to read who is lost


class LostReplicaError(RuntimeError):
    """A replica is dead or stalled, or is at another place than the others; the message names it.

    Attributes:
        ranks: the lost replicas.
    """

    def __init__(self, text: str, ranks: Sequence[int]) -> None:
        super().__init__(text)
        self.ranks = list(ranks)

    def and_then(self, text: str) -> LostReplicaError:
        """The same error with an addition to its message."""
        return LostReplicaError(f"{self}; {text}", self.ranks)


class Notes:
    """The notes of the replicas of one group, as one of them leaves and reads them.

    Args:
        board: where they are.
    """

    def __init__(self, board: Board) -> None:
        self.board = board
        self._arrivals = 0
        self._call = self._place = ""
        self._said_failed = False
        self._heard: str | None = None
        self._processes: dict[int, Any] = {}
        self._last_seen: list[str | None] = [None] * board.size
        board.server_is_stopped = self._server_is_stopped

    # Where everybody is

    def arrive(self, place: str, call: str | None = None) -> None:
        """Leave a note of this replica's place before others may wait for it there.

        Args:
            place: the place, in words.
            call: the call that must be the n-th on all replicas; by default the place. "" matches any.
        """
        first = self._arrivals == 0
        self._arrivals += 1
        self._call, self._place = place if call is None else call, place
        with suppress(RuntimeError):  # the store is gone: what follows says so
            if first:
                self.board.write("process", json.dumps(identity()))
            if first or self._said_failed:
                self.board.write("failed", "null")
                self._said_failed = False
            self.board.write("at", json.dumps([self._arrivals, self._call, place]))

    def last_seen(self, ranks: Sequence[int]) -> str:
        """Where these replicas were last seen, in words; empty if they were not."""
        try:
            places = self._places()
        except RuntimeError:
            return ""
        seen: dict[str, list[int]] = {}
        for rank in ranks:
            place = places[rank]
            if place is not None:
                seen.setdefault(place, []).append(rank)
        return ", ".join(f"{who(those)} at {place}" for place, those in seen.items())

    def _states(self, ranks: Sequence[int]) -> dict[int, State | None]:
        """The states of these replicas' processes; None if unknown."""
        new = [rank for rank in ranks if rank not in self._processes]
        together = self.board.read_all("process") if len(new) > _FEW else None
        notes = {rank: together[rank] if together else self.board.read("process", rank) for rank in new}
        self._processes |= {rank: json.loads(note) for rank, note in notes.items() if note is not None}
        return {rank: state(self._processes[rank]) if rank in self._processes else None for rank in ranks}

    def _server_is_stopped(self) -> bool:
        """Whether the first replica, which may serve the store, is stopped; without asking the store."""
        return self.board.rank > 0 and 0 in self._processes and state(self._processes[0]) == "stopped"

    def _server_has_ended(self) -> bool:
        """Whether the first replica, which may have served the store, has ended: seen a moment after the store goes."""
        if self.board.rank == 0 or self.board.is_silent or 0 not in self._processes:
            return False
        over = time.monotonic() + _ENDING
        while (how := state(self._processes[0])) == "runs" and time.monotonic() < over:
            time.sleep(_ENDING / 10)
        return how == "ended"

    def _places(self) -> list[str | None]:
        return [None if note is None else json.loads(note)[2] for note in self.board.read_all("at")]

    # Who has failed

    def say_failed(self, said: str | None) -> None:
        self._said_failed = True
        self.board.write("failed", json.dumps([self._arrivals, said]))

    def _failed(self) -> list[Any]:
        """What each replica said when it failed; None if it has not."""
        notes = [None if text is None else json.loads(text) for text in self.board.read_all("failed")]
        return [note if note and self._concerns(note[0]) else None for note in notes]

    def _concerns(self, arrivals: int) -> bool:
        """Whether a note after so many arrivals is current: replicas may be one arrival apart."""
        return arrivals >= self._arrivals - 1

    # What all say

    def _decide(
        self,
        ranks: Sequence[int],
        *,
        said: dict[int, str] | None = None,
        gone: Sequence[int] = (),
        text: str | None = None,
    ) -> LostReplicaError:
        """Announce who is lost, or read the verdict of a faster replica."""
        seen = self._places() if text is None else []
        places = {rank: seen[rank] for rank in ranks if seen}
        told = {"ranks": list(ranks), "said": said or {}, "gone": list(gone), "places": places}
        mine = json.dumps({"arrivals": self._arrivals, "text": text, **told})
        verdict = self._verdict() or self.board.replace("verdict", self.board.shared("verdict"), mine)
        return self._hear(verdict)

    def _verdict(self) -> str | None:
        """The verdict, if there is one not yet read."""
        found = self.board.shared("verdict")
        if found is None or found == self._heard or not self._concerns(json.loads(found)["arrivals"]):
            return None
        return found

    def _hear(self, verdict: str) -> LostReplicaError:
        self._heard = verdict
        told = json.loads(verdict)
        ranks, said = told["ranks"], told["said"]
        text = told["text"]
        if text is None:
            places = {int(rank): place for rank, place in told["places"].items()}
            words = {rank: said.get(str(rank)) for rank in ranks}
            late = self.board.rank in ranks and words[self.board.rank] is None
            text = self._in_words({r: how for r, how in words.items() if how}, places, told["gone"], late=late)
            text += "; this replica answered too late" if late else ""
        silent = [] if told["text"] else [rank for rank in ranks if str(rank) not in said]
        self.board.leave(f"lost/{told['arrivals']}", self.board.size - len(silent), _READING)
        return LostReplicaError(text, ranks)

    def _tell_odd(self, calls: Mapping[int, str], places: Mapping[int, str]) -> LostReplicaError:
        """The error for replicas at another call than most."""
        usual = Counter(calls.values()).most_common(1)[0][0]
        odd = [rank for rank, call in calls.items() if call != usual]
        others = next(places[rank] for rank, call in calls.items() if call == usual)
        text = f"{who(odd)} came to {places[odd[0]]} while the others were last seen at {others}; {same_calls()}"
        return self._decide(odd, text=text)

    def _store_is_gone(self) -> LostReplicaError:
        if self._server_is_stopped():
            return LostReplicaError("replica 0 stalled: its process is stopped, and with it the store, perhaps", [0])
        how = "does not answer" if self.board.is_silent else "is gone"
        text = f"the store {how}, with the process that serves it: rank 0's, or torchrun's"
        if self._server_has_ended():
            text = "replica 0's process has ended, and the store is gone with it"
        elsewhere = {r: place for r, place in enumerate(self._last_seen) if place and place != self._place}
        if not elsewhere:
            return LostReplicaError(text, [0])
        return LostReplicaError(f"{self._in_words({}, elsewhere)}; {same_calls()}; {text}", list(elsewhere))

    def _in_words(
        self,
        raised: Mapping[int, str],
        places: Mapping[int, str | None],
        gone: Sequence[int] = (),
        *,
        late: bool = False,
    ) -> str:
        """What replicas raised, or where they were last seen, grouped by equal text.

        Does not call them dead if this replica is among them because it answered too `late`.
        """
        mine = None if late else self._place
        told: dict[str, list[int]] = {}
        for rank, place in places.items():
            told.setdefault(raised.get(rank) or _last_seen(place, mine, rank in gone), []).append(rank)
        said = []
        for text, ranks in told.items():
            words = text if len(ranks) == 1 or not text.startswith("was ") else text.replace("was ", "were ", 1)
            said.append(f"{who(ranks)} {words}")
        return "; ".join(said)


def _last_seen(place: str | None, mine: str | None, gone: bool = False) -> str:
    ending = " before its process ended" if gone else ""
    here = f", while this one is at {mine}" if mine else ""
    if place is None:
        return f"was never seen{ending}{here}"
    if place == mine:
        return f"died or stalled after {mine}" + (": its process has ended" if gone else "")
    return f"was last seen at {place}{ending}{here}"
