"""Parts of several commands: flags, the engine and the model home that they ask for, printing a result."""

import argparse
import json
import os
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import edgespec
from edgespec import UnsuitedModel, UsageError
from edgespec.cli.parser import CommandParser
from edgespec.config.options import GROUP_HELP, LOAD_PARAMETERS, OPTIONS
from edgespec.system import console
from edgespec.system.console import info

if TYPE_CHECKING:
    from edgespec.export.convert import MeasureRanges, OpenDecoder


class Switch(argparse.BooleanOptionalAction):
    """--NAME and --no-NAME, of which a command line may have one."""

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None
    ) -> None:
        """Refuse the other one of an earlier argument."""
        if (earlier := stated_flags(namespace).setdefault(self.dest, str(option_string))) != option_string:
            parser.error(f"{earlier} and {option_string} contradict each other; leave one of them out")
        super().__call__(parser, namespace, values, option_string)


class NoteStated(argparse.Action):
    """An option that `stated_flags` has where the command line does."""

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, values)
        stated_flags(namespace)[self.dest] = str(option_string)


def stated_flags(options: Namespace) -> dict[str, str]:
    """The flags of the table that a command line has, by their attributes, whatever their values."""
    found: dict[str, str] = vars(options).setdefault("stated", {})
    return found


def attribute_name(name: str) -> str:
    """The attribute of the parsed command line that holds an option, such as top_p of top-p."""
    return name.replace("-", "_")


def is_given(options: Namespace, name: str) -> bool:
    """True if the command line has an option with a value of its own."""
    attribute = attribute_name(name)
    return bool(getattr(options, attribute) != options.parser.get_default(attribute))


def require_host(host: str) -> None:
    """Raises UsageError: The host of a server has a scheme, a path or a port."""
    if not host.strip() or "/" in host or "]:" in host or host.count(":") == 1:
        raise UsageError(
            f"--host is '{host}'; wanted a name or an address alone, as in --host 127.0.0.1 --port 8080"
        )


def require_positive(options: Namespace, *names: str) -> None:
    """Raises UsageError: A number that the command line has is below 1."""
    for name in names:
        if (value := getattr(options, attribute_name(name))) is not None and value < 1:
            raise UsageError(f"--{name} is {value}; wanted at least 1")


def add_option(parser: argparse._ActionsContainer, name: str) -> None:
    option = OPTIONS[name]
    if option.kind == "switch":
        action = "store_true" if name.startswith("no-") else Switch
        parser.add_argument(f"--{name}", action=action, default=option.default, help=option.help)
        return
    kinds: dict[str, Callable[[str], Any]] = {"whole": int, "limit": limit, "number": float}
    states_default = "(default: " in option.help
    parser.add_argument(
        f"--{name}",
        action=NoteStated,
        type=kinds.get(option.kind, str),
        default=option.default,
        choices=option.choices or None,
        metavar=option.metavar,
        help=option.help + ("" if option.default == "auto" or states_default else _default_note(option.default)),
    )


def limit(text: str) -> int:
    """A count, or -1 for none; its name is read by CommandParser. Raises ValueError: It is neither."""
    if not re.fullmatch(r"-1|[1-9]\d{0,17}", text, re.ASCII):
        raise ValueError(text)
    return int(text)


def _default_note(default: object) -> str:
    return "" if default is None else f" (default: {default})"


def add_options(parser: ArgumentParser) -> None:
    """Add every flag that the table has for a command, in the groups of the table."""
    groups: dict[str | None, argparse._ActionsContainer] = {None: parser}
    for name, option in OPTIONS.items():
        if name != "model" and parser.prog.partition(" ")[2] in option.commands:
            if option.group not in groups:
                groups[option.group] = parser.add_argument_group(option.group, GROUP_HELP.get(option.group))
            add_option(groups[option.group], name)


