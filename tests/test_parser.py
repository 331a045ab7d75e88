"""How the command line reads: errors, help, talk."""

import logging
import os
import subprocess
import sys

import pytest

from edgespec.cli import command_parser, main
from edgespec.talk import heard, say_problem, say_stage


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("caht", "edgespec: no command 'caht'; did you mean chat?"),
        ("models lits", "edgespec models: no action 'lits'; did you mean list?"),
        (
            "chat --temprature 1",
            "unrecognized arguments: --temprature; did you mean --temperature?",
        ),
        ("chat --schedule pipline", "edgespec chat: no --schedule 'pipline'; did you mean pipelined?"),
        ("models", "edgespec models: the following arguments are required: ACTION"),
    ],
)
def test_mistyped_words_get_the_nearest_one(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert said in error
    assert error.count("\n") == 2


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_help_of_each_command_fits_the_terminal_and_has_examples(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    parser = command_parser()
    assert parser.inner is not None
    for name, command in parser.inner.choices.items():
        told, _, examples = command.format_help().partition("examples:")
        assert name == "help" or f"edgespec {name}" in examples
        assert all(len(line) <= min(columns, 110) for line in told.splitlines() if line.startswith(" "))


def test_help_takes_less_than_0_3_s() -> None:
    """Of the processor, since the clock is that of a machine that others use too."""
    before = os.times()
    done = subprocess.run([sys.executable, "-m", "edgespec", "--help"], capture_output=True, text=True, check=True)
    after = os.times()
    assert "COMMAND" in done.stdout
    assert after.children_user + after.children_system - before.children_user - before.children_system < 0.3


def test_help_is_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for line in (["help", "models", "list"], ["models", "list", "--help"]):
        with pytest.raises(SystemExit) as ended:
            main(line)
        texts.append(capsys.readouterr().out)
        assert ended.value.code == 0
    assert texts[0] == texts[1]


def test_every_command_can_be_quiet_or_verbose() -> None:
    for leaf in command_parser().leaves():
        if leaf.prog not in ("edgespec help", "edgespec completion"):
            assert {"quiet", "verbose", "json"} <= {action.dest for action in leaf._actions}, leaf.prog


@pytest.mark.parametrize(
    ("settings", "said"),
    [({}, ["stage", "wrong"]), ({"quiet": True}, ["wrong"]), ({"verbose": True}, ["stage", "wrong", "[x] why"])],
)
def test_quiet_says_problems_alone_and_verbose_decisions_too(
    settings: dict[str, bool], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with heard(**settings):
        say_stage("stage")
        say_problem("wrong")
        logging.getLogger("edgespec.x").debug("%s", "why")
        logging.getLogger("edgespec.rounds").debug("{}")
    say_problem("heard by nobody")
    assert capsys.readouterr().err.splitlines() == [f"edgespec: {line}" for line in said]
