"""Reject bad arguments before training starts; each error says what to write instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import nn, optim
from torch.optim import Optimizer

from hdet._arguments import check_count
from hdet._explore.hyperparameter import Hyperparameter
from hdet._explore.in_forward import InForward
from hdet._explore.in_groups import InGroups, is_rate
from hdet._options.averaging import Averaging
from hdet._options.safety import Safety
from hdet._probe.probe import Probe
from hdet._replicas import Where, find_replicas
from hdet._tensors.local_gradients import Gradients
from hdet._tensors.parameters import parameters_of
from hdet._tensors.shards import is_a, is_sharded
from hdet._user_warning import warn
from hdet.controllers import Controller, Fixed, LineSearch, Plan


def check_interval(
    interval: int | Literal["auto"], total_steps: int | None, explores: bool, plan: Plan | None = None
) -> int:
    """Resolve "auto" and return the interval in steps; warn if it is longer than a run that explores anything.

    Args:
        interval: the user's argument.
        total_steps: length of the run, if known.
        explores: whether replicas get different values.
        plan: the controller's plan, for "auto".
    """
    if total_steps is not None:
        check_count("total_steps", total_steps)
    if interval == "auto":
        found = (plan or Plan()).auto_interval(total_steps)
        if found is None:
            raise ValueError('interval="auto" needs total_steps; give total_steps, or an interval in steps')
        return found
    check_count("interval", interval)
    if explores and total_steps is not None and interval > total_steps:
        warn(
            f"interval {interval} is longer than the run of {total_steps} steps: the replicas are averaged once, "
            "at the end, and no controller acts; use a shorter interval"
        )
    return interval


def check_averaging(averaging: Averaging | None) -> Averaging:
    """Return the averaging options; the defaults for None."""
    if averaging is not None and not isinstance(averaging, Averaging):
        raise TypeError(
            f"averaging must be an hdet.Averaging, got {averaging!r}; write for example "
            "averaging=hdet.Averaging(outer_step=0.5)"
        )
    return Averaging() if averaging is None else averaging


def check_safety(safety: Safety | None) -> Safety:
    """Return the safety options; the defaults for None."""
    if safety is not None and not isinstance(safety, Safety):
        raise TypeError(
            f"safety must be an hdet.Safety, got {safety!r}; write for example safety=hdet.Safety(guard=True)"
        )
    return Safety() if safety is None else safety


def check_guard(optimizers: Sequence[Optimizer]) -> None:
    """Raise unless every rank sees whole gradients, which all ranks need to reach the same decision."""
    if any(map(is_sharded, parameters_of(*optimizers))):
        raise ValueError(
            "guard=True needs whole gradients on every rank, but they are sharded: each rank would decide by "
            "its own part; leave guard out, and use the skipping of your GradScaler or of FSDP"
        )


def check_controller(controller: object) -> None:
    """Raise unless `controller` is an object with `init` and `update`."""
    if isinstance(controller, type) or not all(hasattr(controller, name) for name in ("init", "update", "needs_score")):
        raise TypeError(
            f"controller must be an object with needs_score, init() and update(), got {controller!r}; "
            "write for example controller=hdet.controllers.Softmax()"
        )


def check_on_round(on_round: Sequence[object]) -> None:
    """Raise unless `on_round` holds callables."""
    for call in on_round:
        if not callable(call):
            raise TypeError(f"on_round must hold callables, got {call!r}; write for example on_round=[print]")


def check_hyperparameters(hyperparameters: Sequence[Hyperparameter], optimizers: Sequence[Optimizer]) -> None:
    """Raise if two hyperparameters share a scalar or a name, or if one belongs to no given optimizer."""
    taken: dict[tuple[int, int, str], str] = {}
    names: set[str] = set()
    for h in hyperparameters:
        if not isinstance(h, Hyperparameter):
            raise TypeError(
                f"hyperparameters must hold Hyperparameter objects, got {type(h).__name__}; "
                "write for example [hdet.learning_rate(optimizer, spread=0.1)]"
            )
        if h.name in names:
            raise ValueError(f"two hyperparameters are named {h.name!r}; names must differ")
        names.add(h.name)
        if isinstance(h, InForward):
            for cell in h.cells:
                _take(taken, (id(cell.owner), 0, cell.attribute), h, f"{cell.attribute!r} of one object")
        if isinstance(h, InGroups):
            _take_groups(taken, h, optimizers)


def _take_groups(taken: dict[tuple[int, int, str], str], h: InGroups, optimizers: Sequence[Optimizer]) -> None:
    for optimizer in h.optimizers:
        if not any(optimizer is known for known in optimizers):
            raise ValueError(
                f"{h.name} belongs to an optimizer that this ensemble does not know; "
                "pass every optimizer: Ensemble([muon, adamw], ...)"
            )
        for number, group in enumerate(h.groups(optimizer), start=h.group or 0):
            if h.key not in group:
                raise ValueError(f"{type(optimizer).__name__} has no {h.key!r} in parameter group {number}")
            _take(taken, (id(optimizer), number, h.place), h, f"{h.place!r} of parameter group {number}")


def _take(taken: dict[tuple[int, int, str], str], place: tuple[int, int, str], h: Hyperparameter, words: str) -> None:
    other = taken.setdefault(place, h.name)
    if other != h.name:
        raise ValueError(f"{h.name} and {other} both explore {words}; keep one")


def check_gradients(
    gradients: Gradients, explored: Sequence[Hyperparameter], model: nn.Module | None, acts: bool
) -> None:
    """Raise for local gradients without a model, and for a controller that shared gradients leave without a signal."""
    if gradients not in ("shared", "local"):
        raise ValueError(f'gradients must be "shared" or "local", got {gradients!r}')
    if gradients == "local":
        if model is None:
            raise ValueError('gradients="local" needs model=, to stop sharing them; pass the model as you call it')
        return
    blind = [h.name for h in explored if h.before_reduce]
    if blind and acts:
        raise ValueError(
            f"{blind[0]} acts before the gradients are shared: with shared gradients every replica gets the same "
            'weights whatever its value, so no controller can judge it. Write Ensemble(..., gradients="local"), or '
            "controller=hdet.controllers.Fixed() to spread it without moving it"
        )


def check_state(averaging: Averaging, gradients: Gradients) -> None:
    """Raise if replicas share gradients but keep separate optimizer state."""
    if not averaging.state and gradients != "local":
        raise ValueError(
            "state=False is for local gradients: with shared ones the state is equal, or must be; write "
            'gradients="local", or leave it out'
        )


def check_buffers(explored: Sequence[Hyperparameter], model: nn.Module | None) -> None:
    """Raise if DDP would overwrite explored buffers with the first replica's."""
    held = [h.name for h in explored if isinstance(h, InForward) and h.tensors()]
    for module in model.modules() if held and model is not None else ():
        if isinstance(module, nn.parallel.DistributedDataParallel) and module.broadcast_buffers:
            raise ValueError(
                f"{held[0]} is held by a buffer, and DistributedDataParallel gives all replicas the first one's "
                "buffers; write DistributedDataParallel(model, broadcast_buffers=False), or keep it in a plain number"
            )


