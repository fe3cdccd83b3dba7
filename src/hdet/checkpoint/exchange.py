"""Messages between replicas while a checkpoint is written or read: JSON as bytes, never pickles."""

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

_MOST_CHARACTERS = 2000  # of an error message to send


@contextmanager
def replicas_of(ensemble: Ensemble | None, where: Where | None) -> Iterator[Replicas]:
    """The ranks that save and load together: by default all ranks of the ensemble's replicas, or all ranks."""
    found = find_replicas(where) if where is not None or ensemble is None else ensemble.replicas
    replicas = found.ranks
    try:
        yield replicas
    finally:
        if ensemble is None or ensemble.replicas.ranks is not replicas:  # before the first step they are not kept
            replicas.close()


def come_to(call: str, replicas: Replicas) -> None:
    """Check before the first collective that all replicas make this call: mismatched collectives could crash."""
    if replicas.size > 1:
        settle(replicas, call, {})


def exchange(replicas: Replicas, message: Any, device: torch.device) -> list[Any]:
    """Send a JSON-compatible message and return every replica's, by replica. Collective."""
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
    """Run `work()` on each replica and return all results, by replica. Collective.

    Sends an exception to the other replicas before raising it, so that none waits for the one that failed.

    Args:
        replicas: the replicas taking part.
        device: device for collectives.
        failed: start of the error message.
        work: runs on this replica; returns a JSON-compatible value.

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
