"""Reads the calls in a frame as families of models write them: JSON, a name before JSON, tags, Python, pairs.

What is read is passed on at once where the form allows it.
"""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from edgespec.grammar.schema import allows, argument_schema
from edgespec.tools.call_events import CallOutput
from edgespec.tools.formats import Body, JsonBody, NamedBody, PairsBody, PythonBody, TagBody
from edgespec.tools.notations import escape_halves, load_json, parse_literal, parse_pairs, parse_python, write_json
from edgespec.tools.text_reader import EndOfText, JsonScanner, Reading, TextReader
from edgespec.tools.tool import Tool

_ANY_JSON = JsonBody()
_NUMBER = re.compile(r":\d+$")  # behind the name of a call, its index


class NoCall(Exception):
    """The text that was read is no call."""


class CallBodyReader:
    """Takes the calls of a frame from a reader, and gives them to an output.

    Where a call is complete, the reader's mark is set behind it: it is not read again as text.
    """

    def __init__(self, reader: TextReader, output: CallOutput, tools: Mapping[str, Tool]) -> None:
        self._reader = reader
        self._output = output
        self._tools = tools

    def read(self, body: Body, begin: str, end: str) -> Reading[bool]:
        """Take calls in a form, or as JSON; return whether the end of the frame may follow.

        Raises:
            EndOfText: It is not complete.
            NoCall: There is none.
        """
        if isinstance(body, (PythonBody, PairsBody)) and begin:
            yield from self._whole_body(body, end)
            return False
        if (yield from self._reader.peek()) in ("{", "["):
            yield from self._json_body(body if isinstance(body, JsonBody) else _ANY_JSON, is_bare=not begin)
        elif isinstance(body, NamedBody):
            return (yield from self._named_body(body))
        elif isinstance(body, TagBody):
            yield from self._tag_body(body, end, is_begun=begin == body.begin)
        else:
            raise NoCall
        return True

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
                    reader.keep()
                    return
                separated = (yield from reader.take(",")) or (not is_list and (yield from reader.take(";")))
                yield from reader.skip_space()
                if not (separated or not is_list) or (yield from reader.peek()) != "{":
                    raise NoCall
            except (NoCall, EndOfText):
                reader.at = place
                if is_list:
                    raise
                return

    def _json_call(self, body: JsonBody, *, is_bare: bool) -> Reading[None]:
        """A call is complete with its arguments; keys behind them mean nothing."""
        reader, name, arguments, num_calls = self._reader, "", "", self._output.num_calls
        yield from self._require("{")
        yield from reader.skip_space()
        while (yield from reader.peek()) != "}":
            key = json.loads((yield from self._string()))
            yield from reader.skip_space()
            yield from self._require(":")
            yield from reader.skip_space()
            if self._output.num_calls > num_calls:
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
            if (yield from reader.peek()) != "}":
                raise NoCall
        reader.at += 1
        if self._output.num_calls == num_calls:
            if is_bare:
                raise NoCall
            self._pass_on(name, "{}")
        reader.keep()

    def _arguments(self, name: str) -> Reading[None]:
        """Pass on arguments as they come; a text that holds them, and null, once they are whole."""
        yield from self._reader.skip_space()
        if (yield from self._reader.peek()) != "{":
            self._pass_on(name, _as_object((yield from self._value())))
            return
        yield from self._pass_on_object(name)

    def _pass_on_object(self, name: str) -> Reading[None]:
        """Pass on the object that comes next as the arguments of a call."""
        self._begin_call(name)
        yield from self._value(is_passed_on=True)
        self._end_call()

    def _string(self) -> Reading[str]:
        if (yield from self._reader.peek()) != '"':
            raise NoCall
        return (yield from self._value())

    def _value(self, *, is_passed_on: bool = False) -> Reading[str]:
        scanner, parts = JsonScanner(), []
        while not scanner.is_done:
            character = yield from self._reader.next()
            try:
                added = scanner.push(character)
            except ValueError:
                self._reader.at -= 1
                raise NoCall from None
            if added is None:
                self._reader.at -= 1
            elif is_passed_on:
                self._output.add_arguments(added)
            else:
                parts.append(added)
        return "".join(parts)

    # Calls with a name before their arguments

    def _named_body(self, body: NamedBody) -> Reading[bool]:
        """Take a call; False if text follows instead."""
        reader = self._reader
        for text in body.before:
            yield from reader.take(text)
        name = _NUMBER.sub("", (yield from reader.take_while(_is_of_name)))
        first, *others = body.between
        if name == body.text_name:
            yield from reader.take(first)
            reader.keep()
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
            raise NoCall
        yield from self._pass_on_object(name)
        if body.after:
            with suppress(EndOfText):
                yield from reader.skip_space()
                if (yield from reader.take(body.after.strip())):
                    reader.keep()
        return True

    def _tag_body(self, body: TagBody, end: str, *, is_begun: bool) -> Reading[None]:
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
            key, is_text = _key_and_kind(body, "".join(parts).strip())
            parameters = self._tools[name].parameters
            schema = argument_schema(parameters, key)
            if is_text is None:
                is_text = isinstance(schema, Mapping) and schema.get("type") == "string"
            self._output.add_arguments(("{" if not num_keys else ", ") + json.dumps(key) + ": ")
            num_keys += 1
            if is_text:
                yield from self._tagged_text(body)
            else:
                yield from self._tagged_value(body, partial(allows, schema, parameters))
        if body.end and not (yield from reader.take(body.end)):
            place = reader.at  # models leave it out now and then
            if not end or not (yield from reader.take(end)):
                raise NoCall
            reader.at = place
        if not num_keys:
            self._begin_call(name)
        self._output.add_arguments("}" if num_keys else "{}")
        self._end_call()

    def _tagged_value(self, body: TagBody, is_allowed: Callable[[Any], bool]) -> Reading[None]:
        parts: list[str] = []
        yield from self._reader.take_until(body.value_end, parts.append)
        text = "".join(parts).removeprefix(body.space).removesuffix(body.space)
        before, behind = body.quotes
        if before and text.startswith(before) and text.endswith(behind):
            text = text.removeprefix(before).removesuffix(behind)
        self._output.add_arguments(_as_json(text, is_allowed))

    def _tagged_text(self, body: TagBody) -> Reading[None]:
        if body.space:
            yield from self._reader.take(body.space)
        before, behind = body.quotes
        is_quoted = bool(before) and (yield from self._reader.take(before))
        self._output.add_arguments('"')
        held = ""

        def pass_on(text: str) -> None:  # all but the space at the end
            nonlocal held
            text = held + text
            held = body.space if body.space and text.endswith(body.space) else ""
            self._output.add_arguments(json.dumps(text.removesuffix(held), ensure_ascii=False)[1:-1])

        yield from self._reader.take_until(behind + body.value_end if is_quoted else body.value_end, pass_on)
        self._output.add_arguments('"')

    def _whole_body(self, body: PythonBody | PairsBody, end: str) -> Reading[None]:
        """Calls in a notation that is read once it is whole."""
        parts: list[str] = []
        with suppress(EndOfText):  # models may end an answer in the place of the frame
            yield from self._reader.take_until(end, parts.append)
        try:
            if isinstance(body, PairsBody):
                calls = [parse_pairs("".join(parts), body.quote)]
            else:
                names = {name: list(tool.parameters.get("properties", {})) for name, tool in self._tools.items()}
                calls = parse_python("".join(parts), names)
        except ValueError:
            raise NoCall from None
        for call in calls:
            self._require_known(call.name)
        for call in calls:
            self._pass_on(call.name, write_json(dict(call.arguments)))

    # What all have in common

    def _require(self, literal: str) -> Reading[None]:
        if not (yield from self._reader.take(literal)):
            raise NoCall

    def _require_known(self, name: object) -> None:
        if not isinstance(name, str) or name not in self._tools:
            raise NoCall

    def _pass_on(self, name: str, arguments: str) -> None:
        self._begin_call(name)
        self._output.add_arguments(arguments)
        self._end_call()

    def _begin_call(self, name: str) -> None:
        self._require_known(name)
        self._output.begin_call(name)

    def _end_call(self) -> None:
        self._output.end_call()
        self._reader.keep()


