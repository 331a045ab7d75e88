"""What an answer with calls of tools consists of, in its order, and its calls as a whole."""

from collections.abc import Iterable, Iterator, Sequence
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
Part = TextPart | CallEvent


def join_calls(events: Iterable[Part]) -> tuple[ToolCall, ...]:
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


def join_text(events: Iterable[Part]) -> str:
    """The text of an answer beside its calls."""
    return "".join(event.text for event in events if isinstance(event, TextPart))


def split_parts(parts: Sequence[Part]) -> tuple[str, tuple[CallEvent, ...], tuple[int, ...]]:
    """Text and events apart, and for each event how many characters of the text stand before it."""
    text, events, places = "", list[CallEvent](), list[int]()
    for part in parts:
        if isinstance(part, TextPart):
            text += part.text
        else:
            events.append(part)
            places.append(len(text))
    return text, tuple(events), tuple(places)


def in_order(text: str, events: Sequence[CallEvent], places: Sequence[int]) -> Iterator[Part]:
    """What split_parts took apart, with neighbouring texts as one."""
    done = 0
    for event, place in zip(events, places, strict=True):
        if place > done:
            yield TextPart(text[done:place])
            done = place
        yield event
    if done < len(text):
        yield TextPart(text[done:])
