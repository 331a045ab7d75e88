"""POST /v1/responses, without a store: a client sends the whole conversation each time."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgespec import (
    AnswerOptions,
    CallArguments,
    CallEnd,
    CallStart,
    Chunk,
    Engine,
    ReasoningStream,
    SamplingParams,
    ToolUse,
    in_order,
)
from edgespec.server.answer_fields import (
    AnswerRequest,
    StatedFormat,
    drafting_of,
    priority_of,
    sampling_of,
    tool_notes,
    tool_options,
    tool_use_of,
)
from edgespec.server.answer_parts import Identity, entries_of, new_identity, token_entries
from edgespec.server.answers import AnswerPlan, Answers, Services, open_answers, write_answers
from edgespec.server.client import read_request, run_for_client, run_until_closing
from edgespec.server.errors import ApiError
from edgespec.server.limits import Limits
from edgespec.server.messages import read_conversation, stated_messages
from edgespec.server.protocol import ResponsesRequest, answer_length, stop_strings, within
from edgespec.server.request_log import RequestRecord, record_of
from edgespec.server.response_items import NamedEvent, ResponseItems, flat_choice, flat_tools
from edgespec.server.sse import EventStream, event
from edgespec.server.thinking import budget_of, reasoning_of, thinking_of

_LOGPROBS = "message.output_text.logprobs"  # in include


async def responses(services: Services, request: Request) -> Response:
    asked = await read_request(ResponsesRequest, request, services.limits)
    plan, record = plan_of(asked, services.limits), record_of(request.scope)
    writing = _Writing(asked, new_identity("resp_"), tool_use_of(asked))
    if asked.stream:
        return EventStream(_events(services, plan, record, writing), services.limits, services.drain.is_closing)
    work = run_until_closing(services.drain.is_closing, _document(services, plan, record, writing))
    return JSONResponse(await run_for_client(request.receive, work))


def plan_of(asked: ResponsesRequest, limits: Limits) -> AnswerPlan:
    """The answer that a request asks for. Raises ApiError: 400, it asks for what cannot be."""
    for name in ("previous_response_id", "conversation", "prompt", "background"):
        if getattr(asked, name):
            raise ApiError(
                400, f"{name} is given, and nothing is stored here; send the whole conversation", param=name
            )
    use = tool_use_of(asked)
    max_tokens = answer_length("max_output_tokens", asked.max_output_tokens, limits)
    stop = stop_strings(asked.stop, limits)
    top = within("top_logprobs", asked.top_logprobs, 0, limits.num_top_logprobs)
    stated_format = _format_of(asked)
    messages, prefill = read_conversation(list(stated_messages(asked)), "input")
    priority = priority_of(asked)

    def requests(engine: Engine) -> Sequence[AnswerRequest]:
        thinking = thinking_of(asked, engine)
        options = AnswerOptions(
            sampling=sampling_of(asked, engine, limits),
            max_tokens=max_tokens,
            prefill=prefill,
            stop=stop,
            logprobs=top or (0 if _LOGPROBS in (asked.include or ()) else None),
            drafting=drafting_of(asked.speculation, None, engine.open_drafters),
            response_format=stated_format and stated_format.value,
            priority=priority,
            thinking=thinking,
            thinking_budget=budget_of(asked, engine),
            **tool_options(use),
        )
        return [
            AnswerRequest(
                prompt=messages,
                options=options,
                use=use,
                format_field=stated_format and stated_format.field,
                whole_tool_calls=not asked.stream,
                opens_reasoning=not prefill and engine.opens_reasoning(messages, thinking=thinking),
            )
        ]

    return AnswerPlan(model=asked.model, num_answers=1, requests=requests, priority=priority)


def _format_of(asked: ResponsesRequest) -> StatedFormat | None:
    """Raises ApiError: 400, a JSON schema is announced, and there is none."""
    stated = asked.text.format if asked.text else None
    if stated and stated.get("type") == "json_schema" and not {"schema", "json_schema"} & stated.keys():
        raise ApiError(
            400, 'text.format has no schema; wanted {"type": "json_schema", "schema": …}', param="text.format"
        )
    return None if stated is None else StatedFormat("text.format", stated)


@dataclass(slots=True)
class _Writing:
    """The response as far as it has come."""

    asked: ResponsesRequest
    identity: Identity
    use: ToolUse | None
    items: ResponseItems = field(default_factory=ResponseItems)
    model: str = ""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    notes: dict[str, str] = field(default_factory=dict)  # edgespec's own fields
    reason: str | None = None  # why the answer ended
    usage: dict[str, Any] | None = None
    _reasoning: ReasoningStream | None = None
    _num_reasoning: int = 0  # tokens of reasoning that came so far
    _logprobs: list[dict[str, Any]] = field(default_factory=list)  # of tokens that may yet be reasoning
    _untold: list[dict[str, Any]] = field(default_factory=list)  # of tokens that are none, and whose text may come

    def begin(self, answers: Answers) -> None:
        (request,) = answers.requests
        self.model, self.sampling = answers.model.name, request.sampling
        self.notes = tool_notes(self.use, answers.model.engine)
        self._reasoning, self._num_reasoning = reasoning_of(request), 0
        self._logprobs, self._untold = [], []

    def add(self, chunk: Chunk, answers: Answers) -> Iterator[NamedEvent]:
        """Add what a chunk has, in the order in which the model wrote it."""
        self.reason = chunk.finish_reason or self.reason
        self._untold += self._take_logprobs(chunk, answers)
        num_events = len(chunk.tool_calls)
        for part in in_order(chunk.text, chunk.tool_calls, chunk.call_places):
            if isinstance(part, CallStart | CallArguments | CallEnd):
                num_events -= 1
                if isinstance(part, CallStart):
                    yield from self._end_text()
                yield from self.items.add_call(part)
            else:
                yield from self._add_text(part.text, is_last=not num_events)
        if self.reason is not None:
            yield from self._end_text()
        if self._untold and (self.use is None or (self.reason is not None and self.items.has_open_message)):
            yield from self.items.add_text("", self._untold)
            self._untold = []

    def _take_logprobs(self, chunk: Chunk, answers: Answers) -> list[dict[str, Any]]:
        """Log-probabilities of tokens that are no reasoning, once that is known."""
        if chunk.logprobs:
            self._logprobs += token_entries(chunk.logprobs, answers.words)
        if (tokens := answers.reasoning[0]) is not None:
            del self._logprobs[: tokens.count - self._num_reasoning]
            self._num_reasoning = tokens.count
            if not tokens.is_decided and chunk.finish_reason is None:
                return []
        found, self._logprobs = self._logprobs, []
        return found

    def _add_text(self, text: str, *, is_last: bool) -> Iterator[NamedEvent]:
        """Add text, reasoning apart; is_last: no call follows in its chunk."""
        parts = self._reasoning.push(text) if self._reasoning else [(text, False)]
        yield from self._add_parts(parts, is_last=is_last)

    def _end_text(self) -> Iterator[NamedEvent]:
        """Add what was held back, as a call or the end follows."""
        held = self._reasoning.end() if self._reasoning else []
        yield from self._add_parts(
            [(text.rstrip() if is_reasoning else text, is_reasoning) for text, is_reasoning in held], is_last=False
        )

    def _add_parts(self, parts: Sequence[tuple[str, bool]], *, is_last: bool) -> Iterator[NamedEvent]:
        """Add texts, each with whether it is reasoning."""
        for text, is_reasoning in parts:
            if not is_reasoning:
                yield from self.items.add_text(text, self._take_untold(text, is_last=is_last))
            elif text:
                yield from self.items.add_reasoning(text)

    def _take_untold(self, text: str, *, is_last: bool) -> list[dict[str, Any]]:
        """The log-probabilities of a text; where tools may be called, those of tokens before it are of calls."""
        if self.use is None:
            taken, self._untold = self._untold, []
        else:
            taken, self._untold = entries_of(text, self._untold, is_last=is_last)
        return taken

    def end(self, answers: Answers) -> None:
        self.usage = _usage(answers.usage())

    @property
    def is_whole(self) -> bool:
        return self.reason in ("stop", "tool_calls")

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
            "output": self.items.items if has_ended else [],
            "error": None,
            "tools": flat_tools(self.use),
            "tool_choice": flat_choice(self.use),
            "truncation": "disabled",
            "parallel_tool_calls": self.use.is_parallel if self.use else True,
            "text": {"format": (asked.text and asked.text.format) or {"type": "text"}},
            "top_p": self.sampling.top_p,
            "presence_penalty": self.sampling.presence_penalty,
            "frequency_penalty": self.sampling.frequency_penalty,
            "top_logprobs": asked.top_logprobs or 0,
            "temperature": self.sampling.temperature,
            "reasoning": {"effort": asked.reasoning.effort, "summary": None} if asked.reasoning else None,
            "usage": self.usage,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": None,
            "store": False,
            "background": False,
            "service_tier": "default",
            "metadata": asked.metadata or {},
            "safety_identifier": None,
            "prompt_cache_key": None,
            **self.notes,
        }


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """The usage of completions under the names that responses have."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
        "total_tokens": usage["total_tokens"],
        "speculation": usage["speculation"],
    }


