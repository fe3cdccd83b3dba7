"""The format on disk: one folder per checkpoint, either complete and verifiable or absent.

path/000012-step-3400/shared.pt         state common to all replicas; absent in mid-round
                      replica-0.pt      this replica's own state: its random numbers, in mid-round everything
                      checkpoint.json   the manifest, with size and SHA-256 of each file; written last
path/.unfinished-...                    being written, or left behind by a kill; the next save removes it

A rename gives the folder its name once all of it is on disk.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hdet.checkpoint.in_use import hold
from hdet.records.reading import open_file

SHARED = "shared.pt"
_MANIFEST = "checkpoint.json"
VERSION = 1
_NAME = re.compile(r"(\d{6,})-step-\d+")
_UNFINISHED = ".unfinished-"
_CHUNK = 1 << 20
_MOST_OF_MANIFEST = 1 << 24


_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file is too large for this disk",
}


class FullDiskError(Exception):
    """There is no room for a checkpoint."""


class DamagedError(Exception):
    """A checkpoint that differs from what was written."""


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint.

    Attributes:
        step: optimizer steps taken.
        replicas: number of replicas that wrote it.
        mid_round: whether each replica has its own state, and the shared file only the common part.
        files: size and SHA-256 of each file, by name.
    """

    step: int
    replicas: int
    mid_round: bool
    files: Mapping[str, tuple[int, str]]


def own_file(replica: int) -> str:
    """The name of a replica's own file."""
    return f"replica-{replica}.pt"


def candidates(path: Path) -> list[Path]:
    """The checkpoints in `path`, newest first; only `path` if it is a checkpoint itself."""
    if path.is_dir() and (_NAME.fullmatch(path.name) or (path / _MANIFEST).exists()):
        return [path]
    found = {int(match[1]): path / match[0] for match in map(_NAME.fullmatch, _names(path)) if match}
    return [found[number] for number in sorted(found, reverse=True)]


# Writing


def begin(path: Path, owner: Any, lone: bool = False) -> Path:
    """Create `path`, remove what a kill left behind, and start a new checkpoint in a temporary folder.

    Raises:
        FolderInUseError: if another process saves there, see `hold()`.
    """
    if not path.is_dir():
        path.mkdir(parents=True)
        _flush_folder(path.parent)
    hold(path, owner, lone)
    for name in _names(path):
        if name.startswith(_UNFINISHED):
            shutil.rmtree(path / name, ignore_errors=True)
    temporary = path / f"{_UNFINISHED}{os.urandom(4).hex()}"
    temporary.mkdir()
    return temporary


def write(file: Path, state: Any) -> tuple[int, str]:
    """Write tensors and plain values to a new file, sync it to disk, and return its size and SHA-256.

    Raises:
        FullDiskError: if the disk is full.
    """
    try:
        with open(file, "xb") as raw:
            hashed = _Hashed(raw)
            torch.save(state, hashed)  # type: ignore[arg-type]
            raw.flush()
            os.fsync(raw.fileno())
    except (OSError, RuntimeError) as error:
        met = error if isinstance(error, OSError) else error.__context__  # torch raises its own error instead
        if isinstance(met, OSError) and met.errno in _FULL:
            raise FullDiskError(_room(file, _nbytes(state), met)) from error
        raise
    return hashed.size, hashed.digest.hexdigest()


def publish(temporary: Path, manifest: Manifest) -> Path:
    """Turn the temporary folder, whose files are on disk, into a checkpoint named by number and step."""
    with open(temporary / _MANIFEST, "xb") as file:
        file.write(signed(manifest))
        file.flush()
        os.fsync(file.fileno())
    _flush_folder(temporary)
    path = temporary.parent
    newest = next((int(old.name.partition("-")[0]) for old in candidates(path)), 0)
    final = path / f"{newest + 1:06}-step-{manifest.step}"
    os.rename(temporary, final)
    _flush_folder(path)
    return final


