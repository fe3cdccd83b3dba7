"""A probe: the same fresh batch for every replica, and its loss, leaving everything as it was."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hdet._arguments import check_count
from hdet._hooks import innermost
from hdet._probe.data import Chunk, counter_seed, find_source
from hdet._replicas import Replicas
from hdet._tensors.restore import batch_statistics, seeded
from hdet._tensors.shards import reshard

_WRITE = "write for example Probe(data, lambda model, batch: cross_entropy(model(batch[0]), batch[1]))"


class Probe:
    """Some samples, the same on every replica, and their mean loss at a replica's weights.

    Probe `index` consists of chunks c of n_c samples; its score is sum_c n_c loss_c / sum_c n_c. Scoring runs under
    `no_grad` and the caller's autocast, with dropout off and norms on the statistics of the chunk, so the score depends
    only on the weights and not on a replica's running statistics. Random numbers in the data or the loss are a function
    of (seed, index, chunk). Afterwards random generators, buffers, gradients and modes are as before.

    Args:
        data: a data set with `__len__` and `__getitem__`, from which each index draws `size` samples; or a function
            `data(index)` that returns a list of batches, the same on every replica; or an iterable of batches, such as
            a DataLoader. From an iterable the first replica takes the next `batches` for each new index and sends them
            to the others (tensors in tuples, lists and dicts); it restarts at its end and after a resume. A list is a
            data set of samples; with `batches=` it contains batches. Make one probe per replica.
        loss_fn: `loss_fn(model, batch)`, the mean loss of a batch. It gets the module inside DDP and torch.compile,
            whose forward sends nothing, and must move the batch to the device as training does.
        size: samples in a probe, for a data set; by default 1024, or all if there are fewer. About four global
            batches are enough to find a learning rate.
        chunk: most samples in a forward pass, for a data set; by default an eighth of the probe.
        batches: batches in a probe, for an iterable; by default 4.
        seed: seed of the draw, together with the index.
        held_out: whether the data are kept out of training. Regularisers must be judged on such data.
        collate_fn: makes a batch from a list of samples, for a data set; by default torch's.

    Attributes:
        held_out: the argument.
        samples: number of samples scored so far, on this replica.
        seconds: time spent so far by this replica, on the host's clock.

    Raises:
        TypeError, ValueError: for an argument that cannot work.

    >>> from torch.nn.functional import mse_loss
    >>> probe = Probe(torch.arange(8.0), lambda model, x: mse_loss(model(x[:, None]), x[:, None]), size=4)
    >>> probe.score(nn.Identity(), index=0)
    tensor(0., dtype=torch.float64)
    """

    def __init__(
        self,
        data: Any,
        loss_fn: Callable[[nn.Module, Any], Tensor],
        *,
        size: int | None = None,
        chunk: int | None = None,
        batches: int | None = None,
        seed: int = 0,
        held_out: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        check_loss_fn(loss_fn)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed must be an int, got {seed!r}; write for example seed=0")
        if batches is not None:
            check_count("batches", batches, unit="batches")
        self.held_out = bool(held_out)
        self.samples = 0
        self.seconds = 0.0
        self._seed = seed
        self._loss_fn = loss_fn
        self._source = find_source(data, size, chunk, batches, seed, collate_fn)
        samples = self._source.samples
        self._told = f"Probe({samples=}, {size=}, {chunk=}, {batches=}, {seed=}, {held_out=})"
        self._index: int | None = None
        self._chunks: list[Chunk] = []

    def __repr__(self) -> str:
        return self._told

    @property
    def repeats(self) -> bool:
        """Whether an index gives the same samples again, after a resume too; an iterable starts over."""
        return self._source.repeats

    def score(self, model: nn.Module, index: int, replicas: Replicas | None = None) -> Tensor:
        """The mean loss of probe `index` at the model's weights, 0-d float64 on the device. No host read.

        The samples are kept until another index is asked for. Sends nothing, except for an iterable with a new
        index: then all replicas must call, and its batches go to all of them.
        """
        total, weight = self._add_up(model, index, replicas, 0, 1).unbind()
        return total / weight

    def share(self, model: nn.Module, index: int, replicas: Replicas) -> Tensor:
        """This replica's part of the probe, for replicas that hold the same weights: (sum of n_c loss_c, sum of n_c).

        Summed over the replicas, the first divided by the second is what `score` gives, at 1/N of the work.
        """
        return self._add_up(model, index, replicas, replicas.rank, replicas.size)

    def sums(self, model: nn.Module, index: int) -> Tensor:
        """(sum of n_c loss_c, sum of n_c) over all chunks, for a probe with this replica's own samples."""
        return self._add_up(model, index, None, 0, 1)

    @torch.no_grad()
    def _add_up(self, model: nn.Module, index: int, replicas: Replicas | None, first: int, step: int) -> Tensor:
        started = time.perf_counter()
        inner = innermost(model)
        device = next((t.device for t in (*inner.parameters(), *inner.buffers())), torch.device("cpu"))
        try:
            chunks = self._draw(index, replicas, device)
            sums = torch.zeros(2, dtype=torch.float64, device=device)
            with batch_statistics(inner), _fresh_casts():
                for number in range(first, len(chunks), step):
                    batch, samples = chunks[number].load()
                    with seeded(counter_seed(self._seed, index, number, "loss")):
                        loss = check_loss(self._call(inner, batch))
                    sums[0] += loss.to(device, torch.float64) * samples
                    sums[1] += samples
                    self.samples += samples
            return sums
        finally:
            reshard(inner)
            self.seconds += time.perf_counter() - started

    def _call(self, model: nn.Module, batch: Any) -> Any:
        try:
            return self._loss_fn(model, batch)
        except (AttributeError, TypeError) as error:
            swapped = f"'{type(batch).__name__}' object is not callable"
            if type(model).__name__ not in str(error) and swapped not in str(error):
                raise
            raise TypeError(f"loss_fn is called as loss_fn(model, batch), but: {error}; {_WRITE}") from error

    def _draw(self, index: int, replicas: Replicas | None, device: torch.device) -> list[Chunk]:
        check_count("index", index, 0, "probes")
        if index != self._index:
            self._index, self._chunks = None, []  # the memory first
            self._chunks = self._source.draw(index, replicas, device)
            self._index = index
        return self._chunks