def _is_of_name(character: str) -> bool:
    return character.isalnum() or character in "_-:"


def _key_and_kind(body: TagBody, written: str) -> tuple[str, bool | None]:
    """The name of an argument, and whether its value is text, where the model says so."""
    for mark, is_text in zip(body.kinds, (True, False), strict=True):
        if mark and written.endswith(mark):
            return written.removesuffix(mark), is_text
    return written, None


def _as_json(text: str, is_allowed: Callable[[Any], bool]) -> str:
    """A value between tags: JSON, a text, or what Python writes, whichever its schema allows first."""
    readings: list[tuple[Any, str]] = []
    with suppress(ValueError, RecursionError):
        readings.append((load_json(text), text.strip()))
    readings.append((text, json.dumps(text, ensure_ascii=False)))
    with suppress(ValueError):
        value = parse_literal(text)
        readings.append((value, write_json(value)))
    return next((written for value, written in readings if is_allowed(value)), readings[0][1])


def _as_object(value: str) -> str:
    """Arguments as an object of JSON, from a value that is one, or null, or a text that holds one."""
    try:
        found = load_json(value)
        if isinstance(found, str):
            value, found = escape_halves(found), load_json(found)
    except (ValueError, RecursionError):
        raise NoCall from None
    if found is None:
        return "{}"
    if not isinstance(found, dict):
        raise NoCall
    return value
