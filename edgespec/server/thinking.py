"""Reasoning of thinking models: its text apart from the answer's, and its tokens.

In chat completions it is reasoning_content beside content, as DeepSeek's API, vLLM and llama.cpp have it; in
responses it is an item of the type reasoning.
"""

from collections.abc import Sequence
from typing import Any

from edgespec import Engine, ReasoningStream, TextStream, split_reasoning
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


def reasoning_of(request: AnswerRequest) -> ReasoningStream | None:
    """Takes the reasoning of an answer from its text; None where it begins behind the reasoning."""
    return ReasoningStream(is_open=request.opens_reasoning) if _may_reason(request) else None


def count_reasoning(request: AnswerRequest, engine: Engine) -> ReasoningTokens | None:
    """Counts the reasoning of an answer, where reasoning_of looks for it."""
    if not _may_reason(request):
        return None
    return ReasoningTokens(TextStream(engine.tokenizer), is_open=request.opens_reasoning)


def _may_reason(request: AnswerRequest) -> bool:
    options = request.options
    return not options.get("raw") and (request.opens_reasoning or not options.get("prefill"))


def content_of(text: str, request: AnswerRequest) -> dict[str, str]:
    """The fields of a message with an answer's text; reasoning_content only where there is reasoning."""
    if not _may_reason(request):
        return {"content": text}
    reasoning, content = split_reasoning(text, is_open=request.opens_reasoning)
    return {"content": content} | ({"reasoning_content": reasoning} if reasoning else {})


def content_deltas(text: str, reasoning: ReasoningStream | None, *, is_last: bool) -> list[dict[str, Any]]:
    """The additions of a chunk's text to a message, as one field each."""
    if reasoning is None:
        return [{"content": text}] if text else []
    parts = [*reasoning.push(text), *(reasoning.end() if is_last else ())]
    return [{_NAMES[part.is_reasoning]: part.text} for part in parts]
