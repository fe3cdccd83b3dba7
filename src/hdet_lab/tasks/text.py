"""Text: a small byte-level transformer on the source of Python's own standard library, or on a text file."""

from __future__ import annotations

import functools
import math
import os
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from hdet_lab.tasks.task import PROBED, Batch, Preset, Size, Task, readable, to_device_of

_BYTES = 256
_CONTEXT, _WIDTH, _LAYERS, _HEADS = 64, 64, 3, 4
_HELD_OUT_WINDOWS = {"smoke": 64, "standard": 512, "long": 512}
_MOST_BYTES = 4_000_000
_LEAST_BYTES = 20 * (_CONTEXT + 1)  # a tenth of it is two windows: one for a held-out probe, one that it never sees
# Other packages, tests, and tables that a program wrote.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}


class Text(Task):
    """Which byte comes next? A tenth of the files is held out; of a file given as `data`, its last tenth.

    The text is that of the Python that runs it, so losses compare within one version of Python.
    """

    name: ClassVar[str] = "text"
    # The peaks: the best of plain OneCycleLR runs in one process. Held-out losses: standard, means of three seeds,
    # 1.605, 1.532, 1.521, 1.553, 2.131 at 2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2; smoke 2.948, 2.852, 2.959 at 3e-3, 1e-2,
    # 3e-2; long, one seed, 1.398, 1.356, 1.345, 1.348, 1.376 at 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2.
    presets: ClassVar[dict[Size, Preset]] = {
        "smoke": Preset(steps=60, global_batch=32, peak_lr=1e-2),
        "standard": Preset(steps=1000, global_batch=32, peak_lr=1e-2),
        "long": Preset(steps=8000, global_batch=8, peak_lr=5e-3),
    }

    def loss(self, model: nn.Module, batch: Batch, label_smoothing: float = 0.0) -> Tensor:
        """Cross entropy of the next byte, in nats."""
        (windows,) = to_device_of(model, batch)
        logits = model(windows[:, :-1])
        following = windows[:, 1:].flatten()
        return functional.cross_entropy(logits.flatten(0, 1), following, label_smoothing=label_smoothing)

    def _prepare(self) -> None:
        self._text, held_out = _standard_library() if self.data is None else _own_file(self.data)
        count = min(_HELD_OUT_WINDOWS[self.size], len(held_out) // (_CONTEXT + 1))
        last = len(held_out) - _CONTEXT - 1
        self._held_out = _windows(held_out, torch.arange(count) * last // max(count - 1, 1))
        counts = torch.bincount(self._text.long(), minlength=_BYTES) + 1.0  # bytes that never occur keep a chance
        self.marginal_loss = -(counts / counts.sum()).log()[self._held_out[:, 1:]].mean().item()

    def _build(self) -> nn.Module:
        return Transformer(self.dropout)

    def _batch(self, step: int, part: slice) -> Batch:
        last = len(self._text) - _CONTEXT
        starts = torch.randint(last, (self.global_batch,), generator=self._generator(step))
        return (_windows(self._text, starts[part]),)

    def _draw(self, generator: torch.Generator, held_out: bool) -> Batch:
        if held_out:
            windows = self._held_out[PROBED]
            return (windows[torch.randperm(len(windows), generator=generator)[: self.global_batch]],)
        starts = torch.randint(len(self._text) - _CONTEXT, (self.global_batch,), generator=generator)
        return (_windows(self._text, starts),)

    def _measure(self, model: nn.Module, part: slice) -> dict[str, float]:
        windows = self._held_out[part]
        chunks = torch.tensor_split(windows, math.ceil(len(windows) / 64))
        losses = [self.loss(model, (chunk,)).item() * len(chunk) for chunk in chunks]
        loss = sum(losses) / len(windows)
        return {"loss": loss, "bits_per_byte": loss / math.log(2)}


class Transformer(nn.Module):
    """A causal transformer over bytes, norms first; about 0.19 million parameters."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.byte = nn.Embedding(_BYTES, _WIDTH)
        self.position = nn.Embedding(_CONTEXT, _WIDTH)
        self.blocks = nn.Sequential(*(_Block(dropout) for _ in range(_LAYERS)))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _BYTES)
        for embedding in (self.byte, self.position):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Logits of the byte after each byte of (batch, length) text."""
        places = torch.arange(text.shape[1], device=text.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.byte(text) + self.position(places))))
        return logits


class _Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        dropped = [nn.Dropout(dropout)] if dropout else []
        self.before_attention, self.before_mlp = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.attend, self.project = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.mlp = nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH), *dropped)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.attend(self.before_attention(x)).view(batch, length, 3, _HEADS, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(x.shape))
        changed: Tensor = x + self.mlp(self.before_mlp(x))
        return changed


def _windows(text: Tensor, starts: Tensor) -> Tensor:
    """One byte more than the context from each start on."""
    return text[starts[:, None] + torch.arange(_CONTEXT + 1)].long()


@functools.cache
def _standard_library() -> tuple[Tensor, Tensor]:
    """The training files and the held-out files, each joined. A file's path decides if it is used and where."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = list(_sources(root))
    key = {path: zlib.crc32(path.as_posix().encode()) for path in paths}
    parts: tuple[list[bytes], list[bytes]] = [], []
    size = 0
    for path in sorted(paths, key=lambda path: (key[path] // 10, path)):  # a sample of all folders, not the first ones
        content = (root / path).read_bytes()
        size += len(content)
        if size > _MOST_BYTES:
            break
        parts[key[path] % 10 == 0].append(content)
    train, held_out = (_as_tensor(b"\n".join(part)) for part in parts)
    return train, held_out


def _sources(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        yield from (Path(folder, name).relative_to(root) for name in files if name.endswith(".py"))


@functools.cache
def _own_file(path: str) -> tuple[Tensor, Tensor]:
    with readable(path):
        text = _as_tensor(Path(path).read_bytes())
    if len(text) < _LEAST_BYTES:
        raise ValueError(f"data must be a text of at least {_LEAST_BYTES} bytes; {path} has {len(text)}")
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content or b"\0"), dtype=torch.uint8)
