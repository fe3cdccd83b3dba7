"""What the replicas tell each other while a checkpoint is written or read: JSON as bytes, never pickles."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hdet._replicas import Replicas, Where, find_replicas
from hdet._replicas.agreement import settle
from hdet.checkpoint.folder import FullDiskError
from hdet.checkpoint.in_use import FolderInUseError
from hdet.ensemble import Ensemble

_MOST_CHARACTERS = 2000  # of an error that is sent


@contextmanager
def replicas_of(ensemble: Ensemble | None, where: Where | None) -> Iterator[Replicas]:
    """Who saves and loads together, every rank of them: by default the ensemble's replicas, or all ranks."""
    found = find_replicas(where) if where is not None or ensemble is None else ensemble.replicas
    replicas = found.ranks
    try:
        yield replicas
    finally:
        if ensemble is None or ensemble.replicas.ranks is not replicas:  # before the first step it has none to keep
            replicas.close()


def come_to(call: str, replicas: Replicas) -> None:
    """Before the first collective: see that all replicas make this call. Others that meet this one's could crash."""
    if replicas.size > 1:
        settle(replicas, call, {})


def exchange(replicas: Replicas, message: Any, device: torch.device) -> list[Any]:
    """Every replica's message, which JSON can hold, by replica. Collective."""
    data = json.dumps(message).encode()
    sizes = [int(row[0]) for row in replicas.gather(torch.tensor([len(data)], dtype=torch.float64, device=device))]
    longest = max(sizes)
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    everyone = torch.empty(longest * replicas.size, dtype=torch.uint8, device=device)
    replicas.gather_into(everyone, mine.to(device))
    rows = everyone.cpu().view(replicas.size, longest)
    return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes, strict=True)]


def together(replicas: Replicas, device: torch.device, failed: str, work: Callable[[], Any]) -> list[Any]:
    """What `work()` returns on each replica, by replica. Collective.

    An exception on one replica must not leave the others waiting for it: it is sent before it is raised.

    Args:
        replicas: who takes part.
        device: where collectives run.
        failed: how the message begins if it failed.
        work: done by this replica; returns what JSON can hold.

    Raises:
        ValueError, RuntimeError: the same on every replica if `work()` raises on any of them.
    """
    cause: Exception | None = None
    try:
        message = {"result": work()}
    except Exception as error:
        cause = error
        wrong = isinstance(error, (TypeError, ValueError))
        message = {"error": _words(error)[:_MOST_CHARACTERS], "wrong": wrong}
    rows = exchange(replicas, message, device)
    for replica, row in enumerate(rows):
        if "error" in row:
            kind = ValueError if row["wrong"] else RuntimeError
            raise kind(f"{failed}: replica {replica} says: {row['error']}") from cause
    return [row["result"] for row in rows]


def _words(error: Exception) -> str:
    return (
        str(error)
        if isinstance(error, (ValueError, FolderInUseError, FullDiskError))
        else f"{type(error).__name__}: {error}"
    )
