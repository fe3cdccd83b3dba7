"""An option of a run is written down once: the field makes the flag, its help and its check."""

import dataclasses
import re

import pytest

from hdet_lab import cli, option
from hdet_lab.commands import arguments
from hdet_lab.commands.arguments import RUN_OPTIONS, TASK_OPTIONS, Parser, add_options, options_from
from hdet_lab.errors import OptionError
from hdet_lab.options import RunOptions


def parsed(*words, **how):
    parser = Parser(prog="some")
    add_options(parser, **how)
    return options_from(parser.parse_args(words))


def help_of(command, capsys):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    return " ".join(capsys.readouterr().out.split())


def test_without_flags_the_options_are_those_of_the_dataclass():
    assert parsed("text") == RunOptions("text")


def test_a_command_may_have_other_defaults_and_fewer_options():
    assert parsed("text", defaults={"controller": "none", "replicas": 4}) == RunOptions(
        "text", controller="none", replicas=4
    )
    with pytest.raises(OptionError, match=r"unrecognized arguments: --dropout 0\.1; see some --help"):
        parsed("text", "--dropout", "0.1", names=TASK_OPTIONS)


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["--steps", "3", "--data", "a.txt"], {"steps": 3, "data": "a.txt"}),
        (["--peak-lr", "1e-3", "--spread", "0"], {"peak_lr": 1e-3, "spread": 0.0}),
        (["--interval", "7"], {"interval": 7}),
        (["--interval", "auto"], {}),
        (["--per-group"], {"per_group": True}),
        (["--no-per-group"], {"per_group": False}),
        (["--no-average-state", "--gradients", "local"], {"average_state": False, "gradients": "local"}),
        (["--charge", "--controller", "auto"], {"charge": True, "controller": "auto"}),
    ],
)
def test_a_flag_is_read_as_its_type_says(words, given):
    options = parsed("text", *words)
    assert options == RunOptions("text", **given)
    assert all(type(getattr(options, name)) is type(value) for name, value in given.items())


def test_the_help_tells_of_every_option_and_its_default(capsys):
    shown = help_of("train", capsys)
    for name, about in option.options_of(RunOptions).items():
        assert name == "task" or f"--{name.replace('_', '-')}" in shown
        assert " ".join(about.help.split()) in shown
    assert "of the softmax controller (default: 0.1)" in shown
    assert "(default: yes)" in shown
    assert not re.search(r"default: (None|True|False)", shown)
    assert "is the paper's (default: none)" in help_of("sweep", capsys)
    assert "--replicas" not in help_of("returns", capsys)
    assert "the low rate; default: the task's own" in help_of("ablate", capsys)


def test_a_new_option_is_one_field(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class More(RunOptions):
        colour: str = option.option("red", "of the picture", option.one_of(("red", "blue")))

    monkeypatch.setattr(arguments, "RunOptions", More)
    names = (*RUN_OPTIONS, "colour")
    parser = Parser(prog="some")
    add_options(parser, names)
    assert options_from(parser.parse_args(["text", "--colour", "blue"]), names) == More("text", colour="blue")
    assert "--colour COLOUR of the picture (default: red)" in " ".join(parser.format_help().split())
    with pytest.raises(OptionError, match="colour must be one of red, blue, got 'green'"):
        More("text", colour="green")
    assert More.from_json(More("text", colour="blue").to_json()).colour == "blue"
