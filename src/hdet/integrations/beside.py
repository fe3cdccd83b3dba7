"""What lies beside another library's checkpoint, which holds the consensus: what each replica needs to go on exactly.

`hdet.save` writes it: the ensemble's state and random numbers, and what replicas differ in, which is nothing at the end
of a round (but for `hdet.Averaging(state=False)`), and never what is frozen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from hdet._hooks import innermost
from hdet._replicas import collective_device
from hdet.checkpoint import folder
from hdet.checkpoint.exchange import exchange, replicas_of
from hdet.checkpoint.load import load
from hdet.checkpoint.save import save
from hdet.ensemble import Ensemble


class Beside:
    """What is saved beside the checkpoints of one run.

    Args:
        ensemble: whose replicas save and load together.
        always: what the other library does not save, by name; the ensemble is among it.
        own: what it saves of one replica only, and replicas may differ in; looked up anew each time, as parameter
            groups may be added.
    """

    def __init__(self, ensemble: Ensemble, always: Mapping[str, Any], own: Callable[[], Mapping[str, Any]]) -> None:
        self._ensemble, self._always, self._own = ensemble, dict(always), own

    def save(self, path: Path, step: int | None, keep: int) -> None:
        """Write it to a new folder in `path`. Collective.

        Args:
            path: of one checkpoint.
            step: how the other library counts; by default as the ensemble does.
            keep: how many to keep there: 2 beside a file that is written again and again, so that a kill in between
                leaves the state of the one before.
        """
        save(path, self._entries(self._ensemble.replicas_differ), step=step, keep=keep)

    def load(self, path: Path, step: int | None) -> bool:
        """Load what was saved at `step`, or last; False if there is nothing. Collective.

        Raises:
            RuntimeError: if the replicas do not see the same folder.
        """
        found = folder.candidates(path)
        if step is not None:
            found = [one for one in found if one.name.endswith(f"-step-{step}")]
        tensors = [t for t in self._own().values() if isinstance(t, Tensor)]
        with replicas_of(self._ensemble, None) as replicas:
            names = exchange(replicas, found[0].name if found else None, collective_device(tensors))
        if any(name != names[0] for name in names):
            raise RuntimeError(
                f"the replicas see different states in {path}: {names}; checkpoints must be on a file system that all "
                "replicas share"
            )
        if found:
            load(found[0], self._entries(folder.read_manifest(found[0]).mid_round))
        return bool(found)

    def _entries(self, differ: bool) -> dict[str, Any]:
        return {**self._always, **self._own()} if differ else self._always


def trained_by(optimizers: Sequence[Optimizer], name: str, model: nn.Module) -> dict[str, Tensor]:
    """What of a model replicas differ in, by name: what the optimizers train, and buffers."""
    trained = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    module = innermost(model)
    weights: Iterable[tuple[str, Tensor]] = module.named_parameters()
    found = {key: p for key, p in weights if id(p) in trained} | dict(module.named_buffers())
    return {f"{name}.{key}": tensor for key, tensor in found.items()}
