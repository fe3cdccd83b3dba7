"""The commands `hdet report`, `hdet watch` and `hdet export`. Each takes the folder of a run, or its records."""

from __future__ import annotations

import argparse
import gc
import json
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hdet.json_lines import from_json
from hdet.replay import make_schedule, notices
from hdet.report.run import Run


class ReportError(Exception):
    """What the user can mend, in one line."""


def add_commands(commands: Any) -> None:
    """Add them to a parser's subcommands; `command` of the parsed arguments runs one and returns what to print."""
    text = "one page of what a run did, to be opened anywhere; several runs side by side"
    command = _command(commands, "report", _report, text)
    command.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run folder, or its rounds.jsonl")
    command.add_argument("--output", type=Path, help="where to; default: report.html in the first run's folder")
    command.add_argument(
        "--pictures", action="store_true", help="PNG pictures of the first run, in pictures/ beside it"
    )
    command.add_argument("--round", type=int, help="the round whose line search is shown first; default: the last")

    command = _command(commands, "watch", _watch, "the same page while the runs go on, on this machine only")
    command.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run folder, or its rounds.jsonl")
    command.add_argument("--port", type=int, default=0, help="default: any free one")
    command.add_argument("--open", action="store_true", help="open it in a browser")

    text = "the schedule that a run has learned, for hdet.ReplayLR"
    command = _command(commands, "export", _export, text)
    command.add_argument("run", metavar="RUN", type=Path, help="run folder, or its rounds.jsonl")
    command.add_argument("--output", type=Path, help="where to; default: schedule.json in the run's folder")


def _command(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.set_defaults(command=_clearly(run))
    return command


def _clearly(run: Any) -> Any:
    def ran(arguments: argparse.Namespace) -> str:
        try:
            said: str = run(arguments)
        except (OSError, ValueError, RuntimeError) as error:
            raise ReportError(str(error)) from error
        return said

    return ran


def _report(arguments: argparse.Namespace) -> str:
    from hdet.report.page import write_page  # noqa: PLC0415

    with _without_collector():
        runs = [_read(path, plain=True) for path in arguments.runs]
        output = arguments.output or runs[0].path.with_name("report.html")
        chosen = None if arguments.round is None else _index(runs[0], arguments.round)
        summaries = write_page(runs, output, chosen)
    said = []
    for run, told in zip(runs, summaries, strict=True):
        rows = [f"  {part['title'] + ':':<12}{part['text']}".replace("\n", f"\n{'':14}") for part in told]
        said += [run.name, *rows, ""]
    if arguments.pictures:
        from hdet.report.pictures import draw  # noqa: PLC0415

        drawn = draw(runs[0], output.parent / "pictures", chosen)
        said.append(f"Pictures: {', '.join(str(path) for path in drawn)}")
    return "\n".join([*said, f"Page: {output} ({output.stat().st_size / 1e6:.1f} MB)"])


@contextmanager
def _without_collector() -> Iterator[None]:
    """Rounds are many small objects that stay: looking for cycles among them again and again takes a fifth longer."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _watch(arguments: argparse.Namespace) -> str:
    from hdet.report.watch import Watch  # noqa: PLC0415

    runs = [Run(path) for path in arguments.runs]
    for run in runs:
        if not run.path.parent.is_dir():
            raise ValueError(f"{run.path.parent} is no folder; give the folder of a run, which may be about to begin")
    watch = Watch(runs, arguments.port)
    print(f"Watching {', '.join(run.name for run in runs)} at {watch.url} (Ctrl-C ends it)", flush=True)
    if arguments.open:
        webbrowser.open(watch.url)
    watch.serve()
    return ""


def _export(arguments: argparse.Namespace) -> str:
    run = _read(arguments.run)
    output = arguments.output or run.path.with_name("schedule.json")
    schedule = make_schedule(from_json(line) for line in run.lines)
    if run.result is not None:
        schedule["complete"] = True
    output.write_text(json.dumps(schedule, allow_nan=False) + "\n")
    names = ", ".join(f"{name} ({len(told['places'])} places)" for name, told in schedule["hyperparameters"].items())
    notes = "" if schedule["complete"] else " The run was cut off: its last values are held from there."
    notes += "".join(f"\nNote: {notice}." for notice in notices(schedule))
    said = f"{names}, {schedule['total_steps']} steps.{notes}"
    return f"{said}\nSchedule: {output}\nhdet.ReplayLR(optimizer, {str(output)!r})"


def _read(path: Path, plain: bool = False) -> Run:
    """A run; a plain one, which has losses and no rounds, if it may be."""
    run = Run(path)
    run.refresh()
    if not run.lines and not (plain and run.losses):
        raise ValueError(f"{run.path} holds no round yet; wait for the first one")
    return run


def _index(run: Run, number: int) -> int:
    rounds = [line["round"] for line in run.lines]
    if number not in rounds:
        raise ValueError(f"--round must be one of the rounds of {run.name}, {rounds[0]} to {rounds[-1]}, got {number}")
    return rounds.index(number)
