"""When a run goes wrong: one line or one traceback, no orphan process, no hang."""

import contextlib
import multiprocessing
import os
import pathlib
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from commands import ENVIRONMENT, SMOKE, run

from hdet_lab import cli, launch, tasks, worker
from hdet_lab.errors import LabError
from hdet_lab.folder import read, read_lines

HDET = (sys.executable, "-m", "hdet_lab")


def processes_of(session):
    """The processes of a session that have not ended, read from /proc: their folders there."""
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, belongs = stat.read_text().rsplit(")", 1)[1].split()[:4]
            if int(belongs) == session and state not in "ZX":
                found.append(stat.parent)
    return found


def wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("number", "code", "how"),
    [
        (signal.SIGINT, 130, []),
        (signal.SIGTERM, 130, ["--in-process", "--checkpoint-every", "1"]),
        (signal.SIGHUP, 129, []),
        (signal.SIGHUP, 129, ["--in-process", "--checkpoint-every", "1"]),
    ],
)
def test_a_signal_ends_everything_and_leaves_a_usable_folder(tmp_path, number, code, how):
    words = [
        *HDET,
        "train",
        "text",
        "--steps",
        "100000",
        "--interval",
        "1",
        "--controller",
        "softmax",
        "--folder",
        str(tmp_path / "run"),
        *how,
    ]
    child = subprocess.Popen(
        words, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        rounds = tmp_path / "run" / "rounds.jsonl"
        wait_for(lambda: len(read_lines(rounds)) > 2 or child.poll() is not None, 60)
        if number == signal.SIGINT:
            os.killpg(child.pid, number)  # as a terminal does
        else:
            child.send_signal(number)
        _, errors = child.communicate(timeout=15)
        wait_for(lambda: not processes_of(child.pid), 10)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    assert child.returncode == code, errors
    assert "Traceback" not in errors
    told = f"hdet: stopped; what was written so far is in {tmp_path / 'run'}"
    assert errors.endswith(f"{told}; resume with: hdet resume {tmp_path / 'run'}\n" if how else f"{told}\n")
    assert read(tmp_path / "run" / "options.json")["options"]["task"] == "text"
    assert not (tmp_path / "run" / "run.lock").exists()
    assert read_lines(rounds)
    assert read(tmp_path / "run" / "result.json") is None


def failing_batch(self, step, rank=0, replicas=1):
    if step == 2 and rank == 1:
        raise RuntimeError("the disk with the data is gone")
    return real_batch(self, step, rank, replicas)


real_batch = tasks.Task.batch


def failing_work(jobs):
    """A replica's life, of which the second raises in the third step."""
    tasks.Task.batch = failing_batch
    worker.work(jobs)


def full_disk_work(jobs):
    """A replica's life with room for files of 8000 bytes, as long tracebacks are."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))
    worker.work(jobs)


def test_a_failing_replica_is_named_with_its_traceback(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(launch, "work", failing_work)
    assert cli.main(["train", "text", *SMOKE, "--folder", str(tmp_path / "run")]) == 1
    errors = capfd.readouterr().err
    assert "hdet: error: replica 1 raised RuntimeError: the disk with the data is gone" in errors
    assert "in failing_batch" in errors
    assert errors.count("Traceback") == 1  # nothing of the launcher's
    assert "ChildFailedError" not in errors
    assert len(read_lines(tmp_path / "run" / "rounds.jsonl")) == 2
    assert not multiprocessing.active_children()


def test_a_failing_replica_in_one_process(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tasks.Task, "batch", failing_batch)
    assert cli.main(["train", "text", *SMOKE, "--in-process", "--folder", str(tmp_path / "run")]) == 1
    errors = capsys.readouterr().err
    assert "replica 1 raised RuntimeError: the disk with the data is gone" in errors
    assert errors.count("Traceback") == 1


def test_a_full_disk_is_one_line(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(launch, "work", full_disk_work)
    many = (*SMOKE, "--steps", "40", "--interval", "1")
    assert cli.main(["train", "text", *many, "--folder", str(tmp_path / "run")]) == 1
    errors = capfd.readouterr().err
    assert re.fullmatch(r"hdet: error: cannot write .*rounds.jsonl: File too large\n", errors), errors
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["train", "poetry"], 2, "task must be one of digits, flights, text, got 'poetry'"),
        (["train", "text", "--replicas", "0"], 2, "replicas must be a whole number of at least 1"),
        (["train", "text", "--replicas", "5"], 2, "replicas must divide"),
        (["train", "text", "--replicas", "1", "--controller", "fixed"], 2, "replicas must be 2 or more to fan out"),
        (["train", "text", "--spread", "1"], 2, "spread must be in [0, 1), or above 1"),
        (["train", "digits", "--replicas", "32"], 2, "replicas must be at most 16"),
        (["train", "digits", "--seed", str(2**63)], 2, "seed must be less than 2**63"),
        (
            ["train", "digits", "--controller", "slope", "--explore", "dropout=0.2", "--dropout", "0.1"],
            2,
            "add --gradients local",
        ),
        (["train", "digits", "--controller", "slope", "--explore", "dropout=0.2"], 2, "--dropout 0.1"),
        (["train", "digits", "--optimizer", "sgd", "--explore", "beta2=0.2"], 2, "sgd has no beta2"),
        (["train", "digits", "--controller", "none", "--explore", "momentum=0.2"], 2, "explore has no effect"),
        (["train", "digits", "--controller", "none", "--gradients", "local"], 2, "--gradients has no effect with"),
        (["train", "digits", "--controller", "none", "--outer-step", "0.5"], 2, "--outer-step has no effect with"),
        (["train", "text", "--controller", "softmax", "--tail-average", "0.5"], 2, "--tail-average needs a probe"),
        (["train", "text", "--controller", "auto", "--tail-average", "2"], 2, "--tail-average must be in [0, 1]"),
        (["train", "digits", "--outer-momentum", "1"], 2, "--outer-momentum must be in [0, 1), got 1.0"),
        (["train", "digits", "--no-average-state"], 2, "--average-state has no effect with shared gradients"),
        (["sweep", "digits", "--spread", "0.1"], 2, "--spread has no effect with --controller none"),
        (["train", "digits", "--controller", "slope", "--warmup-steps", "9"], 2, "--warmup-steps has no effect with"),
        (
            ["train", "digits", "--controller", "softmax", "--charge"],
            2,
            "--charge has no effect with --controller softmax, which has no probe",
        ),
        (
            ["train", "digits", "--spread", "0.2", "--explore", "weight_decay=0.3"],
            2,
            "--spread has no effect beside --explore; leave it out and write --explore learning_rate=0.2",
        ),
        (["train", "digits", "--explore", "momentum=0.2,momentum=0.3"], 2, "--explore must name momentum once"),
        (["train", "digits", "--explore", "momentum=0.2", "--per-group"], 2, "--per-group has no effect"),
        (["sweep", "digits", "--checkpoint-every", "5"], 2, "--checkpoint-every is for `hdet train`"),
        (
            ["resume", "no-such-run"],
            1,
            "no-such-run is not a run that saves checkpoints; train with --checkpoint-every",
        ),
        (["returns", "digits", "--sizes", "2,2"], 2, "--sizes must be different numbers of replicas, such as 2,4; got"),
        (
            ["returns", "digits", "--sizes", "2,x"],
            2,
            "argument --sizes: must be whole numbers such as 2,4,8; got '2,x'",
        ),
        (["train", "text", "--interval", "x"], 2, "argument --interval: must be a whole number or auto, got 'x'"),
        (["demo", "--replicas", "1"], 2, "--replicas must be 2 or more to fan out, got 1; for example 4"),
        (["train", "text", "--dropout", "1"], 2, "--dropout must lie in [0, 1)"),
        (["sweep", "digits", "--folder", __file__], 1, "cannot read"),
        (["train", "text", "--peak-lr", "0"], 2, "--peak-lr must be positive"),
        (["train", "text", "--peak-lr", "fast"], 2, "invalid float value: 'fast'"),
        (["train", "text", "--interval", "0"], 2, "interval must be a whole number of at least 1"),
        (
            ["train", "text", "--data", "/no/such/file"],
            2,
            "--data must be a file that can be read; /no/such/file: No such",
        ),
        (["train", "text", "--folder", "/proc/nowhere"], 1, "cannot write /proc/nowhere"),
        (["sweep", "text", "--ratio", "3"], 2, "ratio must be more than 1 and at most 2"),
        (["train"], 2, "the following arguments are required: TASK"),
        ([], 2, "the following arguments are required: COMMAND"),
    ],
)
def test_bad_arguments_are_one_line(arguments, code, says, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*arguments, *(["--in-process"] if arguments else [])]) == code
    errors = capsys.readouterr().err
    assert errors.startswith("hdet: error: ")
    assert says in errors
    assert errors.count("\n") == 1


def test_missing_data_are_one_line_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    sys.modules["hdet_lab.tasks.digits"].load.cache_clear()
    assert cli.main(["train", "digits", *SMOKE, "--folder", str(tmp_path / "run")]) == 1
    errors = capsys.readouterr().err
    assert re.fullmatch(r"hdet: error: the digits task .* pip install 'hdet\[lab\]'\n", errors), errors
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("how", [[], ["--in-process"]])
def test_a_warning_is_its_text_once(tmp_path, how, capsys):
    words = ["train", "digits", *SMOKE, "--steps", "4", "--warmup-steps", "100", "--folder"]
    if how:
        assert cli.main([*words, str(tmp_path / "run"), *how]) == 0
        errors = capsys.readouterr().err
    else:  # what processes say goes to where the fork server's stderr went when it was started: to a new one's
        ran = run(*HDET, *words, tmp_path / "run")
        assert ran.returncode == 0
        errors = ran.stderr
    assert errors.count("Softmax never acts") == 1
    assert re.search(r"^hdet: warning: Softmax never acts: [^/]*$", errors, re.MULTILINE)
    assert "UserWarning" not in errors
    assert ".py" not in errors


def importing_torch(session):
    """How many processes have begun to import torch."""
    found = 0
    for process in processes_of(session):
        with contextlib.suppress(OSError):
            found += "libtorch" in (process / "maps").read_text()
    return found


@pytest.mark.parametrize("processes", [1, 2])
def test_a_signal_while_it_starts_is_one_line(tmp_path, processes):
    """While the command imports torch, and while the process that the replicas are forked from does."""
    words = [str(pathlib.Path(sys.executable).with_name("hdet")), "train", "text", "--folder", str(tmp_path / "run")]
    child = subprocess.Popen(
        words, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        wait_for(lambda: importing_torch(child.pid) >= processes or child.poll() is not None, 60)
        os.killpg(child.pid, signal.SIGINT)
        began = time.monotonic()
        _, errors = child.communicate(timeout=100)
        took = time.monotonic() - began
        wait_for(lambda: not processes_of(child.pid), 30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    assert child.returncode == 130, errors
    assert took < 2
    assert errors.strip() in ("hdet: stopped", "hdet: stopped; nothing was written")  # before, or as it begins
    assert not (tmp_path / "run").exists()


def test_a_signal_while_a_process_is_started_is_heard_afterwards():
    """By this one. The other never hears it: it may be in the midst of an import."""
    script = (
        "import os, signal, subprocess, sys, time\n"
        "import numpy\n"
        "from hdet_lab import launch\n"
        "try:\n"
        "    with launch.deaf():\n"
        "        child = subprocess.Popen([sys.executable, '-c', 'print(input())'], stdin=subprocess.PIPE, text=True)\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        child.send_signal(signal.SIGINT)\n"
        "        time.sleep(0.3)\n"
        "        print('started', flush=True)\n"
        "except KeyboardInterrupt:\n"
        "    child.communicate('lives')\n"
        "    print('heard')\n"
    )
    several = {**ENVIRONMENT, "OMP_NUM_THREADS": "4", "OPENBLAS_NUM_THREADS": "4"}  # any may hear it
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, env=several, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split() == ["started", "lives", "heard"], done.stderr


def test_a_folder_in_use_is_refused(tmp_path, capsys):
    (tmp_path / "thesis.tex").touch()
    assert cli.main(["train", "text", "--folder", str(tmp_path)]) == 1
    assert "is not an empty folder; choose another one" in capsys.readouterr().err


def test_a_port_in_use_is_one_line(tmp_path, monkeypatch, capfd):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        words = ["text", *SMOKE, "--folder", str(tmp_path / "run")]
        with ThreadPoolExecutor(1) as thread:  # a replica's main thread gives its signal handlers up
            assert thread.submit(worker.main, words).result(100) == 1
    errors = capfd.readouterr().err
    assert f"hdet: error: the replicas cannot meet at 127.0.0.1:{port}; try another port" in errors
    assert "Traceback" not in errors
    assert not (tmp_path / "run").exists()


def test_a_stranger_at_the_meeting_place_is_told_in_seconds(monkeypatch):
    monkeypatch.setattr(worker, "SECONDS_TO_ANSWER", 1.0)
    threads = threading.active_count()
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()  # takes connections and never says a word
        port = stranger.getsockname()[1]
        for name, value in {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(
            LabError, match=f"cannot meet at 127.0.0.1:{port}, which another program holds; try another"
        ):
            worker.join()
    wait_for(lambda: threading.active_count() == threads, 30)  # what torch says when the stranger leaves is not ours