def check_line_search(controller: Controller, explored: Sequence[Hyperparameter]) -> None:
    """Raise if a line search would move anything but a learning rate."""
    other = [h.name for h in explored if not is_rate(h)]
    if isinstance(controller, LineSearch) and other:
        raise ValueError(
            f"LineSearch is for learning rates, and {other[0]} is not one: the length of a round's step is not "
            "proportional to it; write controller=hdet.Auto(), which uses slopes for it, or hdet.controllers.Slope()"
        )


def check_probe(
    probe: object, explored: Sequence[Hyperparameter], controller: Controller, acts: bool, model: nn.Module | None
) -> None:
    """Raise for a missing or unusable probe; warn if it would judge a regulariser on training data."""
    name = type(controller).__name__
    if probe is not None and not (isinstance(probe, Probe) or callable(probe)):
        raise TypeError(f"probe must be an hdet.Probe or a callable, got {probe!r}; write hdet.Probe(dataset, loss_fn)")
    if isinstance(probe, Probe) and model is None:
        raise ValueError("a Probe needs model=, the model that it scores; pass the model that you train")
    if probe is None and explored and getattr(controller, "needs_probe", False):
        raise ValueError(
            f"{name} needs a probe, the same data for all replicas: write Ensemble(..., model=model, "
            "probe=hdet.Probe(dataset, loss_fn))"
        )
    held_out = getattr(probe, "held_out", False)
    blind = [h.name for h in explored if h.regulariser]
    if blind and acts and not held_out and not isinstance(controller, Fixed):
        warn(
            f"{blind[0]} is a regulariser: judged on training data it runs to no regularisation at all; judge it with "
            "probe=hdet.Probe(held_out_dataset, loss_fn, held_out=True)"
        )


def check_model(model: object, optimizers: Sequence[Optimizer]) -> None:
    """Raise unless `model` is None or a module that holds some of the optimizers' parameters."""
    if model is None:
        return
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}; pass the module you train")
    trained = set(map(id, parameters_of(*optimizers)))
    if not any(id(p) in trained for p in model.parameters()):
        raise ValueError(
            f"model must be the one that the optimizer trains, got a {type(model).__name__} that shares no "
            "parameter with it; pass the module whose parameters() went into the optimizer"
        )


def check_wrapper(model: nn.Module | None, where: Where | None) -> None:
    """Raise for a wrapper that ignores the replicas of one process: they would not share their gradients."""
    replicas = find_replicas(where)
    if replicas.wrapping_broadcasts or replicas.size == 1 or model is None:
        return
    if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "DistributedDataParallel does not share gradients among the replicas of hdet.in_process; write "
            "hdet.data_parallel(model), which does, there and under torchrun"
        )


def check_can_diverge(optimizers: Sequence[Optimizer]) -> None:
    """Raise for optimizers whose replicas cannot hold different weights or must not take different steps."""
    for optimizer in optimizers:
        if isinstance(optimizer, optim.LBFGS):
            raise ValueError(
                "LBFGS cannot be used with a spread: its line search branches on each replica's own loss, so "
                "replicas would run backward a different number of times and hang; use spread 0 or another optimizer"
            )
        if is_a("ZeroRedundancyOptimizer", optimizer):
            raise ValueError(
                "ZeroRedundancyOptimizer cannot be used with a spread: one rank steps each parameter for all, "
                "so replicas cannot diverge; use the plain optimizer, or spread 0"
            )
