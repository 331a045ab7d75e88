"""The parts of an answer with calls of tools, in its order: as values, as a whole, and as a parser finds them."""

import secrets
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from edgespec.tools.tool import ToolCall

_ID_CHARACTERS = string.ascii_letters + string.digits


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


def in_order(text: str, events: Sequence[CallEvent], places: Sequence[int]) -> Iterator[Part]:
    """Parts of an answer from its text, and from its events with how many characters of text stand before each."""
    done = 0
    for event, place in zip(events, places, strict=True):
        if place > done:
            yield TextPart(text[done:place])
            done = place
        yield event
    if done < len(text):
        yield TextPart(text[done:])


class StopSearch(Protocol):
    """Ends a text at the first of several strings, and holds back what may begin one."""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that can be shown, and whether it ends there."""
        ...

    def flush(self) -> str:
        """Give what was held back, when no more text comes."""
        ...


class CallOutput:
    """Collects text and calls until they are taken; white space beside calls is dropped.

    Where arguments are held, a call comes out once it is whole, and may be dropped before. A stop string in the
    text ends all of it; calls are not searched, and no stop string spans one.
    """

    def __init__(self, *, holds_arguments: bool, stop: StopSearch | None = None) -> None:
        self.num_calls = 0  # that are complete
        self.is_open = False  # a call has been passed on in part
        self.is_stopped = False  # by a stop string, behind which nothing is taken
        self._stop = stop
        self._holds_arguments = holds_arguments
        self._events: list[Part] = []
        self._held: list[Part] = []  # of a call that may turn out to be none
        self._space = ""  # white space and noise that belong to the text if more text follows
        self._fragment = ""  # of arguments
        self._is_text_last = True

    @property
    def has_calls(self) -> bool:
        """True if a call has been passed on, perhaps in part."""
        return self.num_calls > 0 or self.is_open

    def take(self) -> list[Part]:
        """Take what has come since the last time."""
        self._flush_fragment()
        events, self._events = self._events, []
        return events

    def add_text(self, text: str) -> None:
        """Text of the answer that is no call."""
        if self.is_stopped:
            return
        if self._stop:
            text, self.is_stopped = self._stop.push(text)
        self._keep_text(text)

    def _keep_text(self, text: str) -> None:
        body = text.rstrip()
        if body:
            self._events.append(TextPart(self._space + body))
            self._space, self._is_text_last = "", True
        self._space += text[len(body) :]

    def add_noise(self, text: str) -> None:
        """Add marks around calls, which are text only if more text follows."""
        self._release_text()
        self._space += text

    def end_text(self) -> None:
        """No more text follows."""
        self._release_text()
        if self._is_text_last and self._space:
            self._events.append(TextPart(self._space))

    def begin_call(self, name: str) -> None:
        if self.is_stopped:
            return
        if not self._holds_arguments:
            self._release_text()
        call_id = "call_" + "".join(secrets.choice(_ID_CHARACTERS) for _ in range(24))
        self._add(CallStart(self.num_calls, name, call_id))
        if not self._holds_arguments:
            self._space, self._is_text_last, self.is_open = "", False, True

    def add_arguments(self, text: str) -> None:
        if not self.is_stopped:
            self._fragment += text

    def end_call(self) -> None:
        if self.is_stopped:
            return
        self._add(CallEnd(self.num_calls))
        self.num_calls += 1
        self._release_text()
        self._events += self._held
        self._held = []
        self._space, self._is_text_last, self.is_open = "", False, False

    def drop_call(self) -> None:
        """Forget a call that has not been passed on."""
        self._held.clear()
        self._fragment = ""

    def _release_text(self) -> None:
        """Pass on what might have begun a stop string."""
        if self._stop:
            self._keep_text(self._stop.flush())

    def _add(self, event: CallEvent) -> None:
        self._flush_fragment()
        (self._held if self._holds_arguments else self._events).append(event)

    def _flush_fragment(self) -> None:
        if self._fragment:
            event = CallArguments(self.num_calls, self._fragment)
            self._fragment = ""
            self._add(event)
