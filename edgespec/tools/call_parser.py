"""Finds the calls of tools in an answer while it comes. Pure: the same events however its text is cut.

What is no call is passed on as text: JSON that breaks, unknown names, braces of ordinary text. Only white space
beside calls is dropped.
"""

import re
from collections.abc import Sequence
from contextlib import suppress

from edgespec.tools.call_body import CallBodyReader, NoCall
from edgespec.tools.call_events import CallOutput, Part, StopSearch
from edgespec.tools.formats import CallFormat
from edgespec.tools.text_reader import EndOfText, Reading, TextReader, num_begun
from edgespec.tools.tool import Tool

_MOST_SKIPPED = 200  # characters between a call and the end of its frame
_FENCE = "```"  # around JSON, as models that were trained on code write it


class CallParser:
    """Text in, text and calls out.

    Arguments are passed on as they come. Where they break, or the answer ends within them, they stay as the model
    wrote them: no JSON. A parser that holds arguments passes on whole calls alone, and such a call as text.
    A stop string ends the text, and nothing comes behind it; within calls and their marks it means nothing.
    """

    def __init__(
        self,
        format: CallFormat,
        tools: Sequence[Tool],
        *,
        holds_arguments: bool = False,
        stop: StopSearch | None = None,
        is_parallel: bool = True,
    ) -> None:
        """is_parallel: The answer may have several calls."""
        self._format, self._is_parallel = format, is_parallel
        self._frames = {
            begin.strip(): (begin.strip(), end.strip()) for begin, end in format.frames if begin.strip()
        }
        noise = {text.strip() for text in (*format.noise, *format.outer)} - {""}
        self._literals = sorted((*self._frames, *noise), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._literals)))
        self._reader = TextReader()
        self.output = CallOutput(holds_arguments=holds_arguments, stop=stop)
        self._bodies = CallBodyReader(self._reader, self.output, {tool.name: tool for tool in tools})
        self._run = self._read()
        next(self._run)

    @property
    def is_over(self) -> bool:
        """True if the answer has all the calls that it may have, or a stop string has ended it."""
        return self.output.is_stopped or (not self._is_parallel and self.output.num_calls > 0)

    @property
    def num_held(self) -> int:
        """Characters that wait until it is clear if they are a call, or that nobody reads behind a stop string."""
        return len(self._reader.text) - (self._reader.at if self._reader.mark is None else self._reader.mark)

    def push(self, text: str) -> list[Part]:
        """Read a piece of the answer."""
        self._reader.add(text)
        next(self._run, None)  # it ends with a stop string
        return self.output.take()

    def flush(self) -> list[Part]:
        """Give what was held back, when no more text comes."""
        self._reader.is_over = True
        for _ in self._run:
            pass
        self.output.end_text()
        return self.output.take()

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
        while not self.output.is_stopped:
            if self._literals and (found := self._pattern.search(reader.text, reader.at)):
                self.output.add_text(reader.text[reader.at : found.start()])
                reader.at = found.end()
                if found[0] in self._frames:
                    return self._frames[found[0]]
                self.output.add_noise(found[0])
                continue
            num_held = 0 if reader.is_over else num_begun(reader.text, self._literals, reader.at)
            end = len(reader.text) - num_held
            self.output.add_text(reader.text[reader.at : end])
            reader.at = end
            if reader.is_over:
                break
            yield
        raise EndOfText

    def _attempt(self, begin: str, end: str, *, num_read: int, start: int | None = None) -> Reading[None]:
        """Read the calls of a frame that has begun; text stays text where there are none."""
        reader = self._reader
        start = reader.at - num_read if start is None else start
        reader.mark = start
        try:
            yield from reader.skip_space()
            if (yield from self._bodies.read(self._format.body, begin, end)):
                yield from self._skip_to_end(end)
        except (NoCall, EndOfText):
            if self.output.is_open:
                yield from self._rest_of_call(end)
                return
            self.output.drop_call()
            kept = reader.mark
            reader.at = kept if kept > start else start + num_read  # what was read begins no other call
            self.output.add_text(reader.text[kept : reader.at])
            if kept > start:
                yield from self._skip_to_end(end)
        finally:
            reader.mark = None

    def _skip_to_end(self, end: str) -> Reading[None]:
        """Leave out what stands between a call and the end of its frame, as where braces are missing or too many.

        Where that end does not come soon, or something that may be another call comes first, it stays text.
        """
        reader, place = self._reader, self._reader.at
        with suppress(EndOfText):
            for _ in range(_MOST_SKIPPED):
                if end and (yield from reader.take(end)):
                    place = reader.at
                    break
                character = yield from reader.next()
                if character in "{<[" or not (end or character.isspace() or character in "]}"):
                    break
                if character in "]}" and not end:
                    place = reader.at
        reader.at = place

    def _rest_of_call(self, end: str) -> Reading[None]:
        """Pass on the rest of a call that has broken, as it is."""
        reader = self._reader
        while not end:
            self.output.add_arguments(reader.text[reader.at :])
            reader.at = len(reader.text)
            if reader.is_over:
                raise EndOfText
            yield
        yield from reader.take_until(end, self.output.add_arguments)
        self.output.end_call()
