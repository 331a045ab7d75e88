"""The command that shows and changes the user's configuration."""

import argparse
import json

from edgespec.cli.arguments import print_result
from edgespec.cli.parser import CommandParser
from edgespec.config.options import OPTIONS

_DEFAULT = "default"


def add_config(parser: CommandParser) -> None:
    described = {
        "show": ("print every option, its value and where that comes from (the default action)", _show),
        "path": ("print where the configuration file is", _path),
        "set": ("set an option in the file", _change),
        "unset": ("remove an option from the file, so that its default holds", _change),
    }
    for name, (what, run) in described.items():
        action = parser.add_command(name, what)
        action.set_defaults(run=run, value=None)
        if name in ("set", "unset"):
            action.add_argument("key", metavar="KEY", choices=list(OPTIONS), help=f"one of: {', '.join(OPTIONS)}")
        if name == "set":
            action.add_argument("value", metavar="VALUE", help="text, number, true or false")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=_show, quiet=False, verbose=False, command="config")
    assert parser.commands is not None
    parser.commands.required = False


def _show(options: argparse.Namespace) -> None:
    from edgespec.config.config_file import Setting, config_path, default_home, read_settings

    found = {"home": Setting(str(default_home()), _DEFAULT)} | read_settings()
    settings = {name: found.get(name, Setting(option.default, _DEFAULT)) for name, option in OPTIONS.items()}
    settings |= {
        name: each._replace(value="…") for name, each in settings.items() if OPTIONS[name].is_secret and each.value
    }
    values = {
        name: "" if each.value is None else json.dumps(each.value, ensure_ascii=False)
        for name, each in settings.items()
    }
    widths = max(map(len, values)), max(map(len, values.values()))
    print_result(
        options,
        {"path": str(config_path()), "options": {name: each._asdict() for name, each in settings.items()}},
        *(f"{name:<{widths[0]}}  {text:<{widths[1]}}  {settings[name].origin}" for name, text in values.items()),
    )


def _path(options: argparse.Namespace) -> None:
    from edgespec.config.config_file import config_path

    path = config_path()
    print_result(options, {"path": str(path), "exists": path.exists()}, path)


def _change(options: argparse.Namespace) -> None:
    from edgespec.config.config_file import config_path, set_option

    path = config_path()
    value = set_option(path, options.key, options.value)
    text = f"{options.key} is {'not set' if value is None else json.dumps(value)} in {path}"
    print_result(options, {"path": str(path), options.key: value}, text)
