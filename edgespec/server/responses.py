"""POST /v1/responses, without a store: a client sends the whole conversation each time."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field
from time import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgespec.decoding.logprobs import TokenLogprob
from edgespec.decoding.sampling import SamplingParams
from edgespec.engine.engine import Engine
from edgespec.server.answer_fields import drafting_of, sampling_of
from edgespec.server.answers import Answers, Plan, Services, open_answers
from edgespec.server.chat_completions import conversation_of
from edgespec.server.client import read_request, run_for_client, run_until_closing
from edgespec.server.engine_adapter import AnswerRequest, default_sampling
from edgespec.server.errors import ApiError
from edgespec.server.identity import Identity, new_identity
from edgespec.server.limits import Limits
from edgespec.server.logprobs import TokenWords, token_entries
from edgespec.server.priority import priority_of
from edgespec.server.protocol import (
    ChatMessage,
    ResponsesRequest,
    answer_length,
    require_no_forced_tool,
    require_text_format,
    within,
)
from edgespec.server.request_log import Record, record_of
from edgespec.server.sse import EventStream, event

_LOGPROBS = "message.output_text.logprobs"  # in include


async def responses(services: Services, request: Request) -> Response:
    asked = await read_request(ResponsesRequest, request, services.limits)
    plan, record = plan_of(asked, services.limits), record_of(request.scope)
    writing = _Writing(asked, new_identity("resp_"), new_identity("msg_").id)
    if asked.stream:
        return EventStream(_events(services, plan, record, writing), services.limits, services.drain.is_closing)
    work = run_until_closing(services.drain.is_closing, _document(services, plan, record, writing))
    return JSONResponse(await run_for_client(request.receive, work))


def plan_of(asked: ResponsesRequest, limits: Limits) -> Plan:
    """The answer that a request asks for. Raises ApiError: 400, it asks for what cannot be."""
    for name in ("previous_response_id", "conversation", "prompt", "background"):
        if getattr(asked, name):
            raise ApiError(
                400, f"{name} is given, and nothing is stored here; send the whole conversation", param=name
            )
    require_text_format(asked.text.format if asked.text else None, "text.format")
    require_no_forced_tool(asked.tool_choice)
    max_tokens = answer_length("max_output_tokens", asked.max_output_tokens, limits)
    top = within("top_logprobs", asked.top_logprobs, 0, limits.num_top_logprobs)
    messages, prefill = conversation_of(list(_stated_messages(asked)))
    priority = priority_of(asked)

    def requests(engine: Engine) -> Sequence[AnswerRequest]:
        return [
            AnswerRequest(
                prompt=messages,
                sampling=sampling_of(asked, default_sampling(engine), limits),
                max_tokens=max_tokens,
                prefill=prefill,
                num_top_logprobs=top or (0 if _LOGPROBS in (asked.include or ()) else None),
                drafting=drafting_of(asked.speculation, None, engine.open_drafters),
                priority=priority,
            )
        ]

    return Plan(model=asked.model, num_answers=1, requests=requests)


def _stated_messages(asked: ResponsesRequest) -> Iterator[ChatMessage]:
    """The instructions and the input as the messages of a chat."""
    if asked.instructions:
        yield ChatMessage(role="system", content=asked.instructions)
    if isinstance(asked.input, str):
        yield ChatMessage(role="user", content=asked.input)
        return
    for i, item in enumerate(asked.input):
        if item.type == "reasoning":  # of an earlier answer; no template here takes it
            continue
        if item.type != "message" or item.role is None:
            raise ApiError(
                400,
                f"input[{i}] is of the type '{item.type[:40]}'; models here read messages alone",
                param="input",
            )
        yield ChatMessage(role=item.role, content=item.content)


@dataclass(slots=True)
class _Writing:
    """The response as far as it has come."""

    asked: ResponsesRequest
    identity: Identity
    item_id: str
    model: str = ""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    reason: str | None = None  # why the answer ended
    usage: dict[str, Any] | None = None

    def begin(self, answers: Answers) -> None:
        self.model = answers.model.name
        self.sampling = answers.requests[0].sampling

    def end(self, answers: Answers) -> None:
        self.usage = _usage(answers.usage())

    @property
    def is_whole(self) -> bool:
        return self.reason == "stop"

    @property
    def status(self) -> str:
        return "in_progress" if self.reason is None else "completed" if self.is_whole else "incomplete"

    def document(self) -> dict[str, Any]:
        """The response object, with every field that clients check for."""
        asked, has_ended = self.asked, self.reason is not None
        return {
            "id": self.identity.id,
            "object": "response",
            "created_at": self.identity.created,
            "completed_at": int(time()) if self.is_whole else None,
            "status": self.status,
            "incomplete_details": {"reason": "max_output_tokens"} if has_ended and not self.is_whole else None,
            "model": self.model,
            "previous_response_id": None,
            "instructions": asked.instructions,
            "output": [self.item()] if has_ended else [],
            "error": None,
            "tools": [],
            "tool_choice": "auto",
            "truncation": "disabled",
            "parallel_tool_calls": True,
            "text": {"format": {"type": "text"}},
            "top_p": self.sampling.top_p,
            "presence_penalty": self.sampling.presence_penalty,
            "frequency_penalty": self.sampling.frequency_penalty,
            "top_logprobs": asked.top_logprobs or 0,
            "temperature": self.sampling.temperature,
            "reasoning": None,
            "usage": self.usage,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": None,
            "store": False,
            "background": False,
            "service_tier": "default",
            "metadata": asked.metadata or {},
            "safety_identifier": None,
            "prompt_cache_key": None,
        }

    def item(self) -> dict[str, Any]:
        """The message that is the answer; empty until it has ended."""
        content = [] if self.reason is None else [self.part()]
        return {
            "type": "message",
            "id": self.item_id,
            "status": self.status,
            "role": "assistant",
            "content": content,
        }

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """The usage of completions under the names that responses have."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
        "speculation": usage["speculation"],
    }


