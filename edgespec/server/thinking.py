"""Reasoning of thinking models in chat completions: its switch, and its text apart from the answer's.

reasoning_content beside content, as DeepSeek's API, vLLM and llama.cpp have it.
"""

from collections.abc import Sequence
from typing import Any

from edgespec.engine.engine import Engine
from edgespec.engine.reasoning import Part, ReasoningStream, split_reasoning
from edgespec.server.engine_adapter import AnswerRequest
from edgespec.server.errors import ApiError
from edgespec.server.protocol import ChatRequest

_SWITCH = "enable_thinking"
_NAMES = {True: "reasoning_content", False: "content"}


def thinking_of(asked: ChatRequest, engine: Engine) -> bool | None:
    """Whether the model is to reason first; None where the request leaves it to a template, or that has no switch.

    Raises ApiError: 400, the switch is neither true nor false.
    """
    stated = (asked.chat_template_kwargs or {}).get(_SWITCH)
    if stated is not None and not isinstance(stated, bool):
        raise ApiError(
            400, f"{_SWITCH} is {stated!r:.40}; wanted true or false", param=f"chat_template_kwargs.{_SWITCH}"
        )
    if stated is None and asked.reasoning_effort == "none":
        stated = False
    return stated if engine.can_switch_thinking else None


def reasoning_of(request: AnswerRequest) -> ReasoningStream | None:
    """Takes the reasoning of an answer from its text; None where the request has given the answer's beginning."""
    return None if request.prefill else ReasoningStream(is_open=request.opens_reasoning)


def content_of(text: str, request: AnswerRequest) -> dict[str, str]:
    """The fields of a message with an answer's text; reasoning_content only where there is reasoning."""
    if request.prefill:
        return {"content": text}
    reasoning, content = split_reasoning(text, is_open=request.opens_reasoning)
    return {"content": content} | ({"reasoning_content": reasoning} if reasoning else {})


def content_deltas(text: str, reasoning: ReasoningStream | None, *, is_last: bool) -> list[dict[str, Any]]:
    """What a chunk's text adds to a message, as one field each."""
    if reasoning is None:
        return [{"content": text}] if text else []
    parts: Sequence[Part] = [*reasoning.push(text), *(reasoning.end() if is_last else ())]
    return [{_NAMES[part.is_reasoning]: part.text} for part in parts]
