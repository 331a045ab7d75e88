"""The tools of a chat: the functions that the model may call, and the question whether one may be run."""

import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from edgespec import Engine, ModelError, Tool, UsageError
from edgespec.chat.function_process import FunctionProcess
from edgespec.system.printable import one_line

if sys.platform != "win32":
    import termios

QUESTION = "Run it? [y/N/a] "
_WORDS_QUESTION = "Run it? You were typing, so write the word: [yes/no/always] "
ALL = "all"


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


@dataclass(frozen=True, slots=True)
class ToolBox:
    """The functions of a file, and the names of those that are run without a question."""

    process: FunctionProcess
    allowed: set[str]

    @property
    def tools(self) -> tuple[Tool, ...]:
        return self.process.tools

    def lines(self) -> list[str]:
        """A line for each tool: its arguments, what it is for, and whether the user is asked before each call."""
        return [
            f"{tool.name}({', '.join(tool.parameters.get('properties', {}))})"
            f"{': ' if tool.description else ''}{one_line(tool.description, 200)}"
            f" ({'runs without asking' if tool.name in self.allowed else 'asks before each call'})"
            for tool in self.tools
        ]


def open_tools(path: Path, allowed: Iterable[str]) -> ToolBox:
    """Load a file of functions; allowed has names of them, or ALL.

    Raises UsageError: The file cannot be used, or lacks a function that is allowed.
    """
    process = FunctionProcess(path)
    names = [tool.name for tool in process.tools]
    if unknown := [name for name in allowed if name not in (*names, ALL)]:
        process.close()
        raise UsageError(
            f"--allow names '{one_line(unknown[0], 60)}', which {path} lacks; it has {', '.join(names)} (or {ALL})"
        )
    return ToolBox(process, {*names} if ALL in allowed else {*allowed})


def require_tools(engine: Engine) -> None:
    """Raises ModelError: the model was not made to call tools, as its chat template shows."""
    if not engine.takes_tools:
        raise ModelError(
            f"{engine.manifest.name} cannot call tools: its chat template takes none; use a model that was "
            "trained for it, such as qwen2.5-1.5b, or leave out --tools"
        )
