"""The commands of many runs: sweep, returns and ablate. Called again, each continues with the missing runs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from hdet_lab import pictures
from hdet_lab.ablate import CONTROLLERS, NOISE, ablate
from hdet_lab.ablate import show as show_ablation
from hdet_lab.commands.arguments import (
    RUN_OPTIONS,
    TASK_OPTIONS,
    add_command,
    add_options,
    counts,
    options_from,
    words,
)
from hdet_lab.errors import LabError, OptionError
from hdet_lab.folder import default_folder
from hdet_lab.launch import prepare
from hdet_lab.lock import locked
from hdet_lab.option import positive
from hdet_lab.options import GRADIENTS, RunOptions
from hdet_lab.replica_scaling import SIZES, scale_replicas
from hdet_lab.replica_scaling import show as show_scaling
from hdet_lab.sweep import MOST_RATES, RATIO, sweep
from hdet_lab.sweep import show as show_sweep


def add_commands(commands: Any) -> None:
    """Add them to a parser's subcommands."""
    command = add_command(commands, "sweep", _sweep, "the plain schedule over a grid of learning rates")
    add_options(command, defaults={"controller": "none"})
    _add_seeds(command, 3, "rate")
    command.add_argument("--ratio", type=float, default=RATIO, help=f"of neighbouring rates (default: {RATIO:g})")
    command.add_argument(
        "--most-rates", type=int, default=MOST_RATES, help=f"when to give up widening the grid (default: {MOST_RATES})"
    )

    command = add_command(commands, "returns", _returns, "the same run with 2, 4, 8 and 16 replicas")
    add_options(command, tuple(name for name in RUN_OPTIONS if name != "replicas"))
    _add_seeds(command, 1, "row")
    sizes = ",".join(map(str, SIZES))
    command.add_argument("--sizes", type=counts, default=SIZES, metavar="N,N", help=f"default: {sizes}")

    text = "the paper's ablation, at a rate at which plain training breaks down"
    command = add_command(commands, "ablate", _ablate, text)
    helps = {"peak_lr": "the low rate; default: the task's own"}
    add_options(command, TASK_OPTIONS, defaults={"replicas": 4}, helps=helps)
    _add_seeds(command, 3, "row")
    command.add_argument("--high-lr", type=float, help="default: found, of 3, 9, 27... times the low one")
    command.add_argument("--noise", type=float, default=NOISE, help=f"of the warm initialisation (default: {NOISE})")
    for name, known in (("controllers", CONTROLLERS), ("gradients", GRADIENTS)):
        every = ",".join(known)
        command.add_argument(f"--{name}", type=words, default=known, metavar="A,B", help=f"default: {every}")


def _add_seeds(command: argparse.ArgumentParser, default: int, of: str) -> None:
    text = f"seeds per {of}, from --seed on (default: {default})"
    command.add_argument("--seeds", type=int, default=default, help=text)


def _options_and_seeds(arguments: argparse.Namespace, options: RunOptions) -> tuple[RunOptions, list[int]]:
    if options.checkpoint_every:
        raise OptionError(
            "--checkpoint-every is for `hdet train`; called again, this command continues with the missing runs"
        )
    if arguments.seeds < 1:
        raise OptionError(f"seeds must be at least 1, got {arguments.seeds}")
    return options, [options.seed + k for k in range(arguments.seeds)]


def _sweep(arguments: argparse.Namespace) -> str:
    options, seeds = _options_and_seeds(arguments, options_from(arguments))
    prepare(processes=not arguments.in_process)
    folder = arguments.folder or default_folder(f"sweep-{options.task}")
    with locked(folder):
        result = sweep(
            options, folder, seeds=seeds, ratio=arguments.ratio, most_rates=arguments.most_rates,
            one_process=lambda size: arguments.in_process,
        )  # fmt: skip
    return f"\n{show_sweep(result)}\n\n{_drawn(result, folder)}\nEverything is in {folder}"


def _drawn(result: dict[str, Any], folder: Path) -> str:
    try:
        return f"Picture: {pictures.sweep(result, folder / 'sweep.png')}"
    except LabError as error:
        return f"No picture: {error}"


def _returns(arguments: argparse.Namespace) -> str:
    options, seeds = _options_and_seeds(arguments, options_from(arguments))
    prepare(processes=not arguments.in_process)
    folder = arguments.folder or default_folder(f"returns-{options.task}")
    most = 2 * (os.cpu_count() or 1)
    with locked(folder):
        result = scale_replicas(
            options, folder, sizes=arguments.sizes, seeds=seeds,
            one_process=lambda size: arguments.in_process or size > most,
        )  # fmt: skip
    return f"\n{show_scaling(result)}\n\nEverything is in {folder}"


def _ablate(arguments: argparse.Namespace) -> str:
    options, seeds = _options_and_seeds(arguments, options_from(arguments, TASK_OPTIONS, controller="none"))
    positive("0.1").check("high_lr", arguments.high_lr)
    positive("0.01").check("noise", arguments.noise)
    prepare(processes=not arguments.in_process)
    folder = arguments.folder or default_folder(f"ablate-{options.task}")
    result = ablate(
        options, folder, seeds=seeds, high_lr=arguments.high_lr, noise=arguments.noise,
        controllers=arguments.controllers, gradients=arguments.gradients, one_process=lambda size: arguments.in_process,
    )  # fmt: skip
    return f"\n{show_ablation(result)}\n\nEverything is in {folder}"
