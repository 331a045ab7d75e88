"""What an answer with calls of tools consists of, in its order, and its calls as a whole."""

from collections.abc import Iterable
from dataclasses import dataclass

from edgespec.tools.tool import ToolCall


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text that is no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; index counts the calls of an answer."""

    index: int
    name: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of a call; joined, they are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is complete."""

    index: int


CallEvent = CallStart | CallArguments | CallEnd


def join_calls(events: Iterable[TextPart | CallEvent]) -> tuple[ToolCall, ...]:
    """The calls of an answer; the last one may lack its end."""
    found: list[ToolCall] = []
    parts: list[list[str]] = []
    for event in events:
        if isinstance(event, CallStart):
            found.append(ToolCall(id=event.id, name=event.name, arguments=""))
            parts.append([])
        elif isinstance(event, CallArguments):
            parts[event.index].append(event.text)
    return tuple(
        ToolCall(id=call.id, name=call.name, arguments="".join(texts))
        for call, texts in zip(found, parts, strict=True)
    )


def join_text(events: Iterable[TextPart | CallEvent]) -> str:
    """The text of an answer beside its calls."""
    return "".join(event.text for event in events if isinstance(event, TextPart))