async def _document(services: Services, plan: Plan, record: Record, writing: _Writing) -> dict[str, Any]:
    async with open_answers(services, plan, record) as answers:
        writing.begin(answers)
        (answer,) = await answers.complete()
        writing.text, writing.reason = answer.text, answer.finish_reason
        writing.logprobs = _entries(answer.logprobs, answers)
        writing.end(answers)
        return writing.document()


async def _events(
    services: Services, plan: Plan, record: Record, writing: _Writing
) -> AsyncGenerator[bytes, None]:
    async with open_answers(services, plan, record) as answers:
        writing.begin(answers)
        numbered = _Numbered()
        place = {"item_id": writing.item_id, "output_index": 0, "content_index": 0}
        yield numbered("response.created", response=writing.document())
        yield numbered("response.in_progress", response=writing.document())
        yield numbered("response.output_item.added", output_index=0, item=writing.item())
        yield numbered("response.content_part.added", **place, part=writing.part())
        chunks = answers.chunks()
        try:
            async for _, chunk in chunks:
                entries = _entries(chunk.logprobs, answers)
                writing.text += chunk.text
                writing.logprobs += entries
                writing.reason = chunk.finish_reason or writing.reason
                if chunk.text or entries:
                    yield numbered("response.output_text.delta", **place, delta=chunk.text, logprobs=entries)
        finally:
            await chunks.aclose()
        writing.end(answers)
        yield numbered("response.output_text.done", **place, text=writing.text, logprobs=writing.logprobs)
        yield numbered("response.content_part.done", **place, part=writing.part())
        yield numbered("response.output_item.done", output_index=0, item=writing.item())
        ended = "response.completed" if writing.is_whole else "response.incomplete"
        yield numbered(ended, response=writing.document())


class _Numbered:
    """Events with the numbers that clients order them by."""

    def __init__(self) -> None:
        self._number = 0

    def __call__(self, name: str, **fields: Any) -> bytes:
        made = event({"type": name, "sequence_number": self._number, **fields}, name)
        self._number += 1
        return made


def _entries(found: Sequence[TokenLogprob], answers: Answers) -> list[dict[str, Any]]:
    if not found:
        return []
    return token_entries(found, TokenWords(answers.model.spellings, answers.model.engine.tokenizer))
