"""Whether another process is alive, asked of real ones."""

import json
import os
import signal
import subprocess
import sys
import time
import types

import pytest
from made_up_runs import write_run

from hdet._replicas import liveness
from hdet._replicas.liveness import identity, process_state, state
from hdet._report.run import Run


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def becomes(pid, expected):
    until = time.monotonic() + 5
    while process_state(pid) != expected and time.monotonic() < until:
        time.sleep(0.01)
    return process_state(pid) == expected


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
def test_a_process_runs_is_stopped_and_ends(child):
    assert process_state(child.pid) == "runs"
    child.send_signal(signal.SIGSTOP)
    assert becomes(child.pid, "stopped")
    child.send_signal(signal.SIGCONT)
    assert becomes(child.pid, "runs")
    child.kill()
    assert becomes(child.pid, "ended")  # though nobody has waited for it
    child.wait()
    assert process_state(child.pid) == "ended"


def test_another_process_with_its_number_is_not_it():
    host, pid, began = json.loads(json.dumps(identity()))
    assert state([host, pid, began]) == "runs"
    assert state([host, pid, began and "1"]) == ("ended" if began else "runs")
    assert state(["elsewhere", pid, began]) is None


def test_where_signal_0_is_ctrl_c_nobody_is_asked(child, tmp_path, monkeypatch):
    here, now = identity(), time.time()
    write_run(tmp_path, 20, 2, now=now - 100, written_by=f"{os.uname().nodename}:{child.pid}", last=False)
    run = Run(tmp_path)
    run.refresh()
    monkeypatch.setattr(liveness, "os", types.SimpleNamespace(name="nt"))  # which has no kill
    assert state(here) is None
    assert process_state(child.pid) is None
    assert "stalled, or was cut off" in run.status(now + 300).text
