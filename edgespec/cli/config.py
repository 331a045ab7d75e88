"""The command that shows and changes the user's configuration."""

import argparse
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import edgespec
from edgespec import UsageError
from edgespec.cli.arguments import add_actions, attribute_name, checked_name, print_result
from edgespec.cli.parser import CommandParser
from edgespec.config.config_file import (
    COMMENT,
    Setting,
    config_path,
    default_home,
    parse_value,
    read_environment,
    read_what_is_valid,
    reset_file,
    set_option,
)
from edgespec.config.options import LOAD_PARAMETERS, OPTIONS, SAMPLING_OPTIONS
from edgespec.system.command_line import split_words
from edgespec.system.console import info, warn
from edgespec.system.disk import replace_file
from edgespec.system.tables import read_table

_DEFAULT = "default"


def add_config(parser: CommandParser) -> None:
    runs = {
        "show": _show,
        "get": _get,
        "path": _path,
        "set": _change,
        "unset": _change,
        "edit": _edit,
        "reset": _reset,
    }
    actions = add_actions(parser, read_table(__file__, "config.toml"), runs)
    for name in ("get", "set", "unset"):
        choices = list(OPTIONS) if name != "unset" else None  # a line of the file may be of no option
        names = f"one of: {', '.join(OPTIONS)}"
        actions[name].add_argument("key", metavar="KEY", type=_option_name, choices=choices, help=names)
    actions["set"].add_argument("value", metavar="VALUE", help="text, number, true or false")
    actions["unset"].set_defaults(value=None)
    parser.default_command = "show"


def _option_name(word: str) -> str:
    """An option's name, which /set of the chat spells with underscores."""
    return name if (name := word.replace("_", "-")) in OPTIONS else word


def _read(path: Path) -> tuple[dict[str, Setting], list[str]]:
    """Every option as it is set, without secrets, and what is wrong with the file."""
    in_file, problems = read_what_is_valid(path)
    home = str(default_home()) if not problems else in_file.get("home", Setting("", _DEFAULT)).value
    found = {"home": Setting(home, _DEFAULT)} | in_file | read_environment(os.environ)
    settings = {name: found.get(name, Setting(option.default, _DEFAULT)) for name, option in OPTIONS.items()}
    settings |= {
        name: each._replace(value="…") for name, each in settings.items() if OPTIONS[name].is_secret and each.value
    }
    return settings, problems


def _get(options: argparse.Namespace) -> int:
    settings, problems = _read(config_path())
    setting = settings[options.key]
    if setting.value is None and not options.json:
        info(f"{options.key} is not set: {OPTIONS[options.key].help}")
    else:
        text = setting.value if isinstance(setting.value, str) else json.dumps(setting.value)
        print_result(options, {options.key: setting.value}, text)
    return _tell_of(problems)


def _show(options: argparse.Namespace) -> int:
    path = config_path()
    settings, problems = _read(path)
    values = {
        name: "" if each.value is None else json.dumps(each.value, ensure_ascii=False)
        for name, each in settings.items()
    }
    widths = max(map(len, values)), max(map(len, values.values()))
    print_result(
        options,
        {
            "path": str(path),
            "problems": problems,
            "options": {name: each._asdict() for name, each in settings.items()},
        },
        *(f"{name:<{widths[0]}}  {text:<{widths[1]}}  {settings[name].origin}" for name, text in values.items()),
    )
    return _tell_of(problems)


def _tell_of(problems: list[str]) -> int:
    """Say what is wrong with the configuration file; the exit code."""
    for problem in problems:
        warn(problem)
    if problems:
        info("other commands stop at such lines; edgespec config edit opens the file")
    return UsageError.exit_code if problems else 0


def _path(options: argparse.Namespace) -> None:
    path = config_path()
    print_result(options, {"path": str(path), "exists": path.exists()}, path)


def _change(options: argparse.Namespace) -> None:
    path = config_path()
    text = None if options.value is None else checked_name(options.key, options.value)
    if text is not None and options.key != "home":  # of which "" is the default
        _require_usable(options.key, parse_value(options.key, text, "config set"))
    value = set_option(path, options.key, text)
    if value is not None and OPTIONS[options.key].is_secret:
        value = "…"
    text = f"{options.key} is {'not set' if value is None else json.dumps(value, ensure_ascii=False)} in {path}"
    print_result(options, {"path": str(path), options.key: value}, text)


def _require_usable(key: str, value: Any) -> None:
    """Raises UsageError: Every command that takes the option would refuse its value."""
    from edgespec.cli.serve import require_bounds

    named = {attribute_name(key): value}
    require_bounds(argparse.Namespace(**{attribute_name(n): each.default for n, each in OPTIONS.items()} | named))
    if key in SAMPLING_OPTIONS:
        edgespec.SamplingParams(**named)
    if key in LOAD_PARAMETERS:
        edgespec.Wish(model="", **{LOAD_PARAMETERS[key]: value})


def _edit(options: argparse.Namespace) -> int:
    path = config_path()
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or ("notepad" if os.name == "nt" else "vi")
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, COMMENT.encode())
        words = [editor] if os.path.isfile(editor) else split_words(editor)
        subprocess.run([*words, str(path)], check=True)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        code = getattr(error, "returncode", None)
        reason = getattr(error, "strerror", None) or (error if code is None else f"it ended with exit code {code}")
        raise UsageError(
            f"cannot edit {path} with '{editor}' ({reason}); set EDITOR to a program that edits text"
        ) from None
    _, problems = read_what_is_valid(path)
    for problem in problems:
        warn(problem)
    print_result(options, {"path": str(path), "problems": problems}, path)
    return UsageError.exit_code if problems else 0


def _reset(options: argparse.Namespace) -> None:
    path = config_path()
    kept = reset_file(path)
    text = f"all options have their defaults; the old settings are in {kept}" if kept else f"there is no {path}"
    print_result(options, {"path": str(path), "kept": str(kept) if kept else None}, text)