async def _document(
    services: Services, plan: AnswerPlan, record: RequestRecord, begun: _Writing
) -> dict[str, Any]:
    async def write(answers: Answers) -> dict[str, Any]:
        writing = replace(begun, items=ResponseItems())
        writing.begin(answers)
        chunks = answers.chunks()
        try:
            async for _, chunk in chunks:
                list(writing.add(chunk, answers))  # nobody listens to the events
        finally:
            await chunks.aclose()
        list(writing.items.finish(writing.status))
        writing.end(answers)
        return writing.document()

    return await write_answers(services, plan, record, write)


async def _events(
    services: Services, plan: AnswerPlan, record: RequestRecord, writing: _Writing
) -> AsyncGenerator[bytes, None]:
    async with open_answers(services, plan, record) as answers:
        writing.begin(answers)
        numbered = _Numbered()
        yield numbered("response.created", response=writing.document())
        yield numbered("response.in_progress", response=writing.document())
        chunks = answers.chunks()
        try:
            async for _, chunk in chunks:
                for name, fields in writing.add(chunk, answers):
                    yield numbered(name, **fields)
        finally:
            await chunks.aclose()
        writing.end(answers)
        for name, fields in writing.items.finish(writing.status):
            yield numbered(name, **fields)
        ended = "response.completed" if writing.is_whole else "response.incomplete"
        yield numbered(ended, response=writing.document())


class _Numbered:
    """Events with the numbers that clients order them by."""

    def __init__(self) -> None:
        self._number = 0

    def __call__(self, name: str, /, **fields: Any) -> bytes:
        made = event({"type": name, "sequence_number": self._number, **fields}, name)
        self._number += 1
        return made
