"""One replica as a process: joins the others, trains, and exits quickly on errors."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from hdet_lab.errors import LabError, warnings_in_words
from hdet_lab.lock import locked
from hdet_lab.options import RunOptions

_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed", "recvValue failed")
SECONDS_TO_ANSWER = 20.0  # the first replica's store answers at once
_SECONDS_FOR_THE_CULPRIT = 5.0  # a replica that only lost the others waits, so the one that failed is seen first


class Job(NamedTuple):
    """One run and where to write it.

    Attributes:
        options: the run.
        folder: its output folder.
        finds: find its learning rate instead of training.
    """

    options: RunOptions
    folder: str
    finds: bool = False


def perform(job: Job) -> None:
    """Train, or find the learning rate, as one of the replicas."""
    from hdet_lab.finder import find_rate  # noqa: PLC0415
    from hdet_lab.train import train  # noqa: PLC0415

    (find_rate if job.finds else train)(job.options, job.folder)


def work(jobs: Sequence[Job]) -> None:
    """Do all jobs, one after the other, with the other replicas. A process does nothing else."""
    end_at_once()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    join()
    try:
        with warnings_in_words(_is_first()):
            for job in jobs:
                perform(job)
    except LabError as error:  # the launcher shows its message alone, and a full disk may have no room for more
        raise error.with_traceback(None) from None
    except Exception as error:
        if any(text in str(error) for text in _LOST):
            time.sleep(_SECONDS_FOR_THE_CULPRIT)
        raise
    if dist.is_initialized():
        dist.destroy_process_group()


def end_at_once() -> None:
    """Let Ctrl-C and SIGTERM end this process from now on, even while it waits for the others."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        if hasattr(signal, "pthread_sigmask"):  # the process that it was forked from does not hear them
            signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


def join() -> None:
    """Join the other replicas as the launcher's environment says; without one, run alone.

    Raises:
        LabError: if they cannot meet.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    enough = gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # NCCL wants a GPU for each replica
    if gpus:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % gpus)
    where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    if not _is_first():
        _require_store(where)
    try:
        dist.init_process_group("nccl" if gpus and enough else "gloo", timeout=timedelta(minutes=10))
    except dist.DistNetworkError as error:
        reason = str(error).splitlines()[0]
        raise LabError(f"the replicas cannot meet at {where}; try another port ({reason})") from error


def _require_store(where: str) -> None:
    """Raise if another program holds the port: torch itself would wait for its answer forever."""
    host, _, port = where.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=SECONDS_TO_ANSWER).close()
    except (OSError, ValueError):
        return  # nobody is there yet: torch waits, and says what is wrong with an address
    answers: queue.Queue[str] = queue.Queue()

    def ask() -> None:
        timeout = timedelta(seconds=SECONDS_TO_ANSWER)
        try:
            dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]
            answers.put("")
        except Exception as error:
            answers.put(str(error).splitlines()[0])

    threading.Thread(target=ask, daemon=True).start()
    try:
        reason = answers.get(timeout=SECONDS_TO_ANSWER)
    except queue.Empty:
        reason = f"no answer in {SECONDS_TO_ANSWER:.0f} s"
    if reason:
        raise LabError(f"the replicas cannot meet at {where}, which another program holds; try another port ({reason})")


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _end_with_parent() -> None:
    """End this process if its launcher is killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@record
def run(argv: Sequence[str] | None = None) -> int:
    """Train with the arguments of `hdet train` as one of torchrun's processes."""
    from hdet_lab.cli import said  # noqa: PLC0415
    from hdet_lab.commands.training import worker_job  # noqa: PLC0415
    from hdet_lab.summary import summary  # noqa: PLC0415

    try:
        job = worker_job(argv, int(os.environ.get("WORLD_SIZE", "1")))
        with locked(Path(job.folder)) if _is_first() else nullcontext():
            work([job])
            if _is_first():
                print(summary(job.options, Path(job.folder)), flush=True)
    except LabError as error:
        print(f"hdet: error: {said(error)}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code. Writes a replica's error to a file for the launcher to show."""
    code = run(argv)
    return 0 if code is None else code
