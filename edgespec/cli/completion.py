"""The command that prints a shell's completion script, and the words that a shell offers.

The script runs edgespec at each press of Tab, so completions know the installed version and the prepared models.
"""

import argparse
import os
from collections.abc import Callable, Iterable
from typing import Any

import edgespec
from edgespec import UsageError
from edgespec.cli.arguments import attribute_name, model_home
from edgespec.cli.parser import CommandParser
from edgespec.config.drafter_names import SELF, TARGET, TEXT
from edgespec.config.options import OPTIONS

_SHELLS = ("bash", "zsh", "fish")
Completer = Callable[..., Iterable[str]]


def add_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=_SHELLS, help=", ".join(_SHELLS))
    parser.set_defaults(run=_print_script)


def _print_script(options: argparse.Namespace) -> None:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["edgespec"], shell=options.shell), end="")


def is_asked_by_shell() -> bool:
    """True if a shell runs this process for completions, without arguments."""
    return "_ARGCOMPLETE" in os.environ


def answer_shell(parser: CommandParser, **settings: Any) -> None:
    """Print the completions that a shell asks for, and exit; settings go to argcomplete."""
    import argcomplete

    for leaf in parser.leaves():
        for action in leaf._actions:
            if completer := _completer(leaf.prog, action.dest, parser):
                vars(action)["completer"] = completer
    argcomplete.autocomplete(parser, always_complete_options=False, **settings)


def _completer(command: str, name: str, parser: CommandParser) -> Completer | None:
    """The lister of values of an argument; None where the parser's choices or the names of files serve."""
    special: dict[tuple[str, str], Completer | None] = {
        ("edgespec models remove", "models"): _prepared_models,
        ("edgespec preset remove", "names"): _presets,
        ("edgespec preset show", "name"): _presets,
        ("edgespec models learned", "model"): _prepared_models,
        ("edgespec models forget", "model"): _prepared_models,
        ("edgespec config set", "value"): _config_values,
        ("edgespec help", "words"): lambda parsed_args, **_: _commands_below(parser, parsed_args.words or ()),
        ("edgespec export", "source"): _sources,
        ("edgespec export", "drafter"): _sources,
        ("edgespec preset create", "source"): _models,
        ("edgespec pair check", "drafter"): _models,
        ("edgespec simulate", "machine"): _machines,
        ("edgespec simulate", "drafter_device"): lambda **_: ("cpu", "npu"),
        ("edgespec chat", "words"): lambda **_: (),
    }
    return special.get((command, name), _COMPLETERS.get(name))


def _commands_below(parser: CommandParser, words: Iterable[str]) -> Iterable[str]:
    for word in words:
        parser = parser.commands.choices.get(word, parser) if parser.commands else parser
    return parser.commands.choices if parser.commands else ()


def _config_values(parsed_args: argparse.Namespace, **_: Any) -> Iterable[str]:
    option = OPTIONS.get(parsed_args.key)
    if option is None:
        return ()
    if option.kind == "switch":
        return ("false", "true")
    completer = _COMPLETERS.get(attribute_name(parsed_args.key))
    return [*option.choices, *(["auto"] if option.kind == "length" else []), *(completer() if completer else ())]


def _prepared_models(**_: Any) -> Iterable[str]:
    try:
        return model_home().names()
    except UsageError:
        return []


def _domains(**_: Any) -> Iterable[str]:
    """Names under which a head of a prepared model has learned."""
    folders = [model_home().models / name for name in _prepared_models()]
    return {file.domain for folder in folders for file in edgespec.learned_files(folder)}


def _presets(**_: Any) -> Iterable[str]:
    try:
        return model_home().presets.names()
    except UsageError:
        return []


def _models(**_: Any) -> Iterable[str]:
    of_ollama = (f"ollama:{name}" for name in edgespec.pulled_names())
    return {*edgespec.CATALOG, *_prepared_models(), *_presets(), *of_ollama}


def _sources(prefix: str = "", **_: Any) -> Iterable[str]:
    """Sources to export: files and folders, and names of the catalogue."""
    from argcomplete.completers import FilesCompleter

    return [*edgespec.CATALOG, *FilesCompleter()(prefix)]


def _machines(**_: Any) -> Iterable[str]:
    from edgespec.simulation.machines import read_machines

    return ["list", *read_machines()]


_COMPLETERS: dict[str, Completer] = {
    **dict.fromkeys(("model", "named_model", "models", "target", "exactness"), _models),
    **dict.fromkeys(("device", "drafter_device"), lambda **_: ("auto", *edgespec.device_names())),
    **dict.fromkeys(("drafter", "compare"), lambda **_: {"none", *TARGET, *TEXT, SELF, *_models()}),
    **dict.fromkeys(("learn", "domain"), _domains),
}
