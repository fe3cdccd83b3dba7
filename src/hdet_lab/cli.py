"""The command `hdet`: demo, train, resume, find-lr, sweep, returns, ablate, plan; report, watch, export."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from hdet.report.commands import ReportError, add_commands
from hdet.terminal import say
from hdet_lab.commands.cost import OPTIONS as PLAN_OPTIONS
from hdet_lab.commands.cost import add_command as add_plan
from hdet_lab.errors import FolderError, InterruptedRunError, LabError, OptionError, warnings_in_words
from hdet_lab.folder import (
    LINES,
    default_folder,
    full_result,
    hdet_version,
    read,
    read_if_good,
    read_options,
    require_empty,
    require_files,
)
from hdet_lab.lock import locked
from hdet_lab.options import CONTROLLERS, EXPLORABLE, OPTIMIZERS, SIZES, RunOptions
from hdet_lab.tasks import TASKS
from hdet_lab.worker import Job


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code: 0, 1 if it failed, 2 for bad arguments, 130 if it was stopped."""
    try:
        arguments = _parser().parse_args(argv)
        with warnings_in_words():
            text: str = arguments.command(arguments)
        say(text)
    except InterruptedRunError as error:
        say(f"\nhdet: {error}", sys.stderr)
        if error.threads:
            sys.stdout.flush()
            os._exit(error.exit_code)
        return error.exit_code
    except (LabError, ReportError) as error:
        say(f"hdet: error: {said(error)}", sys.stderr)
        return getattr(error, "exit_code", 1)
    except KeyboardInterrupt:
        print("\nhdet: stopped", file=sys.stderr, flush=True)
        return InterruptedRunError.exit_code
    return 0


def said(error: Exception) -> str:
    """The message, with the name of an option at its beginning as the flag that the user writes.

    >>> said(OptionError("peak_lr must be positive, got 0.0"))
    '--peak-lr must be positive, got 0.0'
    """
    name, _, rest = str(error).partition(" ")
    more = {"seeds", "ratio", "most_rates", "sizes", "high_lr", "noise", "controllers"}
    names = {*RunOptions.__dataclass_fields__, *PLAN_OPTIONS, *more} - {"task"}
    flag = isinstance(error, OptionError) and name in names
    return f"--{name.replace('_', '-')} {rest}" if flag else str(error)


def worker_job(argv: Sequence[str] | None, replicas: int) -> Job:
    """What one of torchrun's processes has to do, from the arguments of `hdet train`.

    Raises:
        LabError: for arguments or a folder that cannot work.
    """
    parser = _Parser(prog="hdet_lab.train", description="One replica of `hdet train`, to be started by torchrun.")
    _add_run_options(parser, replicas)
    parser.add_argument("--folder", type=Path, help="run folder; default: runs/TASK-TIME")
    arguments = parser.parse_args(argv)
    options = _options(arguments)
    if options.replicas != replicas:
        raise OptionError(f"torchrun has started {replicas} replicas, not {options.replicas}; leave out --replicas")
    if (
        options.checkpoint_every and arguments.folder is None
    ):  # each process would choose another one, after a restart too
        raise OptionError("--checkpoint-every needs --folder under torchrun, for example --folder runs/first")
    folder = arguments.folder or default_folder(options.task)
    restarted = options.checkpoint_every and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if os.environ.get("RANK", "0") == "0" and not restarted:
        require_empty(folder)
    return Job(options, str(folder))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="hdet", description="Train real tasks with replicas that tune their learning rate.")
    parser.add_argument("--version", action="version", version=f"hdet {hdet_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    command = _command(commands, "demo", _demo, "a rate 10 times too low, with and without hdet; under three minutes")
    command.add_argument("--steps", type=int, help="of each of the three runs")
    command.add_argument("--replicas", type=int, default=4)

    command = _command(commands, "train", _train, "one run")
    _add_run_options(command, 2)

    text = "go on with a run that was stopped, from its last checkpoint"
    command = commands.add_parser("resume", help=text, description=text)
    command.set_defaults(command=_resume)
    command.add_argument("folder", type=Path, metavar="RUN", help="the folder of a run with --checkpoint-every")
    command.add_argument("--replicas", type=int, help="default: as many as before")
    command.add_argument("--in-process", action="store_true", help="make the replicas threads of one process")

    command = _command(commands, "find-lr", _find_lr, "the learning rate, from a few hundred steps that are undone")
    _add_task_options(command, 2)

    command = _command(commands, "sweep", _sweep, "the plain schedule over a grid of learning rates")
    _add_run_options(command, 2, controller="none")
    command.add_argument("--seeds", type=int, default=3, help="seeds per rate, from --seed on (default: 3)")
    command.add_argument("--ratio", type=float, default=2.0, help="of neighbouring rates (default: 2)")
    command.add_argument("--most-rates", type=int, default=15, help="when to give up widening the grid (default: 15)")

    command = _command(commands, "returns", _returns, "the same run with 2, 4, 8 and 16 replicas")
    _add_run_options(command, None)
    command.add_argument("--seeds", type=int, default=1, help="seeds per row, from --seed on (default: 1)")
    command.add_argument("--sizes", type=_counts, default=(2, 4, 8, 16), metavar="N,N", help="default: 2,4,8,16")
    command = _command(
        commands, "ablate", _ablate, "the paper's ablation, at a rate at which plain training breaks down"
    )
    _add_task_options(command, 4, peak_lr="the low rate; default: the task's own")
    command.add_argument("--seeds", type=int, default=3, help="seeds per row, from --seed on (default: 3)")
    command.add_argument("--high-lr", type=float, help="default: found, of 3, 9, 27... times the low one")
    command.add_argument("--noise", type=float, default=0.01, help="of the warm initialisation (default: 0.01)")
    command.add_argument("--controllers", type=_names, default=("softmax", "auto"), metavar="A,B")
    command.add_argument("--gradients", type=_names, default=("shared", "local"), metavar="A,B")
    add_plan(commands)
    add_commands(commands)
    return parser


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], str], text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.set_defaults(command=run)
    command.add_argument("--folder", type=Path, help="run folder; default: runs/NAME-TIME")
    command.add_argument("--in-process", action="store_true", help="make the replicas threads of one process")
    return command


