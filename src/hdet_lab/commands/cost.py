"""The command `hdet plan` and its options. The model behind it is in `cost.py`."""

from __future__ import annotations

import argparse
import math
import os
from typing import Any

from hdet_lab.errors import OptionError
from hdet_lab.quantities import count, part, rate, seconds

_WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}
_NEEDED = ("params", "replicas", "bandwidth", "step_time")


def add_commands(commands: Any) -> None:
    """Add it to a parser's subcommands."""
    text = "predict a run's cost in time, traffic and memory; or with --measure, check the prediction here"
    command: argparse.ArgumentParser = commands.add_parser("plan", help=text, description=text)
    command.set_defaults(command=_plan)
    add = command.add_argument
    add("--params", metavar="COUNT", help="parameters of the model: 7e9, 350M, 7B")
    add("--replicas", type=int, help="how many")
    add("--bandwidth", metavar="RATE", help="of one rank's link, in each direction: 400Gb/s (bits), 50GB/s (bytes)")
    add("--step-time", metavar="TIME", help="of a training step without hdet: 1.2, 350ms")
    add("--interval", type=int, default=1000, help="steps of a round (default: 1000)")
    add("--overhead", metavar="PART", help="also show the smallest interval that costs no more than this: 1%%")
    add("--shard", type=int, default=1, help="ranks that share one replica's model (default: 1)")
    add("--gradients", choices=("shared", "local"), default="shared", help="default: shared")
    add(
        "--average-state", action=argparse.BooleanOptionalAction, help="of the optimizer; default: with local gradients"
    )
    add("--state", type=int, default=2, help="tensors of optimizer state per parameter (default: 2, as Adam)")
    add("--precision", choices=sorted(_WIDTHS), default="fp32", help="of parameters and gradients (default: fp32)")
    add("--outer-step", action="store_true", help="with an outer step: a copy of the parameters")
    add("--outer-momentum", action="store_true", help="with hdet.Nesterov: two copies")
    add("--tail-average", action="store_true", help="with a tail average, as Auto has it: a copy in single precision")
    add("--rollback", action="store_true", help="with a snapshot to go back to")
    add("--probe", type=float, default=0.0, metavar="BATCHES", help="global batches of a probe (default: none)")
    add("--latency", metavar="TIME", default="10us", help="of one hop between ranks (default: 10us, an assumption)")
    add("--copying", metavar="RATE", help="speed of copies into and out of buckets (default: no time)")
    add("--fixed", metavar="TIME", help="time per converge, whatever its size (default: none)")
    add("--measure", action="store_true", help="time real converges on this machine over gloo, and fit the model")
    add("--sizes", default="2,4,8", metavar="N,N", help="replicas to measure with (default: 2,4,8)")


def _plan(arguments: argparse.Namespace) -> str:
    from hdet_lab.cost import Link, RunPlan, show, show_fit  # noqa: PLC0415

    given = [name for name in _NEEDED if getattr(arguments, name) is not None]
    if arguments.measure:
        if given:
            raise OptionError(f"{given[0]} has no effect with --measure; leave it out")
        from hdet_lab.launch import prepare  # noqa: PLC0415
        from hdet_lab.link import measure  # noqa: PLC0415

        sizes = _sizes(arguments.sizes)
        prepare()
        return show_fit(measure(sizes), os.cpu_count() or 1)
    missing = [name for name in _NEEDED if name not in given]
    if missing:
        flags = ", ".join("--" + name.replace("_", "-") for name in missing)
        raise OptionError(
            f"a plan needs {flags} as well; for example --params 7e9 --replicas 64 --bandwidth 400Gb/s --step-time 1.2"
        )
    link = Link(
        rate("bandwidth", arguments.bandwidth),
        seconds("latency", arguments.latency),
        math.inf if arguments.copying is None else rate("copying", arguments.copying),
        0.0 if arguments.fixed is None else seconds("fixed", arguments.fixed),
    )
    if not 0 <= arguments.probe < math.inf:
        raise OptionError(f"probe must be at least 0 global batches, got {arguments.probe}")
    plan = RunPlan(
        count("params", arguments.params), arguments.replicas, seconds("step_time", arguments.step_time),
        arguments.interval, link, shard=arguments.shard, local=arguments.gradients == "local",
        average_state=arguments.average_state, state=arguments.state, width=_WIDTHS[arguments.precision],
        copies=2 if arguments.outer_momentum else int(arguments.outer_step), rollback=arguments.rollback,
        probe=arguments.probe, tail_average=arguments.tail_average,
    )  # fmt: skip
    return show(plan, None if arguments.overhead is None else part("overhead", arguments.overhead))


def _sizes(text: str) -> list[int]:
    try:
        sizes = sorted({int(size) for size in text.split(",")})
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < 2:
        raise OptionError(f"sizes must be numbers of replicas from 2 on, such as 2,4,8; got {text!r}")
    return sizes
