"""The tools of a chat: the functions that the model may call, and the question whether one may be run."""

import os
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from edgespec import Engine, ModelError, Tool, ToolProcess, UsageError, open_servers, require_allowed
from edgespec.system.console import info, warn
from edgespec.system.printable import one_line

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
        if sys.platform == "win32":
            import msvcrt

            while msvcrt.kbhit():
                msvcrt.getwch()
        else:
            with suppress(termios.error, OSError, ValueError):
                termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
        sys.stderr.write(question)
        sys.stderr.flush()
        return sys.stdin.readline()  # nothing at its end: no

    return ask_permission(name, read, show)


@dataclass(frozen=True, slots=True)
class ToolBox:
    """Tools by the processes that run them, and the names of those that are run without a question."""

    processes: tuple[ToolProcess, ...]
    allowed: set[str]

    @property
    def tools(self) -> tuple[Tool, ...]:
        return tuple(tool for process in self.processes for tool in process.tools)

    def close(self) -> None:
        for each in self.processes:
            each.close()

    def lines(self) -> list[str]:
        """A line for each tool: its arguments, what it is for, and whether the user is asked before each call."""
        return [
            f"{tool.name}({', '.join(tool.parameters.get('properties', {}))})"
            f"{': ' if tool.description else ''}{one_line(tool.description, 200)}"
            f" ({'runs without asking' if tool.name in self.allowed else 'asks before each call'})"
            for tool in self.tools
        ]


def open_functions(path: Path) -> ToolProcess:
    """The functions of a file, as tools. Raises UsageError: It cannot be read or run, or has no function."""
    if not os.path.isfile(path):  # false too for a name that no file can have
        raise UsageError(f"{path} is not a file; wanted a Python file with functions")
    words = ["-m", "edgespec.chat.function_worker", str(path.absolute())]
    return ToolProcess(words, str(path), report=info)


def open_tools(path: Path | None, servers: Sequence[str], allowed: Collection[str]) -> ToolBox:
    """Load a file of functions, and start MCP servers; allowed has names of tools, or "all".

    Raises UsageError: One of them cannot be used, or a tool is allowed that there is not.
    """
    with ExitStack() as opened:
        processes = [opened.enter_context(closing(open_functions(path)))] if path else []
        taken = {tool.name for each in processes for tool in each.tools}
        if servers:
            processes.append(opened.enter_context(closing(open_servers(servers, taken, report=info))))
        tools = [tool for each in processes for tool in each.tools]
        box = ToolBox(tuple(processes), require_allowed(allowed, tools))
        opened.pop_all()
    for note in (note for each in processes for note in each.notes):
        warn(note)
    return box


def require_tools(engine: Engine) -> None:
    """Raises ModelError: the model was not made to call tools, as its chat template shows."""
    if not engine.takes_tools:
        raise ModelError(
            f"{engine.manifest.name} cannot call tools: its chat template has no place for them; use a model "
            "that was trained for tools, such as qwen2.5-1.5b, or leave out --tools and --mcp"
        )
