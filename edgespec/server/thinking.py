"""Reasoning of thinking models: its switch, its text apart from the answer's, and its tokens.

In chat completions it is reasoning_content beside content, as DeepSeek's API, vLLM and llama.cpp have it; in
responses it is an item of the type reasoning.
"""

from collections.abc import Sequence
from typing import Any

from edgespec import Engine, ReasoningStream, TextStream, split_reasoning
from edgespec.server.answer_fields import AnswerRequest
from edgespec.server.errors import ApiError
from edgespec.server.protocol import ChatRequest, ResponsesRequest

_SWITCH = "enable_thinking"
# Of Qwen's API, vLLM and llama.cpp.
_BUDGETS = ("thinking_budget", "thinking_token_budget", "thinking_budget_tokens")
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


def thinking_of(asked: ChatRequest | ResponsesRequest, engine: Engine) -> bool | None:
    """True if the model is to reason first; None where the request leaves it to a template, or that has no switch.

    Raises ApiError: 400, the switch is neither true nor false.
    """
    stated = (asked.chat_template_kwargs or {}).get(_SWITCH)
    if stated is not None and not isinstance(stated, bool):
        raise ApiError(
            400, f"{_SWITCH} is {stated!r:.40}; wanted true or false", param=f"chat_template_kwargs.{_SWITCH}"
        )
    effort = (
        asked.reasoning_effort if isinstance(asked, ChatRequest) else asked.reasoning and asked.reasoning.effort
    )
    if stated is None and effort == "none":
        stated = False
    return stated if engine.can_switch_thinking else None


def template_options_of(asked: ChatRequest | ResponsesRequest) -> dict[str, Any] | None:
    """The variables that a request gives to the chat template, beside the switch of reasoning."""
    return {name: value for name, value in (asked.chat_template_kwargs or {}).items() if name != _SWITCH} or None


def budget_of(asked: ChatRequest | ResponsesRequest, engine: Engine) -> int | None:
    """The most tokens that the model may reason; None for no bound.

    Raises ApiError: 400, it is below -1, has two values, or the model does not reason.
    """
    stated = {name: value for name in _BUDGETS if (value := getattr(asked, name)) is not None}
    for name, value in stated.items():
        if value < -1:
            raise ApiError(
                400, f"{name} is {value}; wanted a number of tokens from 0, or -1 for no bound", param=name
            )
    if len(set(stated.values())) > 1:
        raise ApiError(400, f"{' and '.join(stated)} are names of one thing; give one of them", param=max(stated))
    name, budget = next(iter(stated.items()), ("", -1))
    if budget == -1:
        return None
    if not engine.can_think:
        raise ApiError(
            400,
            f"{name} is given, but {asked.model or engine.manifest.name} does not reason before it answers; "
            "leave it out",
            param=name,
        )
    return budget


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