def check_loss_fn(loss_fn: object, write: str = _WRITE) -> None:
    """Raise unless it is a function of a model and a batch; the likeliest mistake is a loss of outputs and targets."""
    must = "loss_fn must be a function of (model, batch)"
    if not callable(loss_fn):
        raise TypeError(f"{must}, got {loss_fn!r}; {write}")
    function = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    home = type(function).__module__ if isinstance(function, nn.Module) else getattr(function, "__module__", None)
    home = getattr(function, "__globals__", {}).get("__name__", home)  # functools.wraps copies __module__
    if str(home).startswith("torch.nn."):
        name = getattr(function, "__name__", type(function).__name__)
        raise TypeError(f"{must}, got torch's {name}, which takes tensors; {write}")
    try:
        called = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
        signature = inspect.signature(called, follow_wrapped=False)  # what is called, and not what it stands for
    except ValueError:  # of a builtin
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise TypeError(f"{must}, got one with the arguments {signature}; {write}") from error


def check_loss(loss: Any) -> Tensor:
    """The mean loss of a batch.

    Raises:
        TypeError: if it is no tensor with one element.
    """
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss.reshape(())
    got = f"shape {tuple(loss.shape)} of {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
    write = {"dict": '; write return loss["loss"]', "tuple": "; return the loss alone"}.get(type(loss).__name__, "")
    raise TypeError(f"loss_fn must return the mean loss of the batch, a tensor with one element, got {got}{write}")


@contextmanager
def _fresh_casts() -> Iterator[None]:
    """Autocast must not keep the casts of weights made here: they lack a gradient. Nor may it use old ones."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