def _add_task_options(
    parser: argparse.ArgumentParser, replicas: int | None, peak_lr: str = "peak of OneCycleLR; default: the task's own"
) -> None:
    add = parser.add_argument
    add("task", metavar="TASK", help=", ".join(sorted(TASKS)))
    if replicas is not None:
        add("--replicas", type=int, default=replicas, help=f"default: {replicas}")
    add("--size", default="standard", help=f"{', '.join(SIZES)} (default: standard)")
    add("--steps", type=int, help="optimizer steps, if not those of the size")
    add("--seed", type=int, default=0)
    add("--data", help="a file to use in place of the task's own data")
    add("--optimizer", default="adamw", help=f"{' or '.join(OPTIMIZERS)} (default: adamw)")
    add("--peak-lr", type=float, help=peak_lr)


def _add_run_options(parser: argparse.ArgumentParser, replicas: int | None, controller: str = "softmax") -> None:
    _add_task_options(parser, replicas)
    add = parser.add_argument
    add("--controller", default=controller, help=f"{', '.join(CONTROLLERS)} (default: {controller}; none is plain)")
    add("--temperature", type=float, default=0.1, help="of the softmax controller (default: 0.1)")
    add("--warmup-steps", type=int, help="before the controller moves anything; default: a third of the run")
    add("--spread", type=float, help="of the learning rate: 0.1 tries 0.9 to 1.1 times, 2 about 1/2 to 2 times")
    add("--explore", default="", metavar="NAME=SPREAD,...", help=f"what to explore: {', '.join(EXPLORABLE)}")
    add("--gradients", default="shared", help="shared, or local: replicas train on their own between converges")
    add("--outer-step", type=float, help="how much of a round's way is taken at converge (0 to 1)")
    add("--outer-momentum", type=float, help="of the outer step, for long rounds of local gradients (0.9 in DiLoCo)")
    add("--tail-average", type=float, metavar="PART", help="of the run, at its end, whose round ends are averaged")
    add("--average-state", action=argparse.BooleanOptionalAction, default=True, help="of the optimizer; default: yes")
    add("--weight-decay", type=float, help="of the dense parameters; default: the task's own")
    add("--dropout", type=float, default=0.0)
    add("--label-smoothing", type=float, default=0.0)
    add("--charge", action="store_true", help="shorten the run by what probe and finder cost")
    add("--interval", type=_interval, default="auto", help="steps per round, or auto: a 200th of the run")
    add("--checkpoint-every", type=int, metavar="STEPS", help="save the run; `hdet resume RUN` goes on with it")
    add("--evaluate-every", type=int, metavar="STEPS", help="the held-out loss while it trains, in held_out.jsonl")
    add("--start", metavar="RUN", help="begin with the weights of this run's folder")
    add("--warm-noise", type=float, default=0.0, help="each replica's own noise on them, relative to their size")
    add("--per-group", action=argparse.BooleanOptionalAction, help="explore each parameter group; default: flights")


def _options(arguments: argparse.Namespace) -> RunOptions:
    names = RunOptions.__dataclass_fields__
    return RunOptions(**{name: value for name, value in vars(arguments).items() if name in names})


