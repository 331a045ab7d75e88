"""POST /api/chat and /api/generate of ollama's API, made as answers of OpenAI's are and written in its shape."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from time import monotonic
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgespec import CallArguments, CallEnd, CallStart, Engine, ToolCall, join_calls
from edgespec.server.answer_fields import AnswerPlan, AnswerRequest
from edgespec.server.answer_parts import token_entries
from edgespec.server.answers import Answers, Services, respond
from edgespec.server.chat_completions import chat_plan
from edgespec.server.client import run_for_client
from edgespec.server.completions import completion_plan
from edgespec.server.errors import wrong
from edgespec.server.limits import Limits
from edgespec.server.ollama_protocol import OllamaChat, OllamaGenerate, keep_alive_s
from edgespec.server.protocol import CompletionRequest
from edgespec.server.request_log import RequestRecord, record_of
from edgespec.server.sse import LINES, line
from edgespec.server.thinking import content_deltas, content_of, reasoning_of
from edgespec.system.threads import in_thread

_REASONS = {"stop": "stop", "tool_calls": "stop"}  # of the end of an answer; any other is "length"


async def chat(services: Services, request: Request) -> Response:
    return await _answer(services, request, await services.bodies.read(OllamaChat, request))


async def generate(services: Services, request: Request) -> Response:
    return await _answer(services, request, await services.bodies.read(OllamaGenerate, request))


async def _answer(services: Services, request: Request, asked: OllamaChat | OllamaGenerate) -> Response:
    writer = OllamaWriter(asked, record_of(request.scope), keep_alive_s(asked.keep_alive))
    if asked.is_empty:
        return await run_for_client(request.receive, _load(services, request, writer))
    plan = await in_thread(_plan, asked, services.limits)  # a schema may have many parts
    lines = None if asked.stream is False else writer.lines
    return await respond(services, request, plan, writer.document, lines, LINES)


async def _load(services: Services, request: Request, writer: "OllamaWriter") -> Response:
    """Load the model of a request that asks nothing, or close it where it is not to stay."""
    asked, closes = writer.asked, writer.keep_alive_s == 0
    name = await services.name_for(request, asked.model)
    loaded_as, _ = await in_thread(services.names.served_as, name)
    if not closes or loaded_as in services.host:
        with services.admission.place(1):
            async with services.host.lease(loaded_as) as lease:
                lease.keep(writer.keep_alive_s)
    end = {"done": True, "done_reason": "unload" if closes else "load"}
    return JSONResponse(writer.document_of(name, {}) | end)


def _plan(asked: OllamaChat | OllamaGenerate, limits: Limits) -> AnswerPlan:
    """The answer that a request asks for. Raises ApiError: 400, it asks for what cannot be."""
    stated = asked.as_openai()
    if isinstance(stated, CompletionRequest):
        plan = completion_plan(stated, limits, length=None)
    else:
        plan = chat_plan(stated, limits)

    def requests(engine: Engine) -> Sequence[AnswerRequest]:
        if asked.think and not engine.can_think:
            raise wrong("think", f"is given, but {engine.manifest.name} does not reason; leave it out")
        return plan.requests(engine)

    return replace(plan, requests=requests)


def timestamp(seconds: float | None = None) -> str:
    """A time of the epoch, or now, as ollama's API writes it: always with a fraction of a second."""
    found = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return found.isoformat(timespec="microseconds").replace("+00:00", "Z")


@dataclass(frozen=True, slots=True)
class OllamaWriter:
    """Writes the answer to a request as one document, or as lines."""

    asked: OllamaChat | OllamaGenerate
    record: RequestRecord
    keep_alive_s: float | None
    begun_s: float = field(default_factory=monotonic)

    async def document(self, answers: Answers) -> dict[str, Any]:
        loaded_s = self._begin(answers)
        (answer,) = await answers.complete()
        fields: dict[str, Any] = content_of(answer.text, answers.are_open[0])
        if answer.tool_calls:
            fields["tool_calls"] = enumerate(answer.tool_calls)
        document = self.document_of(answers.lease.shown_name, fields)
        if answer.logprobs:
            document["logprobs"] = token_entries(answer.logprobs, answers.model.words)
        return document | self._end(answers, answer.finish_reason, loaded_s)

    async def lines(self, answers: Answers) -> AsyncGenerator[bytes, None]:
        loaded_s, name = self._begin(answers), answers.lease.shown_name
        reasoning, events = reasoning_of(answers.are_open[0]), list[CallStart | CallArguments | CallEnd]()
        async with aclosing(answers.chunks()) as chunks:
            async for _, chunk in chunks:
                is_last = chunk.finish_reason is not None
                parts = content_deltas(chunk.text, reasoning, is_last=is_last)
                num_calls = len(join_calls(events))
                events += chunk.tool_calls  # each call is whole
                if calls := [*enumerate(join_calls(events))][num_calls:]:
                    parts.append({"tool_calls": calls})
                if chunk.logprobs and not parts:
                    parts.append({})
                documents = [self.document_of(name, part) for part in parts]
                if chunk.logprobs:
                    documents[0]["logprobs"] = token_entries(chunk.logprobs, answers.model.words)
                if chunk.finish_reason is not None:
                    documents.append(
                        self.document_of(name, {}) | self._end(answers, chunk.finish_reason, loaded_s)
                    )
                for document in documents:
                    yield line(document)

    def document_of(self, model: str, fields: dict[str, Any]) -> dict[str, Any]:
        """A document with fields of a message, as OpenAI's API has them."""
        thinking = {"thinking": fields["reasoning_content"]} if "reasoning_content" in fields else {}
        content, head = fields.get("content", ""), {"model": self.asked.model or model, "created_at": timestamp()}
        if isinstance(self.asked, OllamaGenerate):
            return {**head, "response": content, **thinking, "done": False}
        calls = [_call(i, each) for i, each in fields.get("tool_calls", ())]
        message = {"role": "assistant", "content": content, **thinking, **({"tool_calls": calls} if calls else {})}
        return {**head, "message": message, "done": False}

    def _begin(self, answers: Answers) -> float:
        """Note what the request says of the model; the seconds that it took until the model was there."""
        answers.lease.keep(self.keep_alive_s)
        wanted, room = self.asked.options and self.asked.options.num_ctx, answers.model.engine.context_length
        if wanted and wanted > room:
            self.record.notes.append(f"num_ctx {wanted} is above the context of {room}")
        return monotonic() - self.begun_s

    def _end(self, answers: Answers, reason: str, loaded_s: float) -> dict[str, Any]:
        stats, total = answers.stats[0], nanoseconds(monotonic() - self.begun_s)
        load, prompt = nanoseconds(loaded_s), nanoseconds(stats.time_to_first_token_s or 0.0)
        rate, rest = stats.decode_tokens_per_second, max(1, total - load - prompt)
        return {
            "done": True,
            "done_reason": _REASONS.get(reason, "length"),
            "total_duration": total,
            "load_duration": load,
            "prompt_eval_count": answers.prompt_tokens,
            "prompt_eval_duration": prompt,
            "eval_count": stats.num_emitted,
            # The rate is that of the passes after the first, in which all tokens might take more than is left.
            "eval_duration": min(nanoseconds(stats.num_emitted / rate), rest) if rate else rest,
            "speculation": answers.speculation(),
        }


def nanoseconds(seconds: float) -> int:
    """A duration as ollama's API has it, at least 1."""
    return max(1, round(seconds * 1e9))  # clients divide by it


def _call(index: int, call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": call.parse()}}
