"""Which tools an answer may call, and how: what is asked, and what that makes of the answer's text."""

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgespec.tools.call_events import CallStart, Part
from edgespec.tools.call_output import StopSearch
from edgespec.tools.call_parser import CallParser
from edgespec.tools.formats import CallFormat
from edgespec.tools.tool import Tool, parse_choice, parse_tools

_ID_CHARACTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of an answer.

    choice: auto, required, or the name of the tool that must be called.
    is_parallel: The answer may call several; otherwise it ends with its first call.
    """

    tools: tuple[Tool, ...]
    choice: str = "auto"
    is_parallel: bool = True

    @property
    def possible(self) -> tuple[Tool, ...]:
        """The tools that may be called: all, or the one that must be."""
        return tuple(tool for tool in self.tools if self.choice in (tool.name, "auto", "required"))

    @property
    def is_ensured(self) -> bool:
        """Whether a grammar has to ensure calls: one is demanded, or a tool is strict."""
        return self.choice != "auto" or any(tool.strict for tool in self.tools)


def parse_tool_use(tools: Any, choice: Any = None, *, is_parallel: bool = True) -> ToolUse | None:
    """What a caller gives as tools and tool_choice; None where no tool may be called.

    Raises UsageError: The tools or the choice are wrong.
    """
    parsed = parse_tools(tools)
    chosen = parse_choice(choice, parsed)
    if not parsed or chosen == "none":
        return None
    return ToolUse(tools=parsed, choice=chosen, is_parallel=is_parallel)


class CallReader:
    """Text of an answer in, its text without calls and its calls out, in their order."""

    def __init__(
        self, use: ToolUse, format: CallFormat, *, holds_arguments: bool, stop: StopSearch | None = None
    ) -> None:
        """holds_arguments, stop: As CallParser has them."""
        self._parser = CallParser(format, use.tools, holds_arguments=holds_arguments, stop=stop)
        self._is_parallel = use.is_parallel
        self.has_calls = False

    @property
    def is_over(self) -> bool:
        """Whether the answer has all the calls that it may have, or a stop string has ended it."""
        return self.is_stopped or (not self._is_parallel and self._parser.num_calls > 0)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the answer."""
        return self._parser.is_stopped

    def push(self, text: str) -> list[Part]:
        """What a piece of the answer adds to its text and to its calls."""
        return self._take(self._parser.push(text))

    def flush(self) -> list[Part]:
        """What was held back, when no more text comes."""
        return self._take(self._parser.flush())

    def _take(self, found: Sequence[Part]) -> list[Part]:
        parts: list[Part] = []
        for part in found:
            if isinstance(part, CallStart):
                self.has_calls = True
                part = replace(part, id=make_call_id())
            parts.append(part)
        return parts


def make_call_id() -> str:
    """A name for a call that no other has."""
    return "call_" + "".join(secrets.choice(_ID_CHARACTERS) for _ in range(24))
