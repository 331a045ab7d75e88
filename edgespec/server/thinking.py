"""Reasoning of thinking models: its text apart from the answer's, and its tokens.

In chat completions it is reasoning_content beside content, as DeepSeek's API, vLLM and llama.cpp have it; in
responses it is an item of the type reasoning.
"""

from collections.abc import Sequence
from typing import Any

from edgespec import AnswerStream, ReasoningStream, TextStream, split_reasoning
from edgespec.server.answer_fields import AnswerRequest

_NAMES = {True: "reasoning_content", False: "content"}


class ReasoningTokens:
    """Counts the tokens of an answer that are reasoning, with those of its marks: they come first.

    is_open: The prompt has opened the reasoning already.
    """

    def __init__(self, text: TextStream, *, is_open: bool) -> None:
        self.count = 0
        self.is_decided = False  # no further token is reasoning
        self._text = text
        self._reasoning = ReasoningStream(is_open=is_open)
        self._num_undecided = 0  # which may still become the opening mark

    def push(self, token_ids: Sequence[int]) -> None:
        """Take tokens of the answer, each once."""
        for token in () if self.is_decided else token_ids:
            self._num_undecided += 1
            was_open = self._reasoning.is_reasoning
            parts = self._reasoning.push(self._text.push([token]))
            if was_open or self._reasoning.is_reasoning:
                self.count += self._num_undecided
                self._num_undecided = 0
                self.is_decided = not self._reasoning.is_reasoning
            elif parts:
                self.is_decided = True
            if self.is_decided:
                return


def begins_open(request: AnswerRequest, answer: AnswerStream) -> bool | None:
    """True if an answer begins within the reasoning, and None if behind it, so that it has none."""
    options = request.options
    may_reason = not options.get("raw") and (answer.opens_reasoning or not options.get("prefill"))
    return answer.opens_reasoning if may_reason else None


def reasoning_of(is_open: bool | None) -> ReasoningStream | None:
    """Takes the reasoning of an answer from its text; is_open is as begins_open tells it."""
    return None if is_open is None else ReasoningStream(is_open=is_open)


def content_of(text: str, is_open: bool | None) -> dict[str, str]:
    """The fields of a message with an answer's text; reasoning_content only where there is reasoning."""
    if is_open is None:
        return {"content": text}
    reasoning, content = split_reasoning(text, is_open=is_open)
    return {"content": content} | ({"reasoning_content": reasoning} if reasoning else {})


def content_deltas(text: str, reasoning: ReasoningStream | None, *, is_last: bool) -> list[dict[str, Any]]:
    """The additions of a chunk's text to a message, as one field each."""
    if reasoning is None:
        return [{"content": text}] if text else []
    parts = [*reasoning.push(text), *(reasoning.end() if is_last else ())]
    return [{_NAMES[part.is_reasoning]: part.text} for part in parts]
