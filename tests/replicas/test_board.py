"""Notes in a store: what is asked of it, and when it is asked in vain."""

import datetime
import threading
import time

import pytest
import torch.distributed as dist

from hdet._replicas import store as board
from hdet._replicas.lookout import Lookout
from hdet._replicas.store import Board


class Store:
    """A real store that counts requests; `after_check` is called once all that was asked for is there."""

    def __init__(self):
        self.real = dist.HashStore()
        self.real.set_timeout(datetime.timedelta(seconds=2))
        self.requests = 0
        self.after_check = lambda: None

    def __getattr__(self, name):
        def ask(*args):
            self.requests += 1
            answer = getattr(self.real, name)(*args)
            if name == "check" and answer:
                self.after_check()
            return answer

        return ask


@pytest.fixture
def seat(monkeypatch):
    """Makes the board of any rank in a store."""

    def make(store, rank, size, timeout=5.0):
        monkeypatch.setattr(board.distributed_c10d, "_get_process_group_store", lambda group: store)
        monkeypatch.setattr(board.dist, "get_rank", lambda group=None: rank)
        monkeypatch.setattr(board.dist, "get_world_size", lambda group=None: size)
        return Board(None, timeout)

    return make


def test_the_first_replica_looks_around_though_one_has_withdrawn_what_it_had_just_shown(seat):
    store = Store()
    first = seat(store, 0, 2)

    def withdraw():
        store.after_check = lambda: None
        store.real.delete_key("hdet/0/settle/1/1")

    def look():
        if store.after_check is not withdraw:
            raise RuntimeError("replica 1 has left")
        return 1.0

    store.after_check = withdraw
    store.real.set("hdet/0/settle/1/1", "shown")
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="replica 1 has left"):
        first.settle("mine", ",".join, look)
    assert time.monotonic() - began < 1.0


@pytest.mark.parametrize("way", ["settle", "meet"])
def test_whoever_waits_looks_around_when_it_is_time_to_however_long_it_has_waited(seat, monkeypatch, way):
    """Not only when the store is asked again: whoever calls the roll waits for less than a second for an answer."""
    monkeypatch.setattr(board, "_FIRST_PAUSE", 0.4)
    first, due, late = seat(Store(), 0, 2, timeout=1.5), time.monotonic(), []

    def look():
        nonlocal due
        if time.monotonic() >= due:
            late.append(time.monotonic() - due)
            due = time.monotonic() + 0.25
        return due - time.monotonic()

    if way == "meet":
        assert not first.meet(look)
    else:
        with pytest.raises(board.MissingError):
            first.settle("mine", ",".join, look)
    assert len(late) >= 4
    assert sorted(late)[len(late) // 2] < 0.1


def test_everybodys_notes_are_read_though_some_have_left_none(seat):
    store = Store()
    boards = [seat(store, rank, 4) for rank in range(4)]
    for rank in (0, 2):
        boards[rank].write("at", str(rank))
    assert boards[1].read_all("at") == ["0", None, "2", None]
    boards[3].write("at", "")
    assert boards[1].read_all("at") == ["0", None, "2", ""]
    boards[1].write("at", "1")
    boards[0].write("at", "new")
    assert boards[1].read_all("at") == ["new", "1", "2", ""]


def test_a_roll_call_of_1000_replicas_asks_the_store_a_few_times_a_second(seat):
    store, size, lost = Store(), 1000, 7
    lookouts = [Lookout(seat(store, rank, size)) for rank in range(size)]
    for lookout in lookouts:
        lookout.arrive("here")
    for lookout in lookouts:
        if lookout.board.rank not in (3, lost):
            lookout.say_failed(None)
    store.requests, began = 0, time.monotonic()
    found = lookouts[3].call_the_roll(began - 3.0)  # of the timeout of 5
    seconds = time.monotonic() - began
    assert found.ranks == [lost]
    assert seconds > 2.5
    assert store.requests < 10 * seconds


def test_a_store_that_does_not_answer_is_given_up_in_time(seat):
    """As that of a process which is stopped while it is asked, or on another host."""
    asked, store = threading.Event(), Store()
    one = seat(store, 1, 2, timeout=0.6)
    one.write("at", "here")
    store.real = Deaf(asked)
    began = time.monotonic()
    for _ in range(3):  # and those after it at once
        with pytest.raises(RuntimeError, match="does not answer"):
            one.read("at", 0)
    assert time.monotonic() - began < 1.5
    assert one.is_silent
    asked.set()
    while one.is_silent:
        time.sleep(0.01)
    assert one.read("at", 0) is None


class Deaf:
    """A store that answers each request when it is let go."""

    def __init__(self, event):
        self.event = event

    def __getattr__(self, name):
        return lambda *args: self.event.wait(20) and args[-1].encode()
