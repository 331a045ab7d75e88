"""An argument parser that tells the nearest word to a wrong one, and whose help is as wide as the terminal."""

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

_WIDEST = 110
_CHOICE = re.compile(r"argument (?P<what>.+?): invalid choice: '(?P<word>.*)' \(choose from (?P<known>.*)\)")


class _Formatter(argparse.HelpFormatter):
    """Paragraphs are filled to the terminal's width; indented lines, as of examples, stay as they are."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, _WIDEST) - 2
        super().__init__(prog, max_help_position=28, width=max(width, 40))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = [
            part if part.startswith(" ") else textwrap.fill(part, width, initial_indent=indent)
            for part in text.split("\n\n")
        ]
        return "\n\n".join(parts)


class CommandParser(argparse.ArgumentParser):
    """Of a command, or of several beneath it."""

    inner: "argparse._SubParsersAction[CommandParser] | None" = None

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"formatter_class": _Formatter, **settings})

    def add_subparsers(self, **settings: Any) -> Any:
        self.inner = super().add_subparsers(**settings)
        return self.inner

    def leaves(self) -> "Iterator[CommandParser]":
        """The commands beneath, each once."""
        if self.inner is None:
            yield self
            return
        for parser in self.inner.choices.values():
            yield from parser.leaves()

    def flags(self) -> list[str]:
        """All that begin with a dash."""
        return list(self._option_string_actions)

    def option(self, flag: str) -> argparse.Action | None:
        return self._option_string_actions.get(flag)

    def positionals(self) -> list[argparse.Action]:
        return self._get_positional_actions()

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """All of them: what is left over is an error of the command that it was given to."""
        found, extras = super().parse_known_args(args, namespace)
        if extras:
            flags = [flag for flag in self.flags() if flag.startswith("--")]
            meant = _meant(extras[0].partition("=")[0], flags)
            self.error(f"unrecognized arguments: {' '.join(extras)}{meant}")
        return found, extras

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in a line, and where to read on."""
        if match := _CHOICE.fullmatch(message):
            known = [word.strip("' ") for word in match["known"].split(",")]
            what = match["what"].lower() if match["what"].isupper() else match["what"]
            meant = _meant(match["word"], known) or "."
            message = f"no {what} '{match['word']}'{meant} Known are {', '.join(known)}"
        self.exit(2, f"{self.prog}: {message}\nfor help: {self.prog} --help\n")


def _meant(word: str, known: Sequence[str]) -> str:
    near = get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""
