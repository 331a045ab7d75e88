"""POST /v1/chat/completions"""

from collections.abc import AsyncGenerator, Iterator
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from edgespec import CallArguments, CallStart, Chunk, Completion, ReasoningStream
from edgespec.server.answer_fields import AnswerPlan, format_of, talk_plan
from edgespec.server.answer_parts import Identity, TokenWords, chat_logprobs, new_identity
from edgespec.server.answers import Answers, Services, choice_events, respond
from edgespec.server.errors import wrong
from edgespec.server.limits import Limits
from edgespec.server.messages import conversation_of
from edgespec.server.protocol import ChatRequest, answer_length, within
from edgespec.server.thinking import content_deltas, content_of, reasoning_of

_REASONS = {"stop": "stop", "tool_calls": "tool_calls"}  # of the end of an answer; any other is "length"


async def chat_completions(services: Services, request: Request) -> Response:
    asked = await services.bodies.read(ChatRequest, request)
    plan, identity = chat_plan(asked, services.limits), new_identity("chatcmpl-")
    events = partial(_events, asked, identity) if asked.stream else None
    return await respond(services, request, plan, partial(_document, asked, identity), events)


def chat_plan(asked: ChatRequest, limits: Limits) -> AnswerPlan:
    """The answers that a request asks for. Raises ApiError: 400, it asks for what cannot be."""
    num_answers = within("n", asked.n, 1, limits.num_choices) or 1
    top = within("top_logprobs", asked.top_logprobs, 0, limits.num_top_logprobs)
    if top is not None and not asked.logprobs:
        raise wrong("top_logprobs", "is given without logprobs; set logprobs to true")
    name = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
    return talk_plan(
        asked,
        conversation_of(asked.messages),
        format_of(asked),
        limits,
        max_tokens=answer_length(name, getattr(asked, name), limits),
        logprobs=(top or 0) if asked.logprobs else None,
        prediction=asked.prediction,
        num_answers=num_answers,
    )


async def _document(asked: ChatRequest, identity: Identity, answers: Answers) -> dict[str, Any]:
    words = answers.model.words if asked.logprobs else None
    made = zip(await answers.complete(), answers.are_open, strict=True)
    choices = [_choice(i, answer, is_open, words) for i, (answer, is_open) in enumerate(made)]
    return {**answers.head(identity, "chat.completion"), "choices": choices, **answers.tail()}


def _choice(index: int, answer: Completion, is_open: bool | None, words: TokenWords | None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", **content_of(answer.text, is_open), "refusal": None}
    if answer.tool_calls:
        calls = [call.as_dict() for call in answer.tool_calls]
        message |= {"content": message["content"] or None, "tool_calls": calls}
    return {
        "index": index,
        "message": message,
        "logprobs": chat_logprobs(answer.logprobs, words) if words else None,
        "finish_reason": _REASONS.get(answer.finish_reason, "length"),
    }


def _events(asked: ChatRequest, identity: Identity, answers: Answers) -> AsyncGenerator[bytes, None]:
    head = answers.head(identity, "chat.completion.chunk")
    words = answers.model.words if asked.logprobs else None
    reasoning = [*map(reasoning_of, answers.are_open)]
    firsts = [_delta(i, {"role": "assistant", "content": ""}) for i in range(len(answers.requests))]

    def choices(index: int, chunk: Chunk) -> list[dict[str, Any]]:
        return _deltas(index, chunk, words, reasoning[index])

    return choice_events(answers, head, firsts, choices, has_usage=asked.has_usage)


def _deltas(
    index: int, chunk: Chunk, words: TokenWords | None, reasoning: ReasoningStream | None
) -> list[dict[str, Any]]:
    """The additions of a chunk to a choice; its end is by itself, as some clients read no text beside it."""
    logprobs = chat_logprobs(chunk.logprobs, words) if words and chunk.logprobs else None
    added = content_deltas(chunk.text, reasoning, is_last=chunk.finish_reason is not None)
    if logprobs and not added:
        added = [{"content": ""}]
    found = [_delta(index, delta, logprobs if i == 0 else None) for i, delta in enumerate(added)]
    found += [_delta(index, {"tool_calls": [delta]}) for delta in _call_deltas(chunk)]
    if chunk.finish_reason:
        found.append(_delta(index, {}, None, _REASONS.get(chunk.finish_reason, "length")))
    return found


def _call_deltas(chunk: Chunk) -> Iterator[dict[str, Any]]:
    """The additions of a chunk to the calls of a choice, each in a delta of its own."""
    for each in chunk.tool_calls:
        if isinstance(each, CallStart):
            function = {"name": each.name, "arguments": ""}
            yield {"index": each.index, "id": each.id, "type": "function", "function": function}
        elif isinstance(each, CallArguments):
            yield {"index": each.index, "function": {"arguments": each.text}}


def _delta(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
