"""Starts replicas with torch's elastic launcher, or in this process, and ends them together."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import shlex
import signal
import tempfile
import traceback
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from hdet import ReplicaError, in_process
from hdet._find_lr.interrupts import deferred_interrupts
from hdet_lab.errors import ONE_LINE, InterruptedRunError, LabError, ReplicaFailedError
from hdet_lab.worker import Job, perform, work

_SECONDS_TO_END = 5
_SECONDS_TO_HEAR = 1  # replicas end at once when they hear a signal; one that has just been forked does not
_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
_PRELOADED = ["hdet_lab.worker", "hdet_lab.finder", "torch._dynamo"]  # torch imports the last with the first optimizer


def prepare(processes: bool = True) -> None:
    """Start importing torch for the replicas in the background, while the caller prepares the launch.

    Processes forked from that server receive Ctrl-C only after they call `worker.end_at_once()`.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one core for each replica, as torchrun does
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))
    if processes and _METHOD == "forkserver":
        multiprocessing.set_forkserver_preload(_PRELOADED)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # it ignores Ctrl-C and SIGTERM only
        try:
            multiprocessing.resource_tracker.ensure_running()  # which unblocks what deaf() blocks
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        with deaf():
            multiprocessing.forkserver.ensure_running()


def launch(jobs: Sequence[Job], *, one_process: bool = False) -> None:
    """Train all jobs, one after the other, on the same replicas.

    Args:
        jobs: runs with the same number of replicas.
        one_process: make the replicas threads of this process.

    Raises:
        ReplicaFailedError: if a replica raised; the others have been ended.
        InterruptedRunError: on Ctrl-C, SIGTERM or SIGHUP; all replicas have been ended.
        LabError: for errors that the user can fix.
    """
    if not jobs:
        return
    sizes = {job.options.replicas for job in jobs}
    if len(sizes) > 1:
        raise ValueError(f"jobs must have the same number of replicas, got {sorted(sizes)}")
    if one_process:
        _launch_threads(jobs, sizes.pop())
    else:
        _launch_processes(jobs, sizes.pop())


@contextlib.contextmanager
def deaf() -> Iterator[None]:
    """Block Ctrl-C in processes started within this context until they unblock it, to avoid tracebacks.

    This process handles signals from that time afterwards.
    """
    with deferred_interrupts():  # another thread may hear what is blocked here
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _launch_threads(jobs: Sequence[Job], size: int) -> None:
    for job in jobs:
        try:
            with _interruptible(jobs, threads=True):
                in_process(perform, size, job)
        except ReplicaError as error:
            cause = error.__cause__
            if isinstance(cause, LabError):
                raise cause from None
            text = "" if cause is None else "".join(traceback.format_exception(cause))
            raise ReplicaFailedError(f"{error}\n\n{text}") from None


def _launch_processes(jobs: Sequence[Job], size: int) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException  # noqa: PLC0415
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError  # noqa: PLC0415
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch  # noqa: PLC0415

    prepare()
    before = set(multiprocessing.active_children())
    with tempfile.TemporaryDirectory(prefix="hdet-") as logs:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=size,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # any free port
            max_restarts=0,
            start_method=_METHOD,
            local_addr="localhost",
            signals_to_handle=_handled(),
        )
        if hasattr(config, "shutdown_timeout"):  # not in torch 2.10, which waits for longer
            config = replace(config, shutdown_timeout=_SECONDS_TO_HEAR)
        with _interruptible(jobs), _quiet():
            try:
                _await_imports()
                elastic_launch(config, work)(list(jobs))
            except ChildFailedError as error:
                raise _explained(error) from None
            except SignalException as error:
                raise _Stopped(error.sigval) from None
            finally:
                _end_children(before)


def _await_imports() -> None:
    """Wait for the process that replicas are forked from, which imports torch.

    A replica requested earlier could be interrupted while it waits to be forked; it would then start anyway and find
    its arguments gone.
    """
    if _METHOD == "forkserver":
        first = multiprocessing.get_context("forkserver").Process(target=os.getpid)
        first.start()
        first.join()


def _explained(error: Exception) -> LabError:
    """The error of the replica that failed first."""
    replica, failure = error.get_first_failure()  # type: ignore[attr-defined]
    message = failure.message
    if not isinstance(message, dict):
        return ReplicaFailedError(f"replica {replica} was ended from outside: {message}")
    kind, _, text = message["message"].partition(": ")
    if kind in ONE_LINE:
        return ONE_LINE[kind](text)
    return ReplicaFailedError(f"replica {replica} raised {kind}: {text}\n\n{message['extraInfo']['py_callstack']}")


def _end_children(others: set[Any]) -> None:
    """End all replicas, even if the launcher was interrupted while starting them."""
    for child in set(multiprocessing.active_children()) - others:
        child.kill()
        child.join(_SECONDS_TO_END)


class _Stopped(KeyboardInterrupt):
    """A signal asked the run to end."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


@contextlib.contextmanager
def _interruptible(jobs: Sequence[Job], threads: bool = False) -> Iterator[None]:
    """Turn Ctrl-C, SIGTERM and SIGHUP within this context into an `InterruptedRunError`.

    Removes the launcher's handlers afterwards. Under nohup SIGHUP stays ignored.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise _Stopped(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, *_OTHERS)}
    for name in _STOPPING:
        if before[getattr(signal, name)] != signal.SIG_IGN:
            signal.signal(getattr(signal, name), stop)
    try:
        yield
    except KeyboardInterrupt as error:
        hung_up = getattr(error, "number", signal.SIGINT) == getattr(signal, "SIGHUP", None)
        raise InterruptedRunError(_stopped(jobs), threads, 129 if hung_up else 130) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _handled() -> str:
    """The signals that the launcher handles: not SIGHUP under nohup."""
    numbers = [signal.SIGTERM, signal.SIGINT, *_OTHERS]
    return ",".join(number.name for number in numbers if signal.getsignal(number) != signal.SIG_IGN)


def end_server() -> None:
    """End the process that replicas are forked from, which may still be importing torch."""
    server = getattr(multiprocessing.forkserver, "_forkserver", None)
    process = getattr(server, "_forkserver_pid", None)
    if process is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _stopped(jobs: Sequence[Job]) -> str:
    """The message after a stopped run: what was written, and how to resume."""
    begun = [Path(job.folder) for job in jobs if (Path(job.folder) / "options.json").exists()]
    if not begun:
        return "stopped; nothing was written"
    said = f"stopped; what was written so far is in {begun[-1]}"
    if any(begun[-1].glob("checkpoints/*-step-*")):
        said += f"; resume with: hdet resume {shlex.quote(str(begun[-1]))}"
    return said


_OTHERS = [getattr(signal, name) for name in ("SIGHUP", "SIGQUIT") if hasattr(signal, name)]
_STOPPING = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The launcher logs what is reported here anyway."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
