"""Dropout as a hyperparameter. In compiled models the layers read it from a tensor, so one graph serves all values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hdet._explore.hyperparameter import check_scalar
from hdet._explore.in_forward import Bounds, Cell, Held, InForward
from hdet._explore.slots import Ladder
from hdet._user_warning import warn


def dropout(
    model: nn.Module,
    *,
    spread: float = 0.2,
    ladder: Ladder = "linear",
    bounds: Bounds = (0.0, 0.95),
    compiled: bool | None = None,
) -> InForward:
    """The probability of every dropout layer of `model` that has one above 0: one scale on all their odds.

    A regulariser: judge it with a held-out `Probe`, and expect little: its benefit takes longer than a round.

    Args:
        model: the model; its Dropout layers, MultiheadAttention and recurrent layers are found.
        spread, ladder: as in `hdet.learning_rate`; the multipliers act on the odds.
        bounds: limits of every replica's probability.
        compiled: torch.compile builds a graph for every new probability. True replaces the forward of torch's Dropout
            layers, until the ensemble is closed, by one that reads the probability from a tensor and draws other masks
            than torch's; it warns about layers that cannot be replaced, such as MultiheadAttention. By default only
            modules that are already compiled are treated so.
    """
    inside = _inside_compiled(model, compiled)
    devices = {parameter.device for parameter in model.parameters()}
    found = ((name, _cell_of(m, devices if m in inside else None)) for name, m in model.named_modules())
    cells = {name: cell for name, cell in found if cell is not None}
    if not cells:
        raise ValueError(
            "model must hold a dropout layer with a probability above 0, got none; for a probability that your own "
            'code reads write hdet.attribute(module, "name", coordinate="logit", bounds=(0, 1))'
        )
    made = InForward("dropout", float(spread), ladder, "logit", bounds, regulariser=True, cells=tuple(cells.values()))
    check_scalar(made)
    _warn_of_compiling({name: cell for name, cell in cells.items() if cell.owner in inside})
    return made


def _inside_compiled(model: nn.Module, compiled: bool | None) -> set[nn.Module]:
    """The modules that torch.compile sees: all or none, as `compiled` says, or those inside a compiled one."""
    if compiled is not None:
        return set(model.modules()) if compiled else set()
    roots = (
        m for m in model.modules() if hasattr(m, "_orig_mod") or getattr(m, "_compiled_call_impl", None) is not None
    )
    return {module for root in roots for module in root.modules()}


def _cell_of(module: nn.Module, devices: Iterable[torch.device] | None) -> Cell | None:
    """The cell of the module's probability if it drops; with `devices` in a tensor if possible."""
    if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
        return Cell(module, "p") if devices is None or not _has_twin(module) else _InTensorToo(module, devices)
    if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)) and module.dropout > 0:
        return Cell(module, "dropout")
    return None


def _is_compiled_anew(cell: Cell) -> bool:
    """Whether torch compiles the module of `cell` with a guard on its number."""
    if isinstance(cell.owner, nn.RNNBase):  # by default torch runs what calls a recurrent layer uncompiled
        return bool(getattr(torch._dynamo.config, "allow_rnn", False))
    return not isinstance(cell, _InTensorToo)


def _warn_of_compiling(compiled: Mapping[str, Cell]) -> None:
    names = []
    for name, cell in compiled.items():
        if _is_compiled_anew(cell):
            path = ".".join(part for part in name.split(".") if part != "_orig_mod")
            names.append(f"{path} ({type(cell.owner).__name__})".strip())
    if not names:
        return
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    warn(
        f"torch compiles anew for every dropout probability of {', '.join(names[:3])}{more}, and after a few of them "
        "runs that part uncompiled; keep it out of the compiled part, or set its own dropout to 0 before hdet.dropout, "
        "which then explores the other layers"
    )


# What torch's layers call, and how many of the leading dimensions have masks of their own; the others go whole.
_TWINS: dict[type[nn.Module], tuple[Callable[..., Tensor], Callable[[Tensor], int]]] = {
    nn.Dropout: (functional.dropout, lambda x: x.dim()),
    nn.Dropout1d: (functional.dropout1d, lambda x: x.dim() - 1),
    nn.Dropout2d: (functional.dropout2d, lambda x: 2),
    nn.Dropout3d: (functional.dropout3d, lambda x: 2 if x.dim() == 5 else 1),
    nn.AlphaDropout: (functional.alpha_dropout, lambda x: x.dim()),
    nn.FeatureAlphaDropout: (functional.feature_alpha_dropout, lambda x: 2),
}
_ALPHA = 1.7580993408473766  # torch's: SELU never falls below -_ALPHA, which stands for what is dropped


def _has_twin(module: nn.Module) -> bool:
    """Whether its forward is torch's own, or already our replacement."""
    forward = vars(module).get("forward")
    return type(module) in _TWINS and (forward is None or getattr(forward, "func", None) is _dropout_by_tensor)


class _InTensorToo(Cell):
    """The probability of a dropout layer that reads it from a tensor, so that one compiled graph serves them all.

    Args:
        layer: the layer.
        devices: where the tensor is put at once, so that no graph has to.
    """

    def __init__(self, layer: nn.Module, devices: Iterable[torch.device]) -> None:
        super().__init__(layer, "p")
        self._held = Held(self.base)
        for device in devices:
            self._held.tensor(device)
        # not a bound method, as one that its class does not have cannot be unpickled
        self._forward = partial(_dropout_by_tensor, layer, self._held)
        self.owner.forward = self._forward

    def write(self, value: float, base: float | None = None) -> None:
        """Put `value` into the layer and into the tensor."""
        super().write(value, base)
        self._held.number = value
        self.owner.forward = self._forward

    def close(self) -> None:
        """Put the base back, and the layer's own forward."""
        if vars(self.owner).get("forward") is self._forward:  # else it is closed, or another ensemble's by now
            super().close()
            del self.owner.forward


def _dropout_by_tensor(layer: Any, held: Held, x: Tensor) -> Tensor:
    """The same as torch's layer, with the probability in a tensor."""
    by_torch, masked_dimensions = _TWINS[type(layer)]
    by_torch(x, 0.0, training=False)  # drops nothing, but says what is wrong with the shape
    if not layer.training:
        return x
    p = held.tensor(x.device)
    masked = masked_dimensions(x)
    one_each = x[(slice(None),) * masked + (slice(1),) * (x.dim() - masked)]
    kept = torch.rand_like(one_each, dtype=torch.float32) >= p  # half precision would round the probability
    share = (1 - p).clamp_min(1e-6)  # where all are dropped, 0 is divided by it
    if isinstance(layer, (nn.AlphaDropout, nn.FeatureAlphaDropout)):
        scale = (share * (1 + _ALPHA**2 * p)).rsqrt()
        return scale * (torch.where(kept, x, -_ALPHA) + _ALPHA * p)
    return x.mul_(kept).div_(share) if layer.inplace else x * kept / share
