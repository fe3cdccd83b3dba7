"""Ctrl-C that waits."""

import signal
import threading

import pytest

from hdet._find_lr.interrupts import deferred_interrupts


@pytest.fixture(autouse=True)
def _as_before():
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def test_it_waits_also_where_there_are_several_within_each_other():
    done = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():
        with deferred_interrupts():
            signal.raise_signal(signal.SIGINT)
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]


def test_what_went_wrong_meanwhile_is_its_context():
    with pytest.raises(KeyboardInterrupt) as caught, deferred_interrupts():
        signal.raise_signal(signal.SIGINT)
        raise KeyError("first")
    assert isinstance(caught.value.__context__, KeyError)


def test_without_a_signal_nothing_happens_and_an_error_is_itself():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyError), deferred_interrupts():
        raise KeyError
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_of_the_users_own_is_called_once():
    heard = []
    signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    with deferred_interrupts():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        assert heard == []
    assert heard == [signal.SIGINT]


def test_where_it_is_ignored_it_stays_so():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with deferred_interrupts():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_a_handler_that_python_did_not_set_is_left_alone(monkeypatch):
    set_to = []
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    monkeypatch.setattr(signal, "signal", lambda *args: set_to.append(args))
    with deferred_interrupts():
        pass
    assert set_to == []
    monkeypatch.undo()


def test_other_threads_set_no_handlers():
    errors = []

    def work():
        try:
            with deferred_interrupts():
                pass
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []
