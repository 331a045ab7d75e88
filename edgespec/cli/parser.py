"""An argument parser that suggests the nearest word for a wrong one, and whose help is as wide as the terminal."""

import argparse
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from difflib import get_close_matches
from typing import Any, NoReturn

import edgespec
from edgespec.config.options import OPTIONS
from edgespec.system.command_line import quote
from edgespec.system.console import discard_output
from edgespec.system.printable import one_line, printable
from edgespec.system.tables import read_table

_PROMPT_WORDS = "words"  # the attribute of a prompt that is given without a flag
_WIDEST = 110
_CUTOFF, _VALUE_CUTOFF = 0.6, 0.75  # how near a word is to one that is suggested
_CHOICE = re.compile(r"argument (?P<what>.+?): invalid choice: '?(?P<word>.*?)'? \(choose from (?P<known>.*)\)")
_NUMBER = re.compile(r"argument (?P<what>.+?): invalid (?P<kind>int|float|limit) value: (?P<word>.*)")
_OTHER_NAMES = "other_names.toml"  # of commands and flags in other programs, which only refusals need
# Further names of commands here, by the command above them.
_SHORT_NAMES = {
    ("edgespec", "version"): "--version",
    ("edgespec config", "list"): "show",
    ("edgespec config", "ls"): "show",
    ("edgespec models", "ls"): "list",
    ("edgespec models", "rm"): "remove",
    ("edgespec preset", "ls"): "list",
    ("edgespec preset", "rm"): "remove",
}
# Of an everyday help: the characters that fit a line, the ends of sentences in a longer one, and what is kept.
_SHORT, _PART_END, _DEFAULT = 64, re.compile(r"(?:; |\. )(?![^(]*\))"), re.compile(r" \(default: [^)]*\)$")
_MOST_KNOWN = 20  # that a message lists
_NUMBERS = {"int": "a whole number", "float": "a number", "limit": "a whole number from 1, or -1 for no limit"}


