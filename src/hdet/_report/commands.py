"""The commands `hdet report`, `hdet watch` and `hdet export`. Each takes the folder of a run, or its records."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import stat
import sys
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hdet._report.run import Run
from hdet.records.json_lines import from_json
from hdet.records.reading import why
from hdet.records.replay import make_schedule
from hdet.records.schedule import check_schedule, notices, reaches_the_end
from hdet.records.terminal import say


class ReportError(Exception):
    """An error that the user can fix, in one line."""


def add_commands(commands: Any) -> None:
    """Add them to a parser's subcommands; `command` of the parsed arguments runs one and returns what to print."""
    text = "one page about a run, to be opened anywhere; several runs side by side"
    command = _command(commands, "report", _report, text)
    command.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run folder, or its rounds.jsonl")
    command.add_argument("--output", type=Path, help="where to; default: report.html in the first run's folder")
    command.add_argument(
        "--pictures", action="store_true", help="PNG pictures of the first run, in pictures/ beside it"
    )
    command.add_argument("--round", type=int, help="the round whose line search is shown first; default: the last")

    command = _command(commands, "watch", _watch, "the same page while the runs go on, on this machine only")
    command.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run folder, or its rounds.jsonl")
    command.add_argument("--port", type=_port, default=0, help="default: any free one")
    command.add_argument("--open", action="store_true", help="open it in a browser")

    text = "the schedule that a run has learned, for hdet.records.ReplayLR"
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
        except (OSError, ValueError, RuntimeError, ArithmeticError) as error:
            raise ReportError(str(error)) from error
        return said

    return ran


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 6 and int(text) < 1 << 16):
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 65535, got {text!r}")
    return int(text)


def _report(arguments: argparse.Namespace) -> str:
    from hdet._report.page import write_page  # noqa: PLC0415

    with _without_collector():
        runs = [_read(path, plain=True) for path in arguments.runs]
        output = arguments.output or _own(runs[0].path.with_name("report.html"))
        chosen = None if arguments.round is None else _index(runs[0], arguments.round)
        summaries = write_page(runs, output, chosen)
    said = []
    for run, told in zip(runs, summaries, strict=True):
        rows = [f"  {part['title'] + ':':<12}{part['text']}".replace("\n", f"\n{'':14}") for part in told]
        said += [run.name, *rows, ""]
    if arguments.pictures:
        from hdet._report.pictures import draw  # noqa: PLC0415

        drawn = draw(runs[0], output.parent / "pictures", chosen)
        said.append(f"Pictures: {', '.join(str(path) for path in drawn)}")
    return "\n".join([*said, f"Page: {output} ({output.stat().st_size / 1e6:.1f} MB)"])


@contextmanager
def _without_collector() -> Iterator[None]:
    """Pause the garbage collector: rounds are many small permanent objects, and scanning them takes a fifth longer."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _watch(arguments: argparse.Namespace) -> str:
    from hdet._report.watch import Watch  # noqa: PLC0415

    runs = [Run(path) for path in arguments.runs]
    for run in runs:
        if not run.path.parent.is_dir():
            raise ValueError(f"{run.path.parent} is no folder; give the folder of a run, which may be about to begin")
    try:
        watch = Watch(runs, arguments.port)
    except OSError as error:
        raise ValueError(f"port {arguments.port} cannot be used: {why(error)}") from error
    say(f"Watching {', '.join(run.name for run in runs)} at {watch.url} (Ctrl-C ends it)")
    if arguments.open:
        webbrowser.open(watch.url)
    watch.serve()
    return ""


def _export(arguments: argparse.Namespace) -> str:
    run = _read(arguments.run)
    output = arguments.output or _own(run.path.with_name("schedule.json"))
    schedule = make_schedule(from_json(line) for line in run.lines)
    if run.result is not None and reaches_the_end(schedule["hyperparameters"], schedule["total_steps"]):
        schedule["complete"] = True
    check_schedule(schedule)
    output.write_text(json.dumps(schedule, allow_nan=False) + "\n")
    names = ", ".join(f"{name} ({len(told['places'])} places)" for name, told in schedule["hyperparameters"].items())
    notes = "" if schedule["complete"] else " The run was cut off: its last values are held from there."
    notes += "".join(f"\nNote: {notice}." for notice in notices(schedule))
    said = f"{names}, {schedule['total_steps']} steps.{notes}"
    return f"{said}\nSchedule: {output}\nhdet.records.ReplayLR(optimizer, {str(output)!r})"


def _read(path: Path, plain: bool = False) -> Run:
    """Read a run; with `plain`, also one with losses but no rounds, or only a search."""
    run = Run(path)
    run.refresh()
    if not run.lines and not (plain and (run.losses or run.search)):
        wait = f"{run.path} holds no round yet; wait for the first one"
        raise ValueError("; ".join(run.notices) or wait)
    for notice in run.notices:
        say(f"hdet: warning: {notice}", sys.stderr)
    return run


def _own(path: Path) -> Path:
    """Check a file in a run's folder before writing: an existing entry may be a link or a pipe."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise ValueError(f"{path} is there and is no plain file; remove it, or choose another one with --output")
    return path


def _index(run: Run, number: int) -> int:
    rounds = [line["round"] for line in run.lines]
    if number not in rounds:
        raise ValueError(f"--round must be one of the rounds of {run.name}, {rounds[0]} to {rounds[-1]}, got {number}")
    return rounds.index(number)
