"""The command line's arguments: the parser, and the flags for the options of a run."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from hdet_lab.errors import OptionError
from hdet_lab.option import REQUIRED, options_of
from hdet_lab.options import RunOptions

RUN_OPTIONS = tuple(options_of(RunOptions))
TASK_OPTIONS = tuple(name for name, about in options_of(RunOptions).items() if about.group == "task")
"""Options for commands that choose the controller themselves."""


class Parser(argparse.ArgumentParser):
    """A parser that raises OptionError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(f"{message}; see {self.prog} --help")


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], str], text: str, *, is_new: bool = True
) -> argparse.ArgumentParser:
    """Add a subcommand that trains; its parsed arguments hold `run` as `command`.

    Args:
        commands: the subparsers to add it to.
        name: what the user types.
        run: runs the command and returns the text to print at the end.
        text: the description for `--help`.
        is_new: False if it continues a run in its folder.
    """
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.set_defaults(command=run)
    command.add_argument("--in-process", action="store_true", help="make the replicas threads of one process")
    if is_new:
        command.add_argument("--folder", type=Path, help="run folder; default: runs/NAME-TIME")
    else:
        command.add_argument("folder", type=Path, metavar="RUN", help="the folder of a run with --checkpoint-every")
    return command


def add_options(
    parser: argparse.ArgumentParser,
    names: tuple[str, ...] = RUN_OPTIONS,
    *,
    defaults: Mapping[str, Any] | None = None,
    helps: Mapping[str, str] | None = None,
) -> None:
    """Add flags for options of a run. Flags that are not given are absent from the parsed arguments.

    Args:
        parser: the parser to add them to.
        names: the options.
        defaults: this command's defaults where they differ from `RunOptions`.
        helps: this command's help lines where they differ.
    """
    kinds = get_type_hints(RunOptions)
    own = {field.name: field.default for field in dataclasses.fields(RunOptions)}
    for name in names:
        about = options_of(RunOptions)[name]
        help_line = (helps or {}).get(name, about.help)
        if own[name] is REQUIRED:
            parser.add_argument(name, metavar=name.upper(), help=help_line)
            continue
        default = (defaults or {}).get(name, own[name])
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            help=f"{help_line}{_told(default)}".replace("%", "%%"),
            default=default if name in (defaults or {}) else argparse.SUPPRESS,
            **_reading(kinds[name], default, about.metavar),
        )


def options_from(arguments: argparse.Namespace, names: tuple[str, ...] = RUN_OPTIONS, **changes: Any) -> RunOptions:
    """The options of a run that the parsed arguments hold, with some changes."""
    given = {name: value for name, value in vars(arguments).items() if name in names}
    return RunOptions(**{**given, **changes})


def _told(default: object) -> str:
    """The default for the help; empty if it is not informative."""
    if default is None or default is False or default == "":
        return ""
    return f" (default: {'yes' if default is True else default})"


def _reading(kind: Any, default: object, metavar: str | None) -> dict[str, Any]:
    """The arguments of `add_argument` that read a value of this type."""
    parts = get_args(kind) or (kind,)
    if bool in parts:
        return {"action": "store_true" if default is False else argparse.BooleanOptionalAction}
    words = [word for part in parts if get_origin(part) is Literal for word in get_args(part)]
    if words:
        return {"type": _whole_or(*words), "metavar": metavar}
    return {"type": next((part for part in (int, float) if part in parts), str), "metavar": metavar}


def _whole_or(word: str) -> Callable[[str], int | str]:
    def read(text: str) -> int | str:
        try:
            return text if text == word else int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number or {word}, got {text!r}") from None

    return read


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers separated by commas.

    Raises:
        argparse.ArgumentTypeError: for anything else.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be whole numbers such as 2,4,8; got {text!r}") from None


def words(text: str) -> tuple[str, ...]:
    """Words separated by commas."""
    return tuple(text.split(","))
