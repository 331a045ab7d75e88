"""Finds the calls of tools in an answer while it comes. Pure: the same events however its text is cut.

What is no call is passed on as text: JSON that breaks, unknown names, braces of ordinary text. Only white space
beside calls is dropped.
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from edgespec.tools.call_events import CallArguments, CallEnd, CallEvent, CallStart, TextPart
from edgespec.tools.formats import CallFormat, JsonBody, NamedBody, PairsBody, PythonBody, TagBody
from edgespec.tools.json_scanner import JsonScanner
from edgespec.tools.notations import WrittenCall, escape_halves, load_json, parse_pairs, parse_python, write_json
from edgespec.tools.text_reader import EndOfText, Reading, TextReader
from edgespec.tools.tool import Tool

_ANY_JSON = JsonBody()
_FENCE = "```"  # around JSON, as models that were trained on code write it
_NUMBER = re.compile(r":\d+$")  # behind the name of a call, its index

Event = TextPart | CallEvent


class _NoCall(Exception):
    """What was read is no call."""


class CallParser:
    """Text in, text and calls out.

    Arguments are passed on as they come. Where they break, or the answer ends within them, they stay as the model
    wrote them: no JSON. A parser that holds arguments passes on whole calls alone, and such a call as text.
    """

    def __init__(self, format: CallFormat, tools: Sequence[Tool], *, holds_arguments: bool = False) -> None:
        self._format = format
        self._tools = {tool.name: tool for tool in tools}
        self._holds_arguments = holds_arguments
        self._frames = {
            begin.strip(): (begin.strip(), end.strip()) for begin, end in format.frames if begin.strip()
        }
        noise = {text.strip() for text in (*format.noise, *format.outer)} - {""}
        self._noise = noise
        self._literals = sorted((*self._frames, *noise), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._literals)))
        self._reader = TextReader()
        self._events: list[Event] = []
        self._held: list[Event] = []  # of a call that may turn out to be none
        self._space = ""  # white space and noise that belong to the text if more text follows
        self._fragment = ""  # of arguments
        self._skipped = 0  # characters from the reader's mark that begin no other call
        self._is_open = False  # a call has been passed on in part
        self._num_calls = 0
        self._is_text_last = True
        self._run = self._read()
        next(self._run)

    @property
    def num_calls(self) -> int:
        """How many calls are complete."""
        return self._num_calls

    def push(self, text: str) -> list[Event]:
        """What a piece of the answer adds."""
        self._reader.add(text)
        next(self._run)
        return self._take_events()

    def flush(self) -> list[Event]:
        """What was held back, when no more text comes."""
        self._reader.is_over = True
        for _ in self._run:
            pass
        if self._is_text_last and self._space:
            self._events.append(TextPart(self._space))
        return self._take_events()

    def _take_events(self) -> list[Event]:
        self._flush_fragment()
        events, self._events = self._events, []
        return events

    def _read(self) -> Reading[None]:
        try:
            if self._format.is_open:
                yield from self._attempt(*next(iter(self._frames.values())), num_read=0)
            elif self._format.is_bare:
                yield from self._bare_calls()
            while True:
                begin, end = yield from self._find_frame()
                yield from self._attempt(begin, end, num_read=len(begin))
        except EndOfText:
            pass

    def _bare_calls(self) -> Reading[None]:
        """Calls without a frame, if the answer begins with them."""
        reader = self._reader
        reader.mark = 0
        try:
            yield from reader.skip_space()
            character = yield from reader.peek()
            is_fenced = character == "`" and (yield from reader.take(_FENCE))
            if is_fenced:
                yield from reader.take("json")
                yield from reader.skip_space()
                character = yield from reader.peek()
        except EndOfText:
            character, is_fenced = "", False
        start, reader.mark = reader.mark, None
        assert start is not None
        place, reader.at = reader.at, start
        if character in ("{", "["):
            reader.at = place
            yield from self._attempt("", _FENCE if is_fenced else "", num_read=0, start=start)

    def _find_frame(self) -> Reading[tuple[str, str]]:
        """Pass on text up to the beginning of a frame, and take that. Raises EndOfText."""
        reader = self._reader
        while True:
            if self._literals and (found := self._pattern.search(reader.text, reader.at)):
                self._add_text(reader.text[reader.at : found.start()])
                reader.at = found.end()
                if found[0] in self._frames:
                    return self._frames[found[0]]
                self._space += found[0]
                continue
            num_begun = 0 if reader.is_over else reader.num_begun(self._literals)
            end = len(reader.text) - num_begun
            self._add_text(reader.text[reader.at : end])
            reader.at = end
            if reader.is_over:
                raise EndOfText
            yield

    def _attempt(self, begin: str, end: str, *, num_read: int, start: int | None = None) -> Reading[None]:
        """Read the calls of a frame that has begun; text stays text where there are none."""
        reader = self._reader
        reader.mark = reader.at - num_read if start is None else start
        self._skipped = num_read
        try:
            yield from self._frame(begin, end)
        except (_NoCall, EndOfText):
            if self._is_open:
                yield from self._rest_of_call(end)
            else:
                self._held.clear()
                self._fragment = ""
                start = reader.mark
                assert start is not None
                reader.at = start + self._skipped
                self._add_text(reader.text[start : reader.at])
        finally:
            reader.mark = None

    def _frame(self, begin: str, end: str) -> Reading[None]:
        body, reader = self._format.body, self._reader
        yield from reader.skip_space()
        if isinstance(body, (PythonBody, PairsBody)) and begin:
            yield from self._whole_body(body, end)
            return
        if (yield from reader.peek()) in ("{", "["):
            yield from self._json_body(body if isinstance(body, JsonBody) else _ANY_JSON, is_bare=not begin)
        elif isinstance(body, NamedBody):
            if not (yield from self._named_body(body)):
                return
        elif isinstance(body, TagBody):
            yield from self._tag_body(body, is_begun=begin == body.begin)
        else:
            raise _NoCall
        place = reader.at
        try:
            yield from reader.skip_space()
            if end and (yield from reader.take(end)):
                place = reader.at
        finally:
            reader.at = place

    # Calls as JSON

    def _json_body(self, body: JsonBody, *, is_bare: bool) -> Reading[None]:
        reader = self._reader
        is_list = yield from reader.take("[")
        while True:
            yield from reader.skip_space()
            yield from self._json_call(body, is_bare=is_bare)
            place = reader.at
            try:
                yield from reader.skip_space()
                if is_list and (yield from reader.take("]")):
                    self._keep()
                    return
                separated = (yield from reader.take(",")) or (not is_list and (yield from reader.take(";")))
                yield from reader.skip_space()
                if not (separated or not is_list) or (yield from reader.peek()) != "{":
                    raise _NoCall
            except (_NoCall, EndOfText):
                reader.at = place
                if is_list:
                    raise
                return

    def _json_call(self, body: JsonBody, *, is_bare: bool) -> Reading[None]:
        """A call is complete with its arguments; keys behind them mean nothing."""
        reader, name, arguments, num_calls = self._reader, "", "", self._num_calls
        yield from self._require("{")
        yield from reader.skip_space()
        while (yield from reader.peek()) != "}":
            key = json.loads((yield from self._string()))
            yield from reader.skip_space()
            yield from self._require(":")
            yield from reader.skip_space()
            if self._num_calls > num_calls:
                yield from self._value()
            elif body.is_keyed:
                yield from self._arguments(key)
            elif key in body.names and not name and (yield from reader.peek()) == '"':
                name = json.loads((yield from self._string()))
                self._require_known(name)
                if arguments:
                    self._pass_on(name, arguments)
            elif key in body.arguments and name:
                yield from self._arguments(name)
            elif key in body.arguments and not arguments:
                arguments = _as_object((yield from self._value()))
            else:
                yield from self._value()
            yield from reader.skip_space()
            if (yield from reader.take(",")):
                yield from reader.skip_space()
                if (yield from reader.peek()) == '"':
                    continue
            yield from self._require_next("}")
        reader.at += 1
        if self._num_calls == num_calls:
            self._require_known(name)
            if is_bare:
                raise _NoCall
            self._pass_on(name, "{}")
        self._keep()

    def _require_next(self, character: str) -> Reading[None]:
        if (yield from self._reader.peek()) != character:
            raise _NoCall

    def _arguments(self, name: str) -> Reading[None]:
        """Pass on arguments as they come; a text that holds them, and null, once they are whole."""
        yield from self._reader.skip_space()
        if (yield from self._reader.peek()) != "{":
            self._pass_on(name, _as_object((yield from self._value())))
            return
        self._begin_call(name)
        yield from self._value(is_passed_on=True)
        self._end_call()

    def _string(self) -> Reading[str]:
        if (yield from self._reader.peek()) != '"':
            raise _NoCall
        return (yield from self._value())

    def _value(self, *, is_passed_on: bool = False) -> Reading[str]:
        """Take a JSON value."""
        scanner, parts = JsonScanner(), []
        while not scanner.is_done:
            character = yield from self._reader.next()
            try:
                added = scanner.push(character)
            except ValueError:
                self._reader.at -= 1
                raise _NoCall from None
            if added is None:
                self._reader.at -= 1
            elif is_passed_on:
                self._fragment += added
            else:
                parts.append(added)
        return "".join(parts)

    # Calls with a name before their arguments

    def _named_body(self, body: NamedBody) -> Reading[bool]:
        """Whether there is a call; otherwise text follows."""
        reader = self._reader
        for text in body.before:
            yield from reader.take(text)
        name = _NUMBER.sub("", (yield from reader.take_while(_is_of_name)))
        first, *others = body.between
        if name == body.text_name:
            yield from reader.take(first)
            self._keep()
            return False
        self._require_known(name)
        for text in others:
            if (yield from reader.take(text)):
                yield from reader.take_until(first, lambda text: None)
                break
        else:
            yield from reader.skip_space()
            yield from reader.take(first.strip())
        yield from reader.skip_space()
        if (yield from reader.peek()) != "{":
            raise _NoCall
        self._begin_call(name)
        yield from self._value(is_passed_on=True)
        self._end_call()
        if body.after:
            try:
                yield from reader.skip_space()
                if (yield from reader.take(body.after.strip())):
                    self._keep()
            except EndOfText:
                pass
        return True

    def _tag_body(self, body: TagBody, *, is_begun: bool) -> Reading[None]:
        reader = self._reader
        if body.begin and not is_begun:
            yield from self._require(body.begin)
        name = yield from reader.take_while(_is_of_name)
        self._require_known(name)
        yield from reader.skip_space()
        yield from self._require(body.name_end)
        num_keys = 0
        while True:
            yield from reader.skip_space()
            if not (yield from reader.take(body.key)):
                break
            parts: list[str] = []
            yield from reader.take_until(body.key_end, parts.append)
            if body.value:
                yield from reader.skip_space()
                yield from self._require(body.value)
            if not num_keys:
                self._begin_call(name)
            key, kind = _key_and_type(body, self._tools[name], "".join(parts).strip())
            self._fragment += ("{" if not num_keys else ", ") + json.dumps(key) + ": "
            num_keys += 1
            yield from self._tagged_value(body, kind)
        if body.end:
            yield from self._require(body.end)
        if not num_keys:
            self._begin_call(name)
        self._fragment += "}" if num_keys else "{}"
        self._end_call()

    def _tagged_value(self, body: TagBody, kind: Any) -> Reading[None]:
        if kind != "string":
            parts: list[str] = []
            yield from self._reader.take_until(body.value_end, parts.append)
            text = "".join(parts)
            self._fragment += _as_json(text.removeprefix(body.space).removesuffix(body.space))
            return
        if body.space:
            yield from self._reader.take(body.space)
        self._fragment += '"'
        held = ""

        def pass_on(text: str) -> None:  # all but the space at the end
            nonlocal held
            text = held + text
            held = body.space if body.space and text.endswith(body.space) else ""
            self._fragment += json.dumps(text.removesuffix(held), ensure_ascii=False)[1:-1]

        yield from self._reader.take_until(body.value_end, pass_on)
        self._fragment += '"'

    def _whole_body(self, body: PythonBody | PairsBody, end: str) -> Reading[None]:
        """Calls in a notation that is read once it is whole."""
        parts: list[str] = []
        with suppress(EndOfText):  # models may end an answer in the place of the frame
            yield from self._reader.take_until(end, parts.append)
        try:
            if isinstance(body, PairsBody):
                calls = [parse_pairs("".join(parts), body.quote)]
            else:
                calls = parse_python("".join(parts), {name: _argument_names(t) for name, t in self._tools.items()})
        except ValueError:
            raise _NoCall from None
        self._pass_on_all(calls)

    def _pass_on_all(self, calls: Sequence[WrittenCall]) -> None:
        for call in calls:
            self._require_known(call.name)
        for call in calls:
            self._pass_on(call.name, write_json(dict(call.arguments)))

    # What is passed on

    def _require(self, literal: str) -> Reading[None]:
        if not (yield from self._reader.take(literal)):
            raise _NoCall

    def _require_known(self, name: object) -> None:
        if not isinstance(name, str) or name not in self._tools:
            raise _NoCall

    def _pass_on(self, name: str, arguments: str) -> None:
        self._begin_call(name)
        self._fragment += arguments
        self._end_call()

    def _begin_call(self, name: str) -> None:
        self._require_known(name)
        self._add(CallStart(self._num_calls, name))
        if not self._holds_arguments:
            self._space, self._is_text_last, self._is_open = "", False, True

    def _end_call(self) -> None:
        self._add(CallEnd(self._num_calls))
        self._num_calls += 1
        self._events += self._held
        self._held = []
        self._space, self._is_text_last, self._is_open = "", False, False
        self._keep()

    def _keep(self) -> None:
        """Never go back behind here."""
        self._reader.mark, self._skipped = self._reader.at, 0

    def _rest_of_call(self, end: str) -> Reading[None]:
        """Pass on the rest of a call that has broken, as it is."""

        def pass_on(text: str) -> None:
            self._fragment += text

        reader = self._reader
        while not end:
            pass_on(reader.text[reader.at :])
            reader.at = len(reader.text)
            if reader.is_over:
                raise EndOfText
            yield
        yield from reader.take_until(end, pass_on)
        self._end_call()

    def _add(self, event: CallEvent) -> None:
        self._flush_fragment()
        (self._held if self._holds_arguments else self._events).append(event)

    def _flush_fragment(self) -> None:
        if self._fragment:
            event = CallArguments(self._num_calls, self._fragment)
            self._fragment = ""
            self._add(event)

    def _add_text(self, text: str) -> None:
        body = text.rstrip()
        if body:
            self._events.append(TextPart(self._space + body))
            self._space, self._is_text_last = "", True
        self._space += text[len(body) :]


def _is_of_name(character: str) -> bool:
    return character.isalnum() or character in "_-:"


def _argument_names(tool: Tool) -> list[str]:
    return list(tool.parameters.get("properties", {}))


def _key_and_type(body: TagBody, tool: Tool, written: str) -> tuple[str, Any]:
    """The name of an argument, and the type of its value: as the model says, or else its schema."""
    for mark, kind in zip(body.kinds, ("string", None), strict=True):
        if mark and written.endswith(mark):
            return written.removesuffix(mark), kind
    return written, _type_of(tool, written)


def _type_of(tool: Tool, key: str) -> Any:
    schema = tool.parameters.get("properties", {}).get(key)
    return schema.get("type") if isinstance(schema, Mapping) else None


def _as_json(text: str) -> str:
    """A value that stands as JSON or, where it is none, as text."""
    try:
        load_json(text)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text.strip()


def _as_object(value: str) -> str:
    """Arguments as an object of JSON, from a value that is one, or null, or a text that holds one."""
    try:
        found = load_json(value)
        if isinstance(found, str):
            value, found = escape_halves(found), load_json(found)
    except (ValueError, RecursionError):
        raise _NoCall from None
    if found is None:
        return "{}"
    if not isinstance(found, dict):
        raise _NoCall
    return value
