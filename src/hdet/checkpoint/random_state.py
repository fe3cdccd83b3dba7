"""The global random generators as tensors and lists, which load without unpickling: torch, CUDA, Python, NumPy."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch

from hdet._tensors.restore import Generators


def take() -> dict[str, Any]:
    """The states of all generators: CUDA's if in use, NumPy's global one if imported."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, list(numbers), gauss]}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
        state["device"] = torch.cuda.current_device()
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(numpy.random.get_state(), tuple):  # not if replaced by another generator
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = [kind, torch.tensor(keys.tolist()), *rest]
    return state


def put(state: dict[str, Any]) -> None:
    """Restore the states from `take()`, except for generators that are not in use here."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        same = (len(state["cuda"]), state["device"]) == (torch.cuda.device_count(), torch.cuda.current_device())
        if same:
            torch.cuda.set_rng_state_all(state["cuda"])
        else:  # the replica moved to another GPU and trains on the current one
            torch.cuda.set_rng_state(state["cuda"][state["device"]])
    numpy = sys.modules.get("numpy")
    if "numpy" in state and numpy is not None:
        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, numpy.array(keys.tolist(), dtype=numpy.uint32), *rest))


def reseed(state: dict[str, Any], replica: int, replicas: int) -> None:
    """Reseed all generators, differently on each replica and reproducibly from `state`."""
    text = f"{replica} of {replicas}".encode()
    digest = hashlib.sha256(bytes(state["torch"].tolist()) + text).digest()
    Generators().seed(int.from_bytes(digest[:8], "little") >> 1)
