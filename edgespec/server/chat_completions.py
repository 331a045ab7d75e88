"""POST /v1/chat/completions"""

from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgespec.engine.answers import Chunk, Completion
from edgespec.engine.engine import Engine
from edgespec.engine.reasoning import ReasoningStream
from edgespec.errors import UsageError
from edgespec.server.answer_fields import drafting_of, format_of, sampling_of
from edgespec.server.answers import Answers, Plan, Services, open_answers, write_answers
from edgespec.server.client import read_request, run_for_client, run_until_closing
from edgespec.server.engine_adapter import AnswerRequest, default_sampling, fingerprint
from edgespec.server.errors import ApiError
from edgespec.server.identity import Identity, new_identity
from edgespec.server.limits import Limits
from edgespec.server.logprobs import TokenWords, chat_logprobs
from edgespec.server.priority import priority_of
from edgespec.server.protocol import (
    ChatMessage,
    ChatRequest,
    answer_length,
    stop_strings,
    text_of,
    within,
)
from edgespec.server.request_log import Record, record_of
from edgespec.server.sse import DONE, EventStream, event
from edgespec.server.thinking import budget_of, content_deltas, content_of, reasoning_of, thinking_of
from edgespec.server.tool_fields import call_deltas, tool_notes, tool_use_of
from edgespec.tokenization.chat_template import Message, Turn
from edgespec.tools.messages import CallMessage, ResultMessage, parse_calls, require_answerable

_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
_REASONS = {"stop": "stop", "tool_calls": "tool_calls"}  # of the end of an answer; any other is "length"


async def chat_completions(services: Services, request: Request) -> Response:
    asked = await read_request(ChatRequest, request, services.limits)
    plan, record = plan_of(asked, services.limits), record_of(request.scope)
    identity = new_identity("chatcmpl-")
    if asked.stream:
        events = _events(services, plan, record, asked, identity)
        return EventStream(events, services.limits, services.drain.is_closing)
    work = run_until_closing(services.drain.is_closing, _document(services, plan, record, asked, identity))
    return JSONResponse(await run_for_client(request.receive, work))


def plan_of(asked: ChatRequest, limits: Limits) -> Plan:
    """The answers that a request asks for. Raises ApiError: 400, it asks for what cannot be."""
    num_answers = within("n", asked.n, 1, limits.num_choices) or 1
    top = within("top_logprobs", asked.top_logprobs, 0, limits.num_top_logprobs)
    if top is not None and not asked.logprobs:
        raise ApiError(400, "top_logprobs is given without logprobs; set logprobs to true", param="top_logprobs")
    use = tool_use_of(asked)
    messages, prefill = conversation_of(asked.messages)
    name = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = answer_length(name, getattr(asked, name), limits)
    stop = stop_strings(asked.stop, limits)
    priority = priority_of(asked)

    def requests(engine: Engine) -> Sequence[AnswerRequest]:
        drafting = drafting_of(asked.speculation, asked.prediction, engine.open_drafters)
        thinking = thinking_of(asked, engine)
        opens_reasoning = not prefill and engine.opens_reasoning(messages, thinking=thinking)
        return [
            AnswerRequest(
                prompt=messages,
                sampling=sampling_of(asked, default_sampling(engine), limits, i),
                max_tokens=max_tokens,
                stop=stop,
                prefill=prefill,
                num_top_logprobs=(top or 0) if asked.logprobs else None,
                drafting=drafting,
                response_format=format_of(asked),
                tool_use=use,
                whole_tool_calls=not asked.stream,
                priority=priority,
                thinking=thinking,
                thinking_budget=budget_of(asked, engine),
                opens_reasoning=opens_reasoning,
            )
            for i in range(num_answers)
        ]

    return Plan(model=asked.model, num_answers=num_answers, requests=requests, priority=priority)


class PlacedMessage(NamedTuple):
    """A message, and where the request has it, such as messages[2]."""

    place: str
    message: ChatMessage


def conversation_of(stated: Sequence[ChatMessage]) -> tuple[list[Turn], str]:
    """The messages of a request; as read_conversation gives them."""
    return read_conversation([PlacedMessage(f"messages[{i}]", each) for i, each in enumerate(stated)], "messages")