def add_flags(parser: argparse._ActionsContainer, table: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the arguments of a table, each by its settings in argparse, of which a kind stands for several."""
    for names, stated in table.items():
        settings = {**_KINDS.get(stated.get("kind", ""), {}), **stated}
        settings.pop("kind", None)
        if isinstance(stated.get("default"), tuple):  # argparse appends to lists alone
            settings["default"] = [*stated["default"]]
        if settings.get("type") is int:
            settings["help"] += _default_note(stated.get("default"))
        parser.add_argument(*names.split(), **settings)


def add_actions(
    parser: CommandParser, texts: Mapping[str, Any], runs: Mapping[str, Callable[[Namespace], int | None]]
) -> dict[str, CommandParser]:
    """Add the commands below a command, with what their table and the table of options say; by their names."""
    actions = {name: parser.add_command(name, texts[name]["what"]) for name in runs}
    for name, action in actions.items():
        add_flags(action, texts[name].get("arguments", {}))
        add_options(action)
        action.set_defaults(run=runs[name])
    return actions


def _parse_file(text: str) -> Path:
    if not text:  # which Path takes for the current folder
        raise argparse.ArgumentTypeError("the name of the file is empty; give one")
    return Path(text)


# Kinds of arguments, by the settings that each stands for.
_KINDS: dict[str, dict[str, Any]] = {
    "path": {"type": Path},
    "file": {"type": _parse_file, "metavar": "FILE"},
    "whole": {"type": int},
    "number": {"type": float},
    "flag": {"action": "store_true"},
    "switch": {"action": Switch, "default": None},
}


def add_mcp(parser: argparse._ActionsContainer, what: str) -> None:
    """Add the flag that names MCP servers; what: What they are for."""
    parser.add_argument(
        "--mcp",
        action="append",
        default=[],
        metavar="SERVER",
        help=f"{what}: its command in quotes, its address, or a .json file with mcpServers; repeatable",
    )


def add_model(parser: ArgumentParser, default: str | None = None, *, is_optional: bool = False) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?" if default or is_optional else None,
        default=default,
        help="a name from edgespec models list, a preset, a .gguf file, a folder, or org/name on the Hugging "
        "Face hub" + _default_note(default),
    )


def decode_argument(argument: str) -> str:
    """UTF-8 text of an argument, also where the locale has another encoding and Python escaped its bytes."""
    try:
        return os.fsencode(argument).decode()
    except UnicodeError:
        return argument


def load_arguments(options: Namespace, command: str | None = None) -> dict[str, Any]:
    """Arguments of `load` from the options of a command, or from those that another command has too."""
    chosen = {
        parameter: getattr(options, attribute_name(name))
        for name, parameter in LOAD_PARAMETERS.items()
        if (command or options.command) in OPTIONS[name].commands
    }
    shown, given = {"report": info, "progress": lambda at: None}, vars(options)  # it shows its own
    # For `edgespec stats` counts what was asked for, and no measurements.
    is_counted = not (given.get("no_usage", True) or given.get("no_history"))
    return {"model": options.model, "usage": is_counted, **shown, **chosen}


def load_any_engine(options: Namespace, **settings: Any) -> "edgespec.Engine":
    """Load the model of a command as its options say; settings are further arguments of `load`.

    Settings and what the command line states come before what a preset says.
    """
    flags = {
        parameter for name, parameter in LOAD_PARAMETERS.items() if attribute_name(name) in stated_flags(options)
    }
    return edgespec.open_wish(edgespec.Wish(**load_arguments(options) | settings), flags | settings.keys())


def load_engine(options: Namespace, **settings: Any) -> "edgespec.Engine":
    """Load the model of a command that has it write; raises what load raises, and UnsuitedModel: It does not."""
    engine = load_any_engine(options, **settings)
    try:
        edgespec.require_writer(engine.manifest)
    except UnsuitedModel:
        engine.close()
        raise
    return engine


def model_home(
    *,
    offline: bool = True,
    open_decoder: "OpenDecoder | None" = None,
    measure_ranges: "MeasureRanges | None" = None,
) -> "edgespec.ModelHome":
    return edgespec.ModelHome(edgespec.default_home(), offline, info, open_decoder, measure_ranges)


def checked_name(key: str, value: str) -> str:
    """The value as it is to be stored: files and folders by their whole paths, so that it holds in every folder.

    Raises EdgeSpecError: It names a model, a drafter or a device that does not exist, or is split within a path.
    """
    if key in ("device", "drafter-device"):
        edgespec.parse_device_name(value)
    if key == "home":
        return value and os.path.abspath(os.path.expanduser(value))
    if key not in ("model", "drafter"):
        return value
    from edgespec.config.drafter_names import SELF, WORDS, parse

    home, separators = model_home(), "+," if key == "drafter" else ""
    whole = _by_whole_paths(home, value, WORDS if separators else (), separators)
    if not os.path.exists(whole) and any(whole.count(each) != value.count(each) for each in separators):
        raise UsageError(
            f"'{value}' is stored by its whole paths, and --drafter would split {whole} at each + and comma; move "
            "the model to a folder without them in its path"
        )
    names = [name for each in parse(whole).cascades for name in each.models] if separators else [whole]
    for name in names:
        if name != SELF and home.whole_path(name) is None:
            home.find(name)
    return whole


def _by_whole_paths(home: "edgespec.ModelHome", value: str, words: Sequence[str], separators: str) -> str:
    """A model, or words and models between separators, with each file or folder by its whole path."""
    if value in words:
        return value
    if (path := home.whole_path(value)) is not None or not separators:
        return path or value
    parts = value.split(separators[0])
    return separators[0].join(_by_whole_paths(home, each, words, separators[1:]) for each in parts)


def print_result(options: Namespace, document: object, *lines: object) -> None:
    """Print the document with --json, else the lines. Raises EdgeSpecError: stdout cannot be written."""
    console.print_result(*([json.dumps(document)] if options.json else lines))
