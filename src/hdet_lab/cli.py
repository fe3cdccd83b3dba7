"""The command `hdet`: its parser and its error messages. The commands are in `commands/`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Sequence

from hdet._report.commands import ReportError
from hdet._report.commands import add_commands as add_report_watch_and_export
from hdet.records.terminal import say
from hdet_lab.commands import cost, experiments, training
from hdet_lab.commands.arguments import RUN_OPTIONS, Parser
from hdet_lab.errors import InterruptedRunError, LabError, OptionError, warnings_in_words
from hdet_lab.version import hdet_version


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 1 if it failed, 2 for bad arguments, 130 if it was stopped."""
    arguments = argparse.Namespace()
    try:
        _parser().parse_args(argv, arguments)
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
        say(f"hdet: error: {said(error, vars(arguments))}", sys.stderr)
        return getattr(error, "exit_code", 1)
    except KeyboardInterrupt:
        print("\nhdet: stopped", file=sys.stderr, flush=True)
        return InterruptedRunError.exit_code
    return 0


def said(error: Exception, options: Collection[str] = ()) -> str:
    """The error message, with the name of an option at its start replaced by the command-line flag.

    Args:
        error: the exception.
        options: names of further options, besides those of a run.

    >>> said(OptionError("peak_lr must be positive, got 0.0"))
    '--peak-lr must be positive, got 0.0'
    """
    name, _, rest = str(error).partition(" ")
    is_option = isinstance(error, OptionError) and name != "task" and name in {*RUN_OPTIONS, *options}
    return f"--{name.replace('_', '-')} {rest}" if is_option else str(error)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="hdet", description="Train real tasks with replicas that tune their learning rate.")
    parser.add_argument("--version", action="version", version=f"hdet {hdet_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    training.add_commands(commands)
    experiments.add_commands(commands)
    cost.add_commands(commands)
    add_report_watch_and_export(commands)
    return parser
