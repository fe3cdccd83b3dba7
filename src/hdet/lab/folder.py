"""The run folder: what a run leaves behind, as strict JSON that is complete after every line."""

from __future__ import annotations

import json
import os
import pickle
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hdet import JSONLines, RoundRecord
from hdet.json_lines import parse, strict
from hdet.lab.errors import FolderError, OptionError
from hdet.lab.lock import LOCK, locked
from hdet.lab.options import RunOptions

_WEIGHTS = "weights.pt"


class RunFolder:
    """The files of one run: options.json, losses.jsonl, rounds.jsonl, held_out.jsonl, weights.pt and result.json.

    Raises:
        FolderError: from every method, if the disk does not take it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with _clearly(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        self.last_round: RoundRecord | None = None
        self._rounds = JSONLines(self.path / "rounds.jsonl")

    def write(self, name: str, value: Any) -> None:
        """One file, written whole or not at all."""
        with _clearly(self.path / name):
            unfinished = self.path / f"{name}.part"
            unfinished.write_text(json.dumps(strict(value), indent=1, allow_nan=False) + "\n")
            os.replace(unfinished, self.path / name)

    def write_weights(self, model: nn.Module) -> None:
        """weights.pt, written whole or not at all: what the model has learned, buffers included."""
        with _clearly(self.path / _WEIGHTS):
            unfinished = self.path / f"{_WEIGHTS}.part"
            torch.save(model.state_dict(), unfinished)
            os.replace(unfinished, self.path / _WEIGHTS)

    def append(self, name: str, value: Any) -> None:
        """One line of a file; it is on its way to the disk when this returns."""
        with _clearly(self.path / name), open(self.path / name, "a") as file:
            file.write(json.dumps(strict(value), allow_nan=False) + "\n")

    def record(self, record: RoundRecord) -> None:
        """One line of rounds.jsonl."""
        self.last_round = record
        with _clearly(self.path / "rounds.jsonl"):
            self._rounds.write(record)

    def rewind(self, name: str, step: int) -> None:
        """Leave out the lines that were written after `step`, of a file of lines that have one."""
        if not (self.path / name).exists():
            return
        with _clearly(self.path / name):
            kept = [line for line in read_lines(self.path / name) if line["step"] <= step]
            unfinished = self.path / f"{name}.part"
            unfinished.write_text("".join(json.dumps(line, allow_nan=False) + "\n" for line in kept))
            os.replace(unfinished, self.path / name)

    def begin(self, options: RunOptions) -> None:
        """Say what is about to be run, where and by which versions."""
        about = {
            "options": options.to_json(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "hdet": _hdet_version()},
            "machine": {"system": platform.platform(), "cores": os.cpu_count(), "gpus": torch.cuda.device_count()},
            "command": shlex.join(sys.argv),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        self.write("options.json", about)


def read(path: str | Path) -> Any:
    """The content of a JSON file; None if there is no such file.

    Raises:
        FolderError: if it cannot be read.
    """
    try:
        return json.loads(Path(path).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise FolderError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def load_weights(folder: str | Path, model: nn.Module) -> None:
    """Give a model the weights of the run in `folder`.

    Raises:
        OptionError: if there are none, or they are another model's.
    """
    path = Path(folder) / _WEIGHTS
    try:
        model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    except FileNotFoundError:
        raise OptionError(f"start must be the folder of a finished run; there is no {path}") from None
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0]
        raise OptionError(f"start must be the folder of a run of the same task, not {folder}: {reason}") from error


def reported(result: dict[str, Any]) -> dict[str, Any]:
    """What result.json has of the held-out samples: of all, or of those that a held-out probe has not drawn from."""
    found: dict[str, Any] = result["held_out_unseen" if result["held_out_probe"] else "held_out"]
    return found


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a JSON Lines file; none if there is no such file. A line cut short by a kill is left out."""
    try:
        return list(parse(Path(path).read_bytes(), Path(path)))
    except FileNotFoundError:
        return []


def default_folder(name: str) -> Path:
    """A folder under ./runs that does not exist yet."""
    stem = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (stem if k == 1 else f"{stem}-{k}" for k in range(1, 1000))
    return next(Path(name) for name in names if not Path(name).exists())


def require_empty(path: Path) -> None:
    """Refuse a folder that holds something already, or in which a run is alive.

    Raises:
        FolderError: with what to do about it.
    """
    with _clearly(path):
        if path.exists() and (not path.is_dir() or any(entry.name != LOCK for entry in path.iterdir())):
            if (path / LOCK).exists():
                with locked(path):
                    pass
            raise FolderError(f"{path} exists and is not an empty folder; choose another one with --folder")


@contextmanager
def _clearly(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FolderError(f"cannot write {path}: {error.strerror or error}") from error


def _hdet_version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415

    try:
        return version("hdet")
    except PackageNotFoundError:
        return "unknown"
