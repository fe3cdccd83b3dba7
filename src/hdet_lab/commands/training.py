"""The commands of one run: demo, train, resume and find-lr; and `hdet train` as torchrun starts it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hdet_lab import demo, finder
from hdet_lab.commands.arguments import (
    TASK_OPTIONS,
    Parser,
    add_command,
    add_options,
    options_from,
)
from hdet_lab.errors import FolderError, OptionError
from hdet_lab.folder import (
    LINES,
    default_folder,
    full_result,
    read,
    read_if_good,
    read_options,
    require_empty,
    require_files,
)
from hdet_lab.launch import launch, prepare
from hdet_lab.lock import locked
from hdet_lab.many_runs import run_all
from hdet_lab.summary import summary
from hdet_lab.worker import Job

_TRAIN = {"controller": "auto"}  # the defaults of `hdet train`: the rate is found first, in runs of more than 500 steps


def add_commands(commands: Any) -> None:
    """Add them to a parser's subcommands."""
    text = "rates 10 times too low and too high, with and without hdet; under three minutes"
    command = add_command(commands, "demo", _demo, text)
    text = f"of each of the five runs (default: {demo.STEPS})"
    command.add_argument("--steps", type=int, default=demo.STEPS, help=text)
    command.add_argument("--replicas", type=int, default=demo.REPLICAS, help=f"default: {demo.REPLICAS}")

    add_options(add_command(commands, "train", _train, "one run"), defaults=_TRAIN)

    text = "resume a stopped run from its last checkpoint"
    command = add_command(commands, "resume", _resume, text, is_new=False)
    command.add_argument("--replicas", type=int, help="default: as many as before")

    text = "the learning rate, from a few hundred steps that are undone"
    add_options(add_command(commands, "find-lr", _find_lr, text), TASK_OPTIONS)


def worker_job(argv: Sequence[str] | None, replicas: int) -> Job:
    """The job of one of torchrun's processes, from the arguments of `hdet train`.

    Raises:
        LabError: for invalid arguments or an unusable folder.
    """
    parser = Parser(prog="hdet_lab.train", description="One replica of `hdet train`, to be started by torchrun.")
    add_options(parser, defaults={**_TRAIN, "replicas": replicas})
    parser.add_argument("--folder", type=Path, help="run folder; default: runs/TASK-TIME")
    arguments = parser.parse_args(argv)
    options = options_from(arguments)
    if options.replicas != replicas:
        raise OptionError(f"torchrun has started {replicas} replicas, not {options.replicas}; leave out --replicas")
    if options.checkpoint_every and arguments.folder is None:  # each process would choose another one
        raise OptionError("--checkpoint-every needs --folder under torchrun, for example --folder runs/first")
    folder = arguments.folder or default_folder(options.task)
    restarted = options.checkpoint_every and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if os.environ.get("RANK", "0") == "0" and not restarted:
        require_empty(folder)
    return Job(options, str(folder))


def _demo(arguments: argparse.Namespace) -> str:
    prepare(processes=not arguments.in_process)
    folder = arguments.folder or default_folder("demo")
    with locked(folder):
        return demo.demo(folder, steps=arguments.steps, replicas=arguments.replicas, one_process=arguments.in_process)


def _train(arguments: argparse.Namespace) -> str:
    options = options_from(arguments)
    folder = arguments.folder or default_folder(options.task)
    require_empty(folder)
    prepare(processes=not arguments.in_process)
    options.make_task()
    with locked(folder):
        run_all([Job(options, str(folder))], lambda size: arguments.in_process)
        return summary(options, folder)


def _resume(arguments: argparse.Namespace) -> str:
    folder: Path = arguments.folder
    options = read_options(folder)
    if options is None or not options.checkpoint_every:
        raise FolderError(
            f"{folder} is not a run that saves checkpoints; train with --checkpoint-every, for example 100"
        )
    if arguments.replicas is not None:
        options = options.replace(replicas=arguments.replicas)
    with locked(folder):
        require_files(folder, [*LINES, "start.json", "weights.pt", "losses.png", "fan.png"])
        if read_if_good(folder / "result.json", full_result) is None:
            prepare(processes=not arguments.in_process)
            options.make_task()
            launch([Job(options, str(folder))], one_process=arguments.in_process)
        return summary(options, folder)


def _find_lr(arguments: argparse.Namespace) -> str:
    options = options_from(arguments, controller="none")
    folder = arguments.folder or default_folder(f"find-lr-{options.task}")
    require_empty(folder)
    prepare(processes=not arguments.in_process)
    options.make_task()
    with locked(folder):
        launch([Job(options, str(folder), finds=True)], one_process=arguments.in_process)
    return f"\n{finder.show(read(folder / 'find_lr.json'), folder)}"