class _Formatter(argparse.HelpFormatter):
    """Paragraphs are filled to the terminal's width; indented lines, as of examples, stay as they are."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, _WIDEST) - 2
        super().__init__(prog, max_help_position=28, width=max(width, 40))
        self._action_max_length = 14  # argparse forgets the indent of commands, and wraps after the longest one

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[Any],
        prefix: str | None = None,
    ) -> None:
        """Show the arguments that must be given; the list below has the options."""
        self._prog += " [options]"
        super().add_usage(
            usage, [each for each in actions if each.required or not each.option_strings], (), prefix
        )

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = [
            part
            if part.startswith(" ")
            else textwrap.fill(part, width, initial_indent=indent, subsequent_indent=indent)
            for part in text.split("\n\n")
        ]
        return "\n\n".join(parts)


class CommandParser(argparse.ArgumentParser):
    """The parser of a command, or of several commands below it."""

    commands: "argparse._SubParsersAction[CommandParser] | None" = None
    default_command: str | None = None  # of the commands below, where none is named
    everyday: tuple[str, ...] | None = None  # the flags that --help lists; None: all

    def __init__(self, **settings: Any) -> None:
        # Without abbreviations: --model would stand for --model-sampling.
        super().__init__(**{"formatter_class": _Formatter, "allow_abbrev": False, **settings})
        # Newer versions of argparse would suggest a word too, and write codes of colours, which are escaped here.
        self.suggest_on_error = self.color = False

    def add_command(self, name: str, what: str, **settings: Any) -> "CommandParser":
        """Add a command below; what is its line in the list, and the first sentence of its own help."""
        if self.commands is None:
            kind = "action" if " " in self.prog else "command"
            self.commands = self.add_subparsers(
                prog=self.prog, title=f"{kind}s", metavar=kind.upper(), required=True
            )
        return self.commands.add_parser(name, help=what, description=f"{what[0].upper()}{what[1:]}.", **settings)

    def show_first(self, *flags: str) -> None:
        """Let --help list these flags alone, each in short, and --help-all every one."""
        self.everyday = flags
        self.add_argument("--help-all", action=_HelpAll, help="show all options and exit")

    def format_help(self) -> str:
        if self.everyday is None:
            return super().format_help()
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, ())
        formatter.add_text(self.description)
        flags = {flag: each for each in self._actions for flag in each.option_strings}
        # In the order in which they are named: the most used first.
        shown = dict.fromkeys(flags[flag] for flag in (*self.everyday, "--help-all"))
        places = [each for each in self._actions if not each.option_strings]
        for title, actions in (("positional arguments", places), ("options", shown)):
            formatter.start_section(title)
            formatter.add_arguments(map(_in_short, actions))
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def leaves(self) -> "Iterator[CommandParser]":
        """Every command that runs something, such as `models pull`."""
        if self.commands is None:
            yield self
            return
        for parser in self.commands.choices.values():
            yield from parser.leaves()

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuse unknown arguments in the command that they were given to, which knows the nearest flag."""
        given = [*(sys.argv[1:] if args is None else args)]
        if given:
            given[0] = _SHORT_NAMES.get((self.prog, given[0]), given[0])
        has_name = bool(given) and (given[0][:1] != "-" or given[0] in ("-h", "--help"))
        if self.default_command and not has_name and "_ARGCOMPLETE" not in os.environ:
            given.insert(0, self.default_command)
        if self.commands and given and given[0].startswith("-") and given[0] not in self._option_string_actions:
            self._refuse_flag(given[0])
        found, extras = super().parse_known_args(given, namespace)
        if len(extras) == 1 and not extras[0].startswith("-") and vars(found).get(_PROMPT_WORDS, "") is None:
            setattr(found, _PROMPT_WORDS, extras.pop())  # argparse leaves it where options stand before it
        if extras:
            flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
            hint = _suggest(extras[0].partition("=")[0], flags) if extras[0].startswith("-") else ""
            if extras[0].partition("=")[0] in ("--model", "-m") and any(
                each.metavar == "MODEL" for each in self._get_positional_actions()
            ):
                hint = f"; the model needs no flag: {self.prog} MODEL"
            elif not extras[0].startswith("-") and "--prompt" in flags:
                hint = "; a prompt is one argument, in quotes"
            self.error(f"unrecognized arguments: {' '.join(extras)}{hint}")
        return found, extras

    def _refuse_flag(self, flag: str) -> NoReturn:
        """Refuse a flag in the place of a command, with the nearest one, or with a command that has it."""
        name = flag.partition("=")[0]
        commands = self.commands.choices if self.commands else {}
        owners = [each.prog for each in commands.values() if name in each._option_string_actions]
        if len(owners) > 3:
            hint = f"; it goes behind the command, as in {owners[0]} {name}"
        else:
            hint = f"; it is a flag of {owners[0]}" if owners else _suggest(name, [*self._option_string_actions])
        self.error(f"unrecognized arguments: {flag}{hint}")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Write help or an error. Raises OSError: Help cannot be written, which argparse would not say."""
        stream = file or sys.stderr
        try:
            print(printable(message), end="", file=stream)
        except OSError:
            if stream is not sys.stderr:
                raise
            discard_output(stream)  # the exit code tells

    def error(self, message: str) -> NoReturn:
        """Print one line on what is wrong and one on where to find help, and exit."""
        if match := _CHOICE.fullmatch(message):
            known = [word.strip("' ") for word in match["known"].split(",")]
            what = match["what"].lower() if match["what"].isupper() else match["what"]
            # A flag's values are few and alike, as int4 and int8: only a near one is a likely slip.
            cutoff = _VALUE_CUTOFF if what.startswith("-") else _CUTOFF
            is_first = self.prog in ("edgespec", "edgespec models")
            here = read_table(__file__, _OTHER_NAMES)["commands"].get(match["word"]) if is_first else None
            other = f"edgespec {here}" if here else None
            if what == "command" and not other and _is_for_chat(match["word"]):
                other = f"edgespec chat {quote(one_line(match['word'], 60))}"
            if self.prog == "edgespec config" and match["word"].replace("_", "-") in OPTIONS:
                other = f"{self.prog} get {match['word']}"
            if other:
                self.exit(2, f"{self.prog}: no {what} '{match['word']}'; did you mean {other}?\n")
            hint = _suggest(match["word"], known, cutoff) or "."
            names = f"Known are {', '.join(known)}" if len(known) <= _MOST_KNOWN else "The help lists all of them"
            message = f"no {what} '{match['word']}'{hint} {names}"
        if match := _NUMBER.fullmatch(message):
            message = f"{match['what']} is {match['word']}; wanted {_NUMBERS[match['kind']]}"
        self.exit(2, f"{self.prog}: {message}\nfor help: {self.prog} --help\n")


class _HelpAll(argparse._HelpAction):
    """Shows the help with all options, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> None:
        assert isinstance(parser, CommandParser)
        parser.everyday = None
        super().__call__(parser, *given)


def _in_short(action: argparse.Action) -> argparse.Action:
    """An argument with its default and the beginning of its help that fits a line, or the first part of that."""
    short, text = copy(action), action.help or ""
    if len(text) > _SHORT:
        begin, default = _PART_END.split(text, maxsplit=1)[0], _DEFAULT.search(text)
        short.help = begin + (default[0] if default and default[0] not in begin else "")
    return short


def _is_for_chat(word: str) -> bool:
    """True for what is no command, but a prompt or a model."""
    with suppress(edgespec.EdgeSpecError):  # the configuration names no home
        home = edgespec.ModelHome(edgespec.default_home())
        return " " in word or word in (*edgespec.CATALOG, *home.names(), *home.presets.names())
    return False


def _suggest(word: str, known: Sequence[str], cutoff: float = _CUTOFF) -> str:
    if (other := read_table(__file__, _OTHER_NAMES)["flags"].get(word)) in known:
        return f"; did you mean {other}?"
    # Of a beginning the whole; a flag of one letter is near to every other one. The dashes make none near.
    names = {each.lstrip("-"): each for each in known if len(each.lstrip("-")) > 1}
    word = word.lstrip("-")
    begun = [each for each in names if each.startswith(word)] if len(word) > 1 else []
    near = begun or get_close_matches(word, names, n=1, cutoff=cutoff)
    return f"; did you mean {names[near[0]]}?" if near else ""
