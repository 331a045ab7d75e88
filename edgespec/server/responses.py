"""POST /v1/responses, without a store: a client sends the whole conversation each time."""

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from itertools import count
from time import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from edgespec import CallArguments, CallEnd, CallStart, Chunk, ToolUse, in_order
from edgespec.server.answer_fields import AnswerPlan, StatedFormat, talk_plan
from edgespec.server.answer_parts import Identity, entries_of, new_identity, token_entries
from edgespec.server.answers import Answers, Services, respond
from edgespec.server.errors import wrong
from edgespec.server.limits import Limits
from edgespec.server.messages import read_conversation, stated_messages
from edgespec.server.protocol import ResponsesRequest, answer_length, within
from edgespec.server.request_log import RequestRecord, record_of
from edgespec.server.sse import EVENTS, event
from edgespec.server.thinking import reasoning_of

_LOGPROBS = "message.output_text.logprobs"  # in include
NamedEvent = tuple[str, dict[str, Any]]  # the type of an event and its fields


async def responses(services: Services, request: Request) -> Response:
    asked = _with_functions_alone(await services.bodies.read(ResponsesRequest, request), record_of(request.scope))
    plan, identity = _plan(asked, services.limits), new_identity("resp_")
    events = partial(_events, asked, identity) if asked.stream else None
    form = replace(EVENTS, end=_error_event)
    return await respond(services, request, plan, partial(_document, asked, identity), events, form)


def _with_functions_alone(asked: ResponsesRequest, record: RequestRecord) -> ResponsesRequest:
    """The request without tools of other types, such as web_search: Codex sends some whatever the server has."""
    others = [str(each["type"]) for each in asked.tools or () if not _is_function(each)]
    if not others:
        return asked
    record.notes.append(f"left out: {', '.join(others)}")
    return replace(asked, tools=[each for each in asked.tools or () if _is_function(each)])


def _is_function(tool: Any) -> bool:
    return not isinstance(tool, dict) or tool.get("type", "function") == "function"


def _plan(asked: ResponsesRequest, limits: Limits) -> AnswerPlan:
    """The answer that a request asks for. Raises ApiError: 400, it asks for what cannot be."""
    for name in ("previous_response_id", "conversation", "prompt", "background"):
        if getattr(asked, name):
            raise wrong(name, "is given, and nothing is stored here; send the whole conversation")
    top = within("top_logprobs", asked.top_logprobs, 0, limits.num_top_logprobs)
    return talk_plan(
        asked,
        read_conversation(list(stated_messages(asked)), "input"),
        _format_of(asked),
        limits,
        max_tokens=answer_length("max_output_tokens", asked.max_output_tokens, limits),
        logprobs=top or (0 if _LOGPROBS in (asked.include or ()) else None),
    )


def _format_of(asked: ResponsesRequest) -> StatedFormat | None:
    """Raises ApiError: 400, a JSON schema is announced, and there is none."""
    stated = asked.text.format if asked.text else None
    if stated and stated.get("type") == "json_schema" and not {"schema", "json_schema"} & stated.keys():
        raise wrong("text.format", 'has no schema; wanted {"type": "json_schema", "schema": …}')
    return None if stated is None else StatedFormat("text.format", stated)


