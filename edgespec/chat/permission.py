"""Whether a tool may be run: what the user says to that."""

import sys
from collections.abc import Callable
from contextlib import suppress
from enum import Enum

if sys.platform != "win32":
    import termios

QUESTION = "Run it? [y/N/a] "
_WORDS_QUESTION = "Run it? You were typing, so write the word: [yes/no/always] "


class Permission(Enum):
    YES = "yes"
    NO = "no"
    ALWAYS = "always"  # for this tool, in this chat


Permit = Callable[[str], Permission | None]
"""Asks for a tool by its name; None: the user ends the answer."""


def ask_permission(
    name: str, read: Callable[[str], str], show: Callable[[str], None], *, is_typing: bool = False
) -> Permission:
    """Ask until the user says yes, no or always; Enter is no.

    Args:
        read: Shows a question and gives the line that is typed.
        is_typing: The user was typing when the question came: a single letter may be meant for another text.
    """
    while True:
        answer = read(_WORDS_QUESTION if is_typing else QUESTION).strip().lower()
        for each in Permission:
            if answer == each.value or (answer == each.value[0] and not is_typing):
                return each
        if not answer:
            return Permission.NO
        letters = "yes, no or always" if is_typing else "y, n or a"
        show(f"please answer {letters} (always: run {name} in this chat without asking)")


def ask_at_terminal(name: str, show: Callable[[str], None]) -> Permission:
    """Ask on stderr and read stdin; what was typed before the question is no answer."""

    def read(question: str) -> str:
        if sys.platform != "win32":
            with suppress(termios.error, OSError, ValueError):
                termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
        sys.stderr.write(question)
        sys.stderr.flush()
        return sys.stdin.readline()  # nothing at its end: no

    return ask_permission(name, read, show)
