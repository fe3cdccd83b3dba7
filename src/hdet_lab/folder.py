"""The run folder: a run's files, in strict JSON that is complete after every line."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hdet import JSONLines
from hdet.records import RoundRecord
from hdet.records.json_lines import check_line, strict
from hdet.records.reading import Lines, UnreadableError, open_file, read_json, why
from hdet.records.schema import Check, Field, count, mapping, number, number_or_hole, of, record, text, whole
from hdet_lab.errors import FolderError, OptionError, writing
from hdet_lab.lock import LOCK, locked
from hdet_lab.options import RunOptions
from hdet_lab.version import hdet_version

_WEIGHTS = "weights.pt"
LINES = ("losses.jsonl", "rounds.jsonl", "held_out.jsonl")
"""Files that grow during a run. A resumed run removes the lines after its checkpoint."""

_AT_STEP = record({"step": Field(count)}, others=True)
_LINE: dict[str, Check] = {
    "losses.jsonl": record(
        {"step": Field(count), "loss": Field(number_or_hole), "lr": Field(number_or_hole, required=False)}, others=True
    ),
    "rounds.jsonl": check_line,
}
_MEASURED = mapping(number_or_hole)
_RESULT_KINDS: dict[str, Check] = {
    **dict.fromkeys(("held_out", "held_out_unseen", "scales"), _MEASURED),
    **dict.fromkeys(("train_loss", "marginal_loss"), number_or_hole),
    **dict.fromkeys(("peak_lr", "seconds", "finder_cost"), number),
    **dict.fromkeys(("steps", "scales_step", "finder_steps"), whole),
    **dict.fromkeys(("diverged", "no_rate"), text),
    "held_out_probe": of(bool),
    "resumed_at": of(list[int]),
}
RESULT = record({name: Field(check, required=False) for name, check in _RESULT_KINDS.items()}, others=True)
"""The check of result.json. If a run ended early, it has few of these keys and no losses."""

OBJECT = record({}, others=True)
_ABOUT = record({"options": Field(OBJECT)}, others=True)
_IN_FULL = ("held_out_probe", "peak_lr", "steps", "scales", "scales_step", "seconds")


class RunFolder:
    """The files of one run: options.json, losses.jsonl, rounds.jsonl, held_out.jsonl, weights.pt and result.json.

    Raises:
        FolderError: from every method, if writing fails.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        self.last_round: RoundRecord | None = None
        self._rounds = JSONLines(self.path / "rounds.jsonl")

    def write(self, name: str, value: Any) -> None:
        """Write one file atomically."""
        with writing(self.path / name):
            unfinished = self._unfinished(name)
            unfinished.write_text(json.dumps(strict(value), indent=1, allow_nan=False) + "\n")
            os.replace(unfinished, self.path / name)

    def write_weights(self, model: nn.Module) -> None:
        """Write weights.pt atomically: the model's parameters and buffers."""
        with writing(self.path / _WEIGHTS):
            unfinished = self._unfinished(_WEIGHTS)
            torch.save(model.state_dict(), unfinished)
            os.replace(unfinished, self.path / _WEIGHTS)

    def append(self, name: str, value: Any) -> None:
        """Append one line to a file and flush it."""
        with writing(self.path / name), open(self.path / name, "a") as file:
            file.write(json.dumps(strict(value), allow_nan=False) + "\n")

    def record(self, record: RoundRecord) -> None:
        """One line of rounds.jsonl."""
        self.last_round = record
        with writing(self.path / "rounds.jsonl"):
            self._rounds.write(record)

    def rewind(self, name: str, step: int) -> None:
        """Remove the lines written after `step` from a file whose lines have a step.

        Lines without a step are removed too; in that case the original file is kept as `name`.damaged.
        """
        path = self.path / name
        if not path.exists():
            return
        lines = Lines(path, _AT_STEP)
        with writing(path):
            unfinished = self._unfinished(name)
            with open(unfinished, "wb") as file:
                file.writelines(text for text, line in lines.more() if line["step"] <= step)
            if lines.is_too_large:
                raise UnreadableError("it is too large; move it away")
            if lines.notice:
                damaged = self.path / f"{name}.damaged"
                os.replace(path, damaged)
                warnings.warn(f"{lines.notice}; as it was, it is now {damaged}", stacklevel=2)
            os.replace(unfinished, path)

    def _unfinished(self, name: str) -> Path:
        """The temporary path of a file until it is complete. Removes anything left there, as by a kill."""
        path = self.path / f"{name}.part"
        path.unlink(missing_ok=True)
        return path

    def begin(self, options: RunOptions) -> None:
        """Write what is about to run, where, and with which versions."""
        about = {
            "options": options.to_json(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "hdet": hdet_version()},
            "machine": {"system": platform.platform(), "cores": os.cpu_count(), "gpus": torch.cuda.device_count()},
            "command": shlex.join(sys.argv),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        self.write("options.json", about)


def read(path: str | Path, check: Check = OBJECT) -> Any:
    """The object in a JSON file; None if there is no such file.

    Raises:
        FolderError: if it cannot be read or fails `check`.
    """
    try:
        return check(read_json(Path(path)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise FolderError(f"cannot read {path}: {why(error)}") from error


def read_options(folder: Path) -> RunOptions | None:
    """The options of the run in `folder`; None if there is none.

    Raises:
        FolderError: if its options.json is damaged.
    """
    path = folder / "options.json"
    about = read(path, _ABOUT)
    try:
        return None if about is None else RunOptions.from_json(about["options"])
    except OptionError as error:
        raise FolderError(f"cannot read {path}: {error}") from error


def read_if_good(path: Path, check: Check) -> Any:
    """The content of an optional JSON file; None, with a warning, if it is damaged.

    Raises:
        FolderError: if it is not a file or cannot be opened: then it could not be rewritten either.
    """
    require_files(path.parent, [path.name])
    try:
        return read(path, check)
    except FolderError as error:
        warnings.warn(f"{error}; it is left out", stacklevel=2)
        return None


def full_result(value: Any) -> dict[str, Any]:
    """Check that a result can be summarised: the run finished, or the result says why not.

    Raises:
        ValueError: for anything else.
    """
    result: dict[str, Any] = RESULT(value)
    if not why_early(result):
        needed = [*_IN_FULL, "held_out_unseen" if result.get("held_out_probe") else "held_out"]
        missing = [name for name in needed if result.get(name) is None]
        if missing:
            raise UnreadableError(f"it has no {missing[0]}")
    return result


def why_early(result: dict[str, Any]) -> str:
    """Why a run ended early; empty if it finished."""
    return result.get("diverged") or result.get("no_rate") or ""


def require_files(folder: Path, names: Sequence[str]) -> None:
    """Refuse a folder in which one of these names exists but is not a readable file.

    Raises:
        FolderError: if so; the message says what is there.
    """
    for name in names:
        try:
            open_file(folder / name).close()
        except FileNotFoundError:
            continue
        except (OSError, UnreadableError) as error:
            raise FolderError(f"cannot read {folder / name}: {why(error)}; move it away") from error


def load_weights(folder: str | Path, model: nn.Module) -> None:
    """Load the weights of the run in `folder` into a model.

    Raises:
        OptionError: if there are none, or they belong to another model.
    """
    path = Path(folder) / _WEIGHTS
    try:
        with open_file(path) as file:
            model.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    except FileNotFoundError:
        raise OptionError(f"start must be the folder of a finished run; there is no {path}") from None
    except Exception as error:  # torch may raise anything for a foreign file
        reason = why(error).partition("\n")[0] or type(error).__name__
        raise OptionError(f"start must be the folder of a run of the same task, not {folder}: {reason}") from error


def reported(result: dict[str, Any]) -> dict[str, Any]:
    """The held-out losses to report: on all samples, or on the half that a held-out probe has not drawn from."""
    found: dict[str, Any] = result["held_out_unseen" if result["held_out_probe"] else "held_out"]
    return found


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a JSON Lines file; none if there is no such file. Skips an incomplete last line and, with a warning,
    damaged lines.

    Raises:
        FolderError: if it cannot be read.
    """
    lines = Lines(Path(path), _LINE.get(Path(path).name, OBJECT))
    try:
        found: list[dict[str, Any]] = [line for _, line in lines.more()]
    except FileNotFoundError:
        return []
    except (OSError, UnreadableError) as error:
        raise FolderError(f"cannot read {path}: {why(error)}") from error
    if lines.notice:
        warnings.warn(lines.notice, stacklevel=2)
    return found


def default_folder(name: str) -> Path:
    """A folder under ./runs that does not exist yet."""
    stem = f"runs/{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (stem if k == 1 else f"{stem}-{k}" for k in range(1, 1000))
    return next(Path(name) for name in names if not Path(name).exists())


def require_empty(path: Path) -> None:
    """Refuse a folder that is not empty or in which a run is alive.

    Raises:
        FolderError: if so; the message says what to do.
    """
    with writing(path):
        if path.exists() and (not path.is_dir() or any(entry.name != LOCK for entry in path.iterdir())):
            if (path / LOCK).exists():
                with locked(path):
                    pass
            raise FolderError(f"{path} exists and is not an empty folder; choose another one with --folder")
