"""The tools of a chat: the functions that the model may call, and those that need no further yes of the user."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from edgespec.engine.engine import Engine
from edgespec.errors import ModelError, UsageError
from edgespec.system.printable import one_line
from edgespec.tools.function_process import FunctionProcess
from edgespec.tools.tool import Tool

ALL = "all"


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
