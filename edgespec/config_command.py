"""The command that shows and changes what a user has set for good."""

import argparse
import json

from edgespec.options import OPTIONS

_DEFAULT = "default"


def add_config(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION")
    show = actions.add_parser("show", help="every option, its value and where that comes from (as without ACTION)")
    place = actions.add_parser("path", help="where the file is")
    put = actions.add_parser("set", help="set an option in the file")
    unset = actions.add_parser("unset", help="leave an option to its default")
    for action in (put, unset):
        action.add_argument("key", metavar="KEY", choices=list(OPTIONS), help=f"one of: {', '.join(OPTIONS)}")
    put.add_argument("value", metavar="VALUE", help="text, number, true or false")
    runs = {show: _show, place: _path, put: _set, unset: _unset}
    for action, run in runs.items():
        action.add_argument("--json", action="store_true", help="print one document")
        action.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print one document")
    parser.set_defaults(run=_show, quiet=False, verbose=False, command="config")


def _show(options: argparse.Namespace) -> int:
    from edgespec.config import Setting, config_path, settings
    from edgespec.home import default_home

    found = {"home": Setting(str(default_home()), _DEFAULT)} | settings()
    all_of = {name: found.get(name, Setting(option.default, _DEFAULT)) for name, option in OPTIONS.items()}
    if options.json:
        shown = {name: {"value": each.value, "origin": each.origin} for name, each in all_of.items()}
        print(json.dumps({"path": str(config_path()), "options": shown}))
        return 0
    values = {name: "" if each.value is None else json.dumps(each.value) for name, each in all_of.items()}
    name_width, value_width = max(map(len, values)), max(map(len, values.values()))
    for name, value in values.items():
        print(f"{name:<{name_width}}  {value:<{value_width}}  {all_of[name].origin}")
    return 0


def _path(options: argparse.Namespace) -> int:
    from edgespec.config import config_path

    path = config_path()
    print(json.dumps({"path": str(path), "exists": path.exists()}) if options.json else path)
    return 0


def _set(options: argparse.Namespace) -> int:
    from edgespec.config import config_path, put

    path = config_path()
    value = put(path, options.key, options.value)
    print(
        json.dumps({"path": str(path), options.key: value})
        if options.json
        else f"{options.key} is {json.dumps(value)} in {path}"
    )
    return 0


def _unset(options: argparse.Namespace) -> int:
    from edgespec.config import config_path, drop

    path = config_path()
    drop(path, options.key)
    print(
        json.dumps({"path": str(path), options.key: None})
        if options.json
        else f"{options.key} is not set in {path}"
    )
    return 0