class _Items:
    """The output as it comes: reasoning, a message, calls of tools, in their order; the last one may be open."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._is_open = False
        self._waiting: list[dict[str, Any]] = []  # log-probabilities of tokens that spell no text yet

    def add_text(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[NamedEvent]:
        """Add to the message, which begins if none is open; white space between items is no message."""
        if not self.is_last_open("message"):
            self._waiting += logprobs
            text = text.lstrip() if self.items else text
            if not text:
                return
            yield from self._begin_message()
            logprobs, self._waiting = self._waiting, []
        part = self._part
        part["text"] += text
        part["logprobs"] += logprobs
        if text or logprobs:
            yield "response.output_text.delta", {**self._place, "delta": text, "logprobs": logprobs}

    def add_reasoning(self, text: str) -> Iterator[NamedEvent]:
        """Add to the reasoning, which begins if none is open."""
        if not self.is_last_open("reasoning"):
            item: dict[str, Any] = {
                "type": "reasoning",
                "id": new_identity("rs_").id,
                "summary": [],
                "encrypted_content": None,
            }
            yield from self._begin_with_part(item, {"type": "reasoning_text", "text": ""})
        self._part["text"] += text
        yield "response.reasoning_text.delta", {**self._place, "delta": text}

    def add_call(self, event: CallStart | CallArguments | CallEnd) -> Iterator[NamedEvent]:
        """Begin a call, add to its arguments, or end it."""
        if isinstance(event, CallStart):
            self._waiting = []  # of tokens that belong to no text
            stated = {"call_id": event.id, "name": event.name, "arguments": ""}
            yield from self._begin({"type": "function_call", "id": new_identity("fc_").id, **stated})
        elif isinstance(event, CallArguments):
            self.items[-1]["arguments"] += event.text
            yield "response.function_call_arguments.delta", {**self._item_place, "delta": event.text}
        else:
            yield from self.close("completed")

    def _begin_message(self) -> Iterator[NamedEvent]:
        item = {"type": "message", "id": new_identity("msg_").id, "role": "assistant"}
        part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield from self._begin_with_part(item, part)

    def close(self, status: str) -> Iterator[NamedEvent]:
        """End the open item, if one is."""
        if not self._is_open:
            return
        item, self._is_open = self.items[-1], False
        item["status"] = status
        if item["type"] != "function_call":
            part = item["content"][0]
            said = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield f"response.{part['type']}.done", {**self._place, **said}
            yield "response.content_part.done", {**self._place, "part": part}
        else:
            said = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**self._item_place, **said}
        yield "response.output_item.done", {"output_index": len(self.items) - 1, "item": item}

    def finish(self, status: str) -> Iterator[NamedEvent]:
        """End the output; one without an item becomes an empty message, and one of reasoning alone stays so."""
        if not self.items:
            yield from self._begin_message()
        if self.is_last_open("message"):
            yield from self.add_text("", self._waiting)
        yield from self.close(status)

    def _begin(self, item: dict[str, Any]) -> Iterator[NamedEvent]:
        yield from self.close("completed")
        item["status"] = "in_progress"
        self.items.append(item)
        self._is_open = True
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": dict(item)}

    def _begin_with_part(self, item: dict[str, Any], part: dict[str, Any]) -> Iterator[NamedEvent]:
        item["content"] = []
        yield from self._begin(item)
        yield "response.content_part.added", {**self._place, "part": dict(part)}
        item["content"] = [part]

    def is_last_open(self, kind: str) -> bool:
        return self._is_open and self.items[-1]["type"] == kind

    @property
    def has_calls(self) -> bool:
        return any(item["type"] == "function_call" for item in self.items)

    @property
    def last_text(self) -> str:
        """The text of the open message or reasoning."""
        return str(self._part["text"])

    @property
    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = self.items[-1]["content"][0]
        return part

    @property
    def _item_place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    @property
    def _place(self) -> dict[str, Any]:
        return {**self._item_place, "content_index": 0}


class _Response:
    """The response as far as it has come."""

    def __init__(self, asked: ResponsesRequest, identity: Identity, answers: Answers) -> None:
        self.items = _Items()
        self._asked, self._identity, self._answers = asked, identity, answers
        (self._request,) = answers.requests
        self._use = self._request.use
        self._stated = self._use or ToolUse.parse(asked.tools)  # also where none may be called
        self._reason: str | None = None  # why the answer ended
        self._reasoning = reasoning_of(answers.are_open[0])
        self._num_reasoning = 0  # tokens of reasoning whose log-probabilities came so far
        self._logprobs: list[dict[str, Any]] = []  # of tokens that may yet be reasoning
        self._untold: list[dict[str, Any]] = []  # of tokens that are none, and whose text may come

    def add(self, chunk: Chunk) -> Iterator[NamedEvent]:
        """Add what a chunk has, in the order in which the model wrote it."""
        self._reason = chunk.finish_reason or self._reason
        self._untold += self._take_logprobs(chunk)
        for part in in_order(chunk.text, chunk.tool_calls, chunk.call_places):
            if isinstance(part, CallStart | CallArguments | CallEnd):
                if isinstance(part, CallStart):
                    yield from self._end_text(is_last=False)
                yield from self.items.add_call(part)
            else:
                yield from self._add_parts(
                    self._reasoning.push(part.text) if self._reasoning else [(part.text, False)]
                )
        if self._reason is not None:
            yield from self._end_text(is_last=True)
        if self._use is None and self._untold:
            yield from self.items.add_text("", self._take_untold())

    def _take_logprobs(self, chunk: Chunk) -> list[dict[str, Any]]:
        """Log-probabilities of tokens that are no reasoning, once that is known."""
        if chunk.logprobs:
            self._logprobs += token_entries(chunk.logprobs, self._answers.model.words)
        if (tokens := self._answers.reasoning[0]) is not None:
            num_reasoning = min(tokens.count - self._num_reasoning, len(self._logprobs))  # others come later
            del self._logprobs[:num_reasoning]
            self._num_reasoning += num_reasoning
            if not tokens.is_decided and chunk.finish_reason is None:
                return []
        found, self._logprobs = self._logprobs, []
        return found

    def _end_text(self, *, is_last: bool) -> Iterator[NamedEvent]:
        """Add what was held back, as a call follows, or the end.

        Where tools may be called, the log-probabilities of a message come here, those of calls left out.
        """
        yield from self._add_parts(self._reasoning.end() if self._reasoning else [])
        if self._use and self.items.is_last_open("message"):
            logprobs = self._take_untold()
            if not is_last or self.items.has_calls:
                logprobs, self._untold = entries_of(self.items.last_text, logprobs, is_last=is_last)
            yield from self.items.add_text("", logprobs)

    def _add_parts(self, parts: Sequence[tuple[str, bool]]) -> Iterator[NamedEvent]:
        """Add texts, each with whether it is reasoning."""
        for text, is_reasoning in parts:
            if not is_reasoning:
                yield from self.items.add_text(text, () if self._use else self._take_untold())
            elif text:
                yield from self.items.add_reasoning(text)

    def _take_untold(self) -> list[dict[str, Any]]:
        taken, self._untold = self._untold, []
        return taken

    @property
    def is_whole(self) -> bool:
        return self._reason in ("stop", "tool_calls")

    @property
    def status(self) -> str:
        return "in_progress" if self._reason is None else "completed" if self.is_whole else "incomplete"

    def document(self) -> dict[str, Any]:
        """The response object, with every field that clients check for."""
        asked, sampling, has_ended = self._asked, self._request.sampling, self._reason is not None
        return {
            "id": self._identity.id,
            "object": "response",
            "created_at": self._identity.created,
            "completed_at": int(time()) if self.is_whole else None,
            "status": self.status,
            "incomplete_details": {"reason": "max_output_tokens"} if has_ended and not self.is_whole else None,
            "model": self._answers.lease.shown_name,
            "previous_response_id": None,
            "instructions": asked.instructions,
            "output": self.items.items if has_ended else [],
            "error": None,
            "tools": _flat_tools(self._stated),
            "tool_choice": _flat_choice(self._use) if self._use else asked.tool_choice or "auto",
            "truncation": "disabled",
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "text": {"format": (asked.text and asked.text.format) or {"type": "text"}},
            "top_p": sampling.top_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "top_logprobs": asked.top_logprobs or 0,
            "temperature": sampling.temperature,
            "reasoning": {"effort": asked.reasoning.effort, "summary": None} if asked.reasoning else None,
            "usage": _usage(self._answers.usage()) if has_ended else None,
            "speculation": self._answers.speculation() if has_ended else None,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": None,
            "store": False,
            "background": False,
            "service_tier": "default",
            "metadata": asked.metadata or {},
            "safety_identifier": None,
            "prompt_cache_key": None,
            **self._answers.tool_notes(),
        }


def _flat_tools(use: ToolUse | None) -> list[dict[str, Any]]:
    """Tools as /v1/responses states them."""
    return [
        {
            "type": "function",
            "name": tool.name,
            "description": tool.description or None,
            "parameters": dict(tool.parameters),
            "strict": tool.strict,
        }
        for tool in (use.tools if use else ())
    ]


def _flat_choice(use: ToolUse) -> str | dict[str, str]:
    """A choice of tools as /v1/responses states it."""
    if use.choice in ("auto", "required"):
        return use.choice
    return {"type": "function", "name": use.choice}


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


async def _document(asked: ResponsesRequest, identity: Identity, answers: Answers) -> dict[str, Any]:
    response = _Response(asked, identity, answers)
    async with aclosing(answers.chunks()) as chunks:
        async for _, chunk in chunks:
            list(response.add(chunk))  # nobody listens to the events
    list(response.items.finish(response.status))
    return response.document()


def _error_event(told: Mapping[str, Any], number: int) -> bytes:
    """An error that ends a stream, for clients that look for its type and those that look for `error`."""
    return event({**told["error"], "type": "error", "sequence_number": number, **told}, "error")


async def _events(asked: ResponsesRequest, identity: Identity, answers: Answers) -> AsyncGenerator[bytes, None]:
    response, numbers = _Response(asked, identity, answers), count()

    def numbered(name: str, /, **fields: Any) -> bytes:
        """An event with the number that clients order it by."""
        return event({"type": name, "sequence_number": next(numbers), **fields}, name)

    yield numbered("response.created", response=response.document())
    yield numbered("response.in_progress", response=response.document())
    async with aclosing(answers.chunks()) as chunks:
        async for _, chunk in chunks:
            for name, fields in response.add(chunk):
                yield numbered(name, **fields)
    for name, fields in response.items.finish(response.status):
        yield numbered(name, **fields)
    ended = "response.completed" if response.is_whole else "response.incomplete"
    yield numbered(ended, response=response.document())