def _interval(text: str) -> int | Literal["auto"]:
    try:
        return "auto" if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number or auto, got {text!r}") from None


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be whole numbers such as 2,4,8; got {text!r}") from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _seeds(arguments: argparse.Namespace) -> list[int]:
    if arguments.seeds < 1:
        raise OptionError(f"seeds must be at least 1, got {arguments.seeds}")
    return [arguments.seed + k for k in range(arguments.seeds)]


def _demo(arguments: argparse.Namespace) -> str:
    from hdet_lab.demo import STEPS, demo  # noqa: PLC0415

    _prepare(arguments)
    folder = arguments.folder or default_folder("demo")
    steps = STEPS if arguments.steps is None else arguments.steps
    with locked(folder):
        return demo(folder, steps=steps, replicas=arguments.replicas, one_process=arguments.in_process)


def _train(arguments: argparse.Namespace) -> str:
    from hdet_lab.many_runs import run_all  # noqa: PLC0415
    from hdet_lab.summary import summary  # noqa: PLC0415

    options = _options(arguments)
    folder = arguments.folder or default_folder(options.task)
    require_empty(folder)
    _prepare(arguments)
    options.make_task()
    with locked(folder):
        run_all([Job(options, str(folder))], lambda size: arguments.in_process)
        return summary(options, folder)


def _resume(arguments: argparse.Namespace) -> str:
    from hdet_lab.launch import launch  # noqa: PLC0415
    from hdet_lab.summary import summary  # noqa: PLC0415

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
            _prepare(arguments)
            options.make_task()
            launch([Job(options, str(folder))], one_process=arguments.in_process)
        return summary(options, folder)


def _find_lr(arguments: argparse.Namespace) -> str:
    from hdet_lab import finder  # noqa: PLC0415
    from hdet_lab.launch import launch  # noqa: PLC0415

    arguments.controller = "none"
    options = _options(arguments)
    folder = arguments.folder or default_folder(f"find-lr-{options.task}")
    require_empty(folder)
    _prepare(arguments)
    options.make_task()
    with locked(folder):
        launch([Job(options, str(folder), finds=True)], one_process=arguments.in_process)
    return f"\n{finder.show(read(folder / 'find_lr.json'), folder)}"


def _several(arguments: argparse.Namespace) -> tuple[RunOptions, list[int]]:
    """The options of many runs, and their seeds."""
    options = _options(arguments)
    if options.checkpoint_every:
        raise OptionError(
            "--checkpoint-every is for `hdet train`; called again, this goes on with the runs that are missing"
        )
    return options, _seeds(arguments)


def _sweep(arguments: argparse.Namespace) -> str:
    from hdet_lab import pictures, sweep  # noqa: PLC0415

    options, seeds = _several(arguments)
    _prepare(arguments)
    folder = arguments.folder or default_folder(f"sweep-{options.task}")
    with locked(folder):
        result = sweep.sweep(
            options, folder, seeds=seeds, ratio=arguments.ratio, most_rates=arguments.most_rates,
            one_process=lambda size: arguments.in_process,
        )  # fmt: skip
    try:
        drawn = f"Picture: {pictures.sweep(result, folder / 'sweep.png')}"
    except LabError as error:
        drawn = f"No picture: {error}"
    return f"\n{sweep.show(result)}\n\n{drawn}\nEverything is in {folder}"


def _returns(arguments: argparse.Namespace) -> str:
    from hdet_lab import replica_scaling  # noqa: PLC0415

    options, seeds = _several(arguments)
    _prepare(arguments)
    folder = arguments.folder or default_folder(f"returns-{options.task}")
    most = 2 * (os.cpu_count() or 1)
    with locked(folder):
        result = replica_scaling.returns(
            options, folder, sizes=arguments.sizes, seeds=seeds,
            one_process=lambda size: arguments.in_process or size > most,
        )  # fmt: skip
    return f"\n{replica_scaling.show(result)}\n\nEverything is in {folder}"


def _ablate(arguments: argparse.Namespace) -> str:
    from hdet_lab import ablate  # noqa: PLC0415

    kinds = {"controllers": arguments.controllers, "gradients": arguments.gradients}
    del arguments.gradients
    arguments.controller = "none"
    options, seeds = _options(arguments), _seeds(arguments)
    _check_positive("high_lr", arguments.high_lr)
    _check_positive("noise", arguments.noise)
    _prepare(arguments)
    folder = arguments.folder or default_folder(f"ablate-{options.task}")
    result = ablate.ablate(
        options, folder, seeds=seeds, high_lr=arguments.high_lr, noise=arguments.noise, **kinds,
        one_process=lambda size: arguments.in_process,
    )  # fmt: skip
    return f"\n{ablate.show(result)}\n\nEverything is in {folder}"


def _check_positive(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise OptionError(f"{name} must be positive, got {value!r}")


def _prepare(arguments: argparse.Namespace) -> None:
    from hdet_lab.launch import prepare  # noqa: PLC0415

    prepare(processes=not arguments.in_process)