def prune(path: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints; those with missing or truncated files do not count."""
    kept = 0
    for folder in candidates(path):
        if kept >= keep:
            doomed = path / f"{_UNFINISHED}{folder.name}"  # renamed first, so a kill leaves no damaged checkpoint
            os.rename(folder, doomed)
            shutil.rmtree(doomed, ignore_errors=True)
        elif _looks_whole(folder):
            kept += 1


# Reading


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        DamagedError: if it differs from what was written, or has another version of the format.
    """
    try:
        with open_file(folder / _MANIFEST) as file:
            data = file.read(_MOST_OF_MANIFEST)
        first = data.partition(b"\n")[0]
        if data != _sign(first):
            raise DamagedError(f"the checksum of {_MANIFEST} is wrong")
        values = json.loads(first)
        version = values.pop("version")
        files = {str(name): (int(size), str(sha)) for name, (size, sha) in values.pop("files").items()}
        manifest = Manifest(int(values["step"]), int(values["replicas"]), bool(values["mid_round"]), files)
    except DamagedError:
        raise
    except Exception as error:
        raise DamagedError(f"{_MANIFEST} cannot be read: {type(error).__name__}: {error}") from error
    if version != VERSION:
        raise DamagedError(f"it was written in version {version} of the format, and this hdet reads {VERSION}")
    return manifest


def read(folder: Path, name: str, manifest: Manifest) -> Any:
    """Verify size and checksum of a file, then load its tensors and plain values on the CPU.

    Raises:
        DamagedError: if it differs from what was written, or contains anything else.
    """
    try:
        with _verified(folder / name, *manifest.files[name]) as file:
            return torch.load(file, map_location="cpu", weights_only=True)
    except DamagedError:
        raise
    except Exception as error:
        reason = str(error).partition("\n")[0][:200]
        raise DamagedError(f"{name} cannot be read: {type(error).__name__}: {reason}") from error


@contextmanager
def _verified(path: Path, size: int, sha256: str) -> Iterator[BinaryIO]:
    with open_file(path) as file:
        found = os.fstat(file.fileno()).st_size
        if found != size:
            raise DamagedError(f"{path.name} has {found} bytes instead of {size}")
        digest = hashlib.sha256()
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
        if digest.hexdigest() != sha256:
            raise DamagedError(f"the checksum of {path.name} is wrong")
        file.seek(0)
        yield file


def _looks_whole(folder: Path) -> bool:
    try:
        manifest = read_manifest(folder)
        return all((folder / name).stat().st_size == size for name, (size, _) in manifest.files.items())
    except (DamagedError, OSError):
        return False


def _room(file: Path, needed: int, met: OSError) -> str:
    """The error message for a full disk, with what to do."""
    free = ""
    with contextlib.suppress(OSError):
        free = f", of which {shutil.disk_usage(file.parent).free / 1e6:.1f} MB are free" * (met.errno == errno.ENOSPC)
    return (
        f"{_FULL[met.errno or 0]} ({met.strerror}): {file.name} needs about {needed / 1e6:.1f} MB in "
        f"{file.parent.parent}{free}; make room, keep fewer checkpoints, or save to another path"
    )


def _nbytes(state: Any) -> int:
    """The size of all tensors in `state`, counting each storage once."""
    storages: dict[int, int] = {}

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, Mapping):
            for item in value.values():
                add(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)

    add(state)
    return sum(storages.values())


class _Hashed:
    """A file that hashes what is written to it: the checksum is of the intended bytes, not of what the disk stores."""

    def __init__(self, file: BinaryIO) -> None:
        self.digest = hashlib.sha256()
        self.size = 0
        self._file = file

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.size += memoryview(data).nbytes
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()


def signed(manifest: Manifest) -> bytes:
    """A manifest as bytes, with its checksum."""
    return _sign(json.dumps({"version": VERSION, **asdict(manifest)}, sort_keys=True).encode())


def _sign(line: bytes) -> bytes:
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def _names(path: Path) -> list[str]:
    return os.listdir(path) if path.is_dir() else []


def _flush_folder(path: Path) -> None:
    """Sync a folder: a file's name is on disk only once its folder is."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
