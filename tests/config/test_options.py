"""One table of options for the command line, `load` and the documents."""

import argparse
import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

import edgespec.engine.load
from edgespec.cli.arguments import load_any_engine
from edgespec.cli.main import command_parser
from edgespec.config.config_file import variable_name
from edgespec.config.options import LOAD_PARAMETERS, OPTIONS
from edgespec.setup.wish import Wish

DOCS = Path(__file__).parents[2] / "docs"
PARAMETERS = inspect.signature(edgespec.engine.load.load).parameters


def test_options_have_the_parameters_and_defaults_of_load() -> None:
    of_programs = {"model", "answer_cache", "usage", "report", "progress"}
    assert PARAMETERS.keys() - {*LOAD_PARAMETERS.values()} == of_programs
    assert {name: OPTIONS[name].default for name in LOAD_PARAMETERS} == {
        name: PARAMETERS[parameter].default for name, parameter in LOAD_PARAMETERS.items()
    }


def test_a_wish_has_the_arguments_of_load_and_their_defaults() -> None:
    options = {option.name: option.default for option in dataclasses.fields(Wish)}
    assert options.keys() == PARAMETERS.keys()
    stated = {name: each.default for name, each in PARAMETERS.items()}
    assert options == stated | {"model": dataclasses.MISSING}


@pytest.mark.parametrize(
    ("command", "num_given"), [("chat", 21), ("bench", 20), ("serve", 21), ("score --file f", 10)]
)
def test_every_flag_of_a_command_reaches_load(
    command: str, num_given: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("edgespec.setup.wish.Wish", lambda **arguments: given.update(arguments))
    monkeypatch.setattr(edgespec.engine.load, "open_wish", lambda wish, stated: None)
    options = command_parser().parse_args([*command.split(), "m", "--threads", "3", "--allow-fallback"])
    load_any_engine(options)
    assert (given["model"], given["num_threads"], given["allow_fallback"], len(given)) == ("m", 3, True, num_given)
    load_any_engine(argparse.Namespace(**{**vars(options), "model": "other"}), answer_cache=True)
    assert (given["model"], given["answer_cache"]) == ("other", True)


def test_api_page_has_every_argument_of_load() -> None:
    (table,) = re.findall(r"^\| argument \|.*\n\|[-|]+\n((?:\|.*\n)+)", (DOCS / "api.md").read_text("utf-8"), re.M)
    named = [name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(PARAMETERS)


def options_table() -> str:
    """The table of docs/configuration.md."""
    rows = ["| option | default | variable | meaning |", "|---|---|---|---|"]
    for name, option in OPTIONS.items():
        default = "" if option.default is None else f"`{json.dumps(option.default)}`"
        variable = f"`{variable_name(name)}`" if option.in_environment else ""
        rows.append(f"| `{name}` | {default} | {variable} | {option.help} |")
    return "\n".join(rows)


def test_configuration_page_has_the_table_of_options() -> None:
    page = (DOCS / "configuration.md").read_text("utf-8")
    assert [row for row in options_table().splitlines() if row not in page.splitlines()] == []
    assert options_table() in page
