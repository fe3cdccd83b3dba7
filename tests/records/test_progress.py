"""The terminal: a bar that is redrawn, or a few lines in a log."""

import dataclasses
import fcntl
import io
import os
import pty
import select
import struct
import sys
import termios

import pytest
from made_up_runs import make_records

import hdet

RECORDS = list(make_records(8, 4))


def test_a_log_gets_a_few_plain_lines():
    file = io.StringIO()
    show = hdet.Progress(file=file)
    for record in RECORDS:
        show(record)
    first, last = file.getvalue().splitlines()  # the first round, then the end; the rest came within the half minute
    assert first.startswith("hdet: round 0, step 5/40, loss ")
    assert last.startswith("hdet: round 7, step 40/40, loss ")
    assert "\r" not in file.getvalue()
    assert "\x1b" not in file.getvalue()
    every = io.StringIO()
    show = hdet.Progress(seconds=0, file=every)
    for record in RECORDS:
        show(record)
    assert len(every.getvalue().splitlines()) == 8


def test_a_log_gets_every_event():
    file = io.StringIO()
    show = hdet.Progress(file=file)
    for record in RECORDS[:3]:
        show(dataclasses.replace(record, events=("rolled back",)))
    assert file.getvalue().count("rolled back") == 3


def test_the_words_are_those_of_the_record():
    record = RECORDS[2]
    row = record.hyperparameters["learning_rate"]
    said = hdet.records.describe(record)
    assert f"loss {min(record.probe):.3f} to {max(record.probe):.3f}" in said
    assert f"learning_rate {row.center:.3g} (schedule {row.base:.3g})" in said
    assert said.endswith(row.decision)
    assert (
        hdet.records.describe(dataclasses.replace(record, hyperparameters={}, probe=None, scores=(float("nan"),))) == ""
    )


def all_of(terminal):
    """What was written to it: it comes in pieces, and a moment later."""
    pieces = []
    while select.select([terminal], [], [], 0.5)[0]:
        pieces.append(os.read(terminal, 100_000))
    return b"".join(pieces).decode()


@pytest.mark.parametrize("bar", [True, False])
def test_a_terminal_gets_a_line_that_is_redrawn(bar, monkeypatch):
    if not bar:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 160, 0, 0))
    with os.fdopen(theirs, "w") as file:
        show = hdet.Progress(file=file)
        for record in RECORDS:
            show(record)
        file.flush()
        text = all_of(ours)
    os.close(ours)
    assert "\r" in text
    assert text.count("\n") <= 2
    assert "round 7" in text
    assert RECORDS[-1].hyperparameters["learning_rate"].decision in text or "40/40" in text


def test_only_the_first_replica_shows():
    file = io.StringIO()
    hdet.in_process(lambda: hdet.Progress(seconds=0, file=file)(RECORDS[0]), 3)
    assert len(file.getvalue().splitlines()) == 1