def read_conversation(stated: Sequence[PlacedMessage], param: str) -> tuple[list[Turn], str]:
    """The messages of a conversation, and the beginning of the answer: a last message of the assistant.

    Args:
        param: The field of the request that has them.

    Raises ApiError: 400, there is none, or one has a role or a part that models here cannot read.
    """
    try:
        messages = [_turn(each.place, each.message, param) for each in stated]
        require_answerable(messages)
    except UsageError as error:
        raise ApiError(400, str(error), param=param) from None
    prefill = ""
    if messages and isinstance(messages[-1], Message) and messages[-1].role == "assistant":
        prefill = messages.pop().content
    if not messages:
        raise ApiError(400, f"{param} has nothing to answer; give a message of the user", param=param)
    return messages, prefill


def _turn(place: str, stated: ChatMessage, param: str) -> Turn:
    text = text_of(stated.content, place)
    if stated.role == "tool":
        return ResultMessage(text, stated.tool_call_id or "", stated.name or "")
    if (role := _ROLES.get(stated.role)) is None:
        raise ApiError(
            400,
            f"{place} has the role '{stated.role[:40]}'; models here know {', '.join(_ROLES)}, tool",
            param=param,
        )
    if role == "assistant" and stated.tool_calls:
        return CallMessage(text, parse_calls(stated.tool_calls))
    return Message(role, text)


async def _document(
    services: Services, plan: Plan, record: Record, asked: ChatRequest, identity: Identity
) -> dict[str, Any]:
    async def write(answers: Answers) -> dict[str, Any]:
        words = _words(answers) if asked.logprobs else None
        made = zip(await answers.complete(), answers.requests, strict=True)
        choices = [_choice(i, answer, request, words) for i, (answer, request) in enumerate(made)]
        return {
            **_head(identity, answers, "chat.completion"),
            **tool_notes(answers.requests[0].tool_use, answers.model.engine),
            "choices": choices,
            "usage": answers.usage(),
        }

    return await write_answers(services, plan, record, write)


def _choice(index: int, answer: Completion, request: AnswerRequest, words: TokenWords | None) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", **content_of(answer.text, request), "refusal": None}
    if answer.tool_calls:
        calls = [call.as_dict() for call in answer.tool_calls]
        message |= {"content": message["content"] or None, "tool_calls": calls}
    return {
        "index": index,
        "message": message,
        "logprobs": chat_logprobs(answer.logprobs, words) if words else None,
        "finish_reason": _REASONS.get(answer.finish_reason, "length"),
    }


async def _events(
    services: Services, plan: Plan, record: Record, asked: ChatRequest, identity: Identity
) -> AsyncGenerator[bytes, None]:
    async with open_answers(services, plan, record) as answers:
        notes = tool_notes(answers.requests[0].tool_use, answers.model.engine)
        head = {**_head(identity, answers, "chat.completion.chunk"), **notes}
        words = _words(answers) if asked.logprobs else None
        has_usage = bool(asked.stream_options and asked.stream_options.include_usage)
        nothing = {"usage": None} if has_usage else {}
        reasoning = [reasoning_of(request) for request in answers.requests]
        chunks = answers.chunks()
        try:
            for i in range(plan.num_answers):
                yield event({**head, "choices": [_delta(i, {"role": "assistant", "content": ""})], **nothing})
            async for i, chunk in chunks:
                for choice in _deltas(i, chunk, words, reasoning[i]):
                    yield event({**head, "choices": [choice], **nothing})
        finally:
            await chunks.aclose()
        if has_usage:
            yield event({**head, "choices": [], "usage": answers.usage()})
        yield DONE


def _deltas(
    index: int, chunk: Chunk, words: TokenWords | None, reasoning: ReasoningStream | None
) -> list[dict[str, Any]]:
    """What a chunk adds to a choice; its end is by itself, as some clients read no text beside it."""
    logprobs = chat_logprobs(chunk.logprobs, words) if words and chunk.logprobs else None
    added = content_deltas(chunk.text, reasoning, is_last=chunk.finish_reason is not None)
    if logprobs and not added:
        added = [{"content": ""}]
    found = [_delta(index, delta, logprobs if i == 0 else None) for i, delta in enumerate(added)]
    found += [_delta(index, {"tool_calls": [delta]}) for delta in call_deltas(chunk.tool_calls)]
    if chunk.finish_reason:
        found.append(_delta(index, {}, None, _REASONS.get(chunk.finish_reason, "length")))
    return found


def _delta(
    index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _head(identity: Identity, answers: Answers, kind: str) -> dict[str, Any]:
    return {
        "id": identity.id,
        "object": kind,
        "created": identity.created,
        "model": answers.model.name,
        "system_fingerprint": fingerprint(answers.model.engine),
    }


def _words(answers: Answers) -> TokenWords:
    return TokenWords(answers.model.spellings, answers.model.engine.tokenizer)
