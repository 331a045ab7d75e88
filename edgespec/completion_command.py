"""The command that prints a shell's completion script, and answers it."""

import argparse
from collections.abc import Iterable

from edgespec.catalog import CATALOG
from edgespec.completion import SCRIPTS, completions
from edgespec.errors import UsageError


def add_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=[*SCRIPTS, "words"], help=", ".join(SCRIPTS))
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)  # what a script asks about
    parser.set_defaults(run=_completion)


def _completion(options: argparse.Namespace) -> int:
    from edgespec.cli import command_parser

    if options.shell in SCRIPTS:
        print(SCRIPTS[options.shell], end="")
        return 0
    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    print(
        "".join(f"{word}\n" for word in completions(command_parser(), words, _models, _prepared, _devices)), end=""
    )
    return 0


def _models() -> Iterable[str]:
    """Names of the catalogue, and of what is prepared."""
    return {*CATALOG, *_prepared()}


def _devices() -> Iterable[str]:
    from edgespec.devices_command import known_names

    return known_names()


def _prepared() -> Iterable[str]:
    from edgespec.home import ModelHome, default_home

    try:
        folder = ModelHome(default_home(), offline=True).models
        return [path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != "."]
    except (OSError, UsageError):
        return []
