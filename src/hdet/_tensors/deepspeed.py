"""DeepSpeed: ZeRO-0 is data parallel like DDP; other stages spread state over the ranks, so replicas cannot diverge.

DeepSpeed is never imported: its classes are recognised by their module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

_REMEDY = (
    'write "zero_optimization": {"stage": 0} in its config and leave out "fp16" and "bf16" (use torch.autocast), or '
    "train with DistributedDataParallel"
)


def check_deepspeed(optimizer: Any, model: Any, gradients: str = "shared") -> None:
    """Raise if DeepSpeed has sharded the model or keeps it in its own flat buffers.

    Args:
        optimizer: one or several, wrapped as the user has them: inside there is a plain torch optimizer whose
            parameters are this rank's part of the model, and averaging those would mix different weights.
        model: DeepSpeed's engine, the module that it was made of, or neither.
        gradients: whether replicas share them.

    Raises:
        ValueError: if so; the message says what to write instead.
    """
    stage = _stage(model)
    if stage:
        raise ValueError(
            f"DeepSpeed ZeRO-{stage} spreads {_SPREAD[stage]} over the ranks: there is one model, so replicas cannot "
            f"diverge; {_REMEDY}"
        )
    for wrapper in _wrappers(optimizer):
        if type(wrapper).__module__.startswith("deepspeed.runtime."):
            raise ValueError(
                f"DeepSpeed's {type(wrapper).__name__} steps a part of the model, or flat copies of it, for all ranks, "
                f"and replicas cannot diverge; {_REMEDY}"
            )
    if gradients == "local" and hasattr(model, "zero_optimization_stage"):
        raise ValueError(
            'gradients="local" needs a model that can stop sharing them, and DeepSpeed\'s engine shares them itself; '
            "train the module in DistributedDataParallel, or without a wrapper"
        )


_SPREAD = {
    1: "the optimizer state",
    2: "the optimizer state and the gradients",
    3: "the parameters",
}


def _stage(model: Any) -> int:
    """The stage of an engine, or of the one that a module was given to; 0 if there is none."""
    asked = getattr(model, "zero_optimization_stage", None)
    if callable(asked):
        return int(asked())
    first = next(iter(model.parameters()), None) if hasattr(model, "parameters") else None
    if hasattr(first, "ds_id"):
        return 3
    return 1 if hasattr(first, "_hp_mapping") else 0


def _wrappers(optimizer: Any) -> Iterator[Any]:
    """The optimizers as given, and what is inside them."""
    for given in optimizer if isinstance(optimizer, Sequence) else (optimizer,):
        inner = given
        while inner is not None:
            yield inner
            inner = getattr(inner, "optimizer", None)
