"""Messages of a conversation in which tools were called."""

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from edgespec.errors import UsageError
from edgespec.text.tool import ToolCall, is_too_deep


class CallMessage(NamedTuple):
    """A turn of the assistant that calls tools."""

    content: str
    calls: tuple[ToolCall, ...]

    @property
    def role(self) -> str:
        return "assistant"


class ResultMessage(NamedTuple):
    """The result of a call."""

    content: str
    call_id: str
    name: str = ""  # of the tool; empty where the message does not say

    @property
    def role(self) -> str:
        return "tool"


def parse_calls(given: Any) -> tuple[ToolCall, ...]:
    """The calls of a message of the assistant. Raises UsageError: they are none."""
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        raise UsageError(f"tool_calls is {reprlib.repr(given)}; wanted a list of calls")
    return tuple(_parse_call(each) for each in given)


def _parse_call(given: Any) -> ToolCall:
    if isinstance(given, ToolCall):
        return given
    stated = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(stated, Mapping) or not isinstance(stated.get("name"), str):
        raise UsageError(
            f"tool_calls has {reprlib.repr(given)}; wanted objects with id, type and function, which has name and "
            "arguments"
        )
    arguments = stated.get("arguments", "{}")
    if not isinstance(arguments, str):  # as some clients send them
        if is_too_deep(arguments) or not isinstance(arguments, Mapping):
            raise UsageError(
                f"tool_calls has the arguments {reprlib.repr(arguments)}; wanted a JSON object as text"
            )
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(id=str(given.get("id") or ""), name=stated["name"], arguments=arguments or "{}")


def require_answerable(messages: Sequence[object]) -> None:
    """Raises UsageError: The result of a call stands before any call, or names one that is not there."""
    known: set[str] = set()
    for message in messages:
        if isinstance(message, CallMessage):
            known |= {call.id for call in message.calls}
        elif isinstance(message, ResultMessage) and (
            not known or (message.call_id and message.call_id not in known)
        ):
            there = ", ".join(sorted(known)) or "none"
            raise UsageError(
                f"messages has the role tool with the tool_call_id '{message.call_id[:80]}', which no tool_calls "
                f"before it has (there are: {there}); send the assistant's message with its tool_calls too"
            )
