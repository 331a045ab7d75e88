"""Prints what a thinking model reasons dimmed, as a count, or not at all, and its answer by another printer."""

from dataclasses import replace

from rich.console import Console

from edgespec.chat.markdown.inline import Span
from edgespec.chat.markdown.line_wrap import LineWrap
from edgespec.chat.plain import Printer
from edgespec.chat.printer import print_spans, text_width
from edgespec.engine.answers import Chunk
from edgespec.engine.reasoning import ReasoningStream

_BREAK = Span("\n")


class ThinkingPrinter:
    """view is one of session.THINKING_VIEWS; is_open as for ReasoningStream."""

    def __init__(self, answer: Printer, console: Console, view: str, *, is_open: bool = False) -> None:
        self._answer, self._console, self._view = answer, console, view
        self._stream = ReasoningStream(is_open=is_open)
        self._wrap = LineWrap(lambda: text_width(console))
        self._num_tokens = 0
        self._progress = ""
        self._is_shown = self._is_told = False

    def push(self, chunk: Chunk) -> None:
        parts = self._stream.push(chunk.text)
        reasoning = "".join(part.text for part in parts if part.is_reasoning)
        if reasoning or self._stream.is_reasoning:
            self._num_tokens += len(chunk.token_ids)
            self._show(reasoning)
        if not self._stream.is_reasoning:
            self._tell_end()
        text = "".join(part.text for part in parts if not part.is_reasoning)
        self._answer.push(replace(chunk, text=text))

    def end(self) -> None:
        for part in self._stream.end():
            if part.is_reasoning:
                self._show(part.text)
            else:
                self._answer.push(Chunk(text=part.text, token_ids=()))
        self._tell_end()
        self._answer.end()

    def _show(self, text: str) -> None:
        if self._view == "show" and text:
            self._is_shown = True
            print_spans(self._console, self._wrap.push([Span(text, "dim")]))
        elif self._view == "fold" and self._num_tokens:
            self._show_progress(f"… thinking, {self._num_tokens} tokens")

    def _tell_end(self) -> None:
        if self._is_told or not self._num_tokens:
            return
        self._is_told = True
        self._show_progress("")
        if self._is_shown:
            print_spans(self._console, [*self._wrap.flush(), _BREAK, _BREAK])
        elif self._view == "fold":
            note = f"(thought for {self._num_tokens} tokens; /think show shows what)"
            print_spans(self._console, [Span(note, "dim"), _BREAK, _BREAK])

    def _show_progress(self, text: str) -> None:
        text = text[: max(0, self._console.width - 1)] if self._console.is_terminal else ""
        erase = f"\r{' ' * len(self._progress)}\r" if self._progress else ""
        self._progress = text
        self._console.file.write(erase + text)
        self._console.file.flush()
