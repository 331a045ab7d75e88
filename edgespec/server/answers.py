"""The answers to one request: a place for them, their model, and their chunks as they are made.

What the endpoints have in common; each says what it asks (an AnswerPlan) and writes the chunks in its own shape.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from edgespec import AnswerStream, Chunk, Completion, Engine, FormatError, Stats, TextStream, Tool, join_chunks
from edgespec.server.answer_fields import AnswerPlan, AnswerRequest
from edgespec.server.answer_parts import Identity, notes_of, speculation_of
from edgespec.server.client import Bodies, run_for_client, run_until_closing
from edgespec.server.errors import ApiError, Preempted, explain_format
from edgespec.server.limits import Admission, Limits
from edgespec.server.metrics import Metrics
from edgespec.server.model_host import HostedModel, Lease, ModelHost, in_daemon
from edgespec.server.model_names import ModelNames
from edgespec.server.request_log import RequestRecord, record_of
from edgespec.server.sse import DONE, EVENTS, EventStream, StreamForm, event, line
from edgespec.server.thinking import ReasoningTokens, begins_open
from edgespec.system.threads import in_thread

T = TypeVar("T")
_COUNTS = ("drafted_tokens", "accepted_tokens", "waited_passes")  # of what drafting did, in `usage` too
_PREDICTION = "prediction"  # whose drafts are parts of the text that the answer is expected to repeat


@dataclass(slots=True)
class Services:
    """The parts of the server that all requests share.

    is_closing: Set when the time that answers have to end is over.
    """

    limits: Limits
    names: ModelNames
    host: ModelHost
    tools: Sequence[Tool] = ()  # of MCP servers; clients may have them run
    metrics: Metrics = field(default_factory=Metrics)
    is_closing: asyncio.Event = field(default_factory=asyncio.Event)
    admission: Admission = field(init=False)
    bodies: Bodies = field(init=False)

    def __post_init__(self) -> None:
        self.admission, self.bodies = Admission(self.limits.num_answers), Bodies(self.limits)

    async def run(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """The result of work, which is cancelled when the client leaves or the server closes."""
        return await run_for_client(request.receive, run_until_closing(self.is_closing, work))

    async def name_for(self, request: Request, asked: str | None) -> str:
        """The name of the model that is asked for, also for the record; raises what ModelNames.require raises."""
        record_of(request.scope).model = name = await in_thread(self.names.require, asked)
        return name

    def hosted(self, name: str) -> HostedModel | None:
        """The loaded model that answers under a name, which may be a preset's."""
        found = self.host.hosted
        with suppress(ApiError):  # a preset that cannot be used
            return found.get(name) or found.get(self.names.served_as(name)[0])
        return None

    @asynccontextmanager
    async def lease(self, name: str, priority: int = 0) -> AsyncIterator[Lease]:
        """The use of the model of a name, which may be a preset's; raises what ModelHost.lease raises."""
        loaded_as, preset = name, None
        if name not in self.host:  # as a preset is whose model was prepared for it
            loaded_as, preset = await in_thread(self.names.served_as, name)
        async with self.host.lease(loaded_as, priority) as lease:
            lease.preset = preset
            yield lease


@dataclass(slots=True)
class Answers:
    """The answers to a request, which are being made.

    opened: Those that are ready to be made: nothing is before its first chunk is asked for.
    firsts: The index of the first answer to each prompt.
    are_open: For each answer what begins_open tells of it.
    reasoning: Counts the tokens of each answer that are reasoning; None where none is looked for.
    """

    lease: Lease
    requests: Sequence[AnswerRequest]
    opened: Sequence[AnswerStream]
    firsts: Sequence[int]
    are_open: Sequence[bool | None]
    reasoning: Sequence[ReasoningTokens | None]
    stats: dict[int, Stats] = field(default_factory=dict)  # of those that have ended, by their index
    num_tokens: Counter[int] = field(default_factory=Counter)  # that were made so far, by the index of the answer

    @property
    def model(self) -> HostedModel:
        return self.lease.model

    @property
    def prompt_tokens(self) -> int:
        return sum(self.opened[i].prompt_tokens for i in self.firsts)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompts that were not read, as a cache held them."""
        ended = [(self.opened[i], self.stats[i]) for i in self.firsts if i in self.stats]
        return sum(max(0, opened.prompt_tokens - stats.num_read) for opened, stats in ended)

    async def chunks(self) -> AsyncGenerator[tuple[int, Chunk], None]:
        """Indices of answers and their chunks, as they come; raises Preempted: the model has to give way."""
        async with aclosing(merge(self.opened, self.lease.has_to_end)) as merged:
            async for i, chunk in merged:
                self.num_tokens[i] += len(chunk.token_ids)
                if (counted := self.reasoning[i]) is not None:
                    counted.push(chunk.token_ids)
                if chunk.stats is not None:
                    self.stats[i] = chunk.stats
                yield i, chunk

    async def complete(self) -> list[Completion]:
        parts: list[list[Chunk]] = [[] for _ in self.opened]
        async for i, chunk in self.chunks():
            parts[i].append(chunk)
        return [join_chunks(chunks, self.opened[i].prompt_tokens) for i, chunks in enumerate(parts)]

    def head(self, identity: Identity, kind: str) -> dict[str, Any]:
        """The fields that each document about the answers begins with."""
        engine = self.model.engine
        # All that decides the text of a seed: the model's weights, and its device.
        key, device = engine.manifest.weights_sha256 or engine.manifest.vocab_sha256, engine.device_names[0]
        return {
            "id": identity.id,
            "object": kind,
            "created": identity.created,
            "model": self.lease.shown_name,
            "system_fingerprint": f"{key[:12]}-{device}",
            **self.tool_notes(),
        }

    def tool_notes(self) -> dict[str, str]:
        """edgespec's own field of an answer: how its model was told of its tools."""
        return {"tool_format": self.model.engine.tool_format} if self.requests[0].use else {}

    def tail(self) -> dict[str, Any]:
        """The fields that each document about whole answers ends with."""
        return {"usage": self.usage(), "speculation": self.speculation()}

    def usage(self) -> dict[str, Any]:
        """Tokens of the prompts and of all answers so far, in the form of OpenAI's API, and what drafting did."""
        completion_tokens = sum(stats.num_emitted for stats in self.stats.values())
        predicted = [stats.sources.get(_PREDICTION, {}) for stats in self.stats.values()]
        accepted = sum(counts.get("accepted", 0) for counts in predicted)
        drafted = sum(counts.get("drafted", 0) for counts in predicted)
        speculation = self.speculation()
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": sum(each.count for each in self.reasoning if each),
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
            "speculation": {name: speculation[name] for name in _COUNTS},
        }

    def speculation(self) -> dict[str, Any]:
        return speculation_of(list(self.stats.values()))


Write = Callable[[Answers], Awaitable[dict[str, Any]]]
WriteEvents = Callable[[Answers], AsyncGenerator[bytes, None]]


async def respond(
    services: Services,
    request: Request,
    plan: AnswerPlan,
    write: Write,
    write_events: WriteEvents | None,
    form: StreamForm = EVENTS,
) -> Response:
    """Make the answers to a request, with a place in the queue and a model that stays loaded meanwhile.

    Args:
        write: Makes the document of the response.
        write_events: Makes events of it as the answers come, where the request wants these.
        form: How these are written.

    Raises:
        ApiError: 404 or 429, there is no such model or no place.
        EdgeSpecError: As loading a model and Engine.stream raise it.
    """
    if write_events is not None:
        events = _write_events(services, request, plan, write_events)
        return EventStream(events, services.limits, services.is_closing, form)
    document = await services.run(request, _write(services, request, plan, write))
    return Response(line(document), media_type="application/json")


async def _write_events(
    services: Services, request: Request, plan: AnswerPlan, write: WriteEvents
) -> AsyncGenerator[bytes, None]:
    """Raises Preempted: The model has to give its place up to a request of a higher priority."""
    name = await services.name_for(request, plan.model)
    with services.admission.place(plan.num_answers):
        async with _lease_answers(services, request, plan, name) as answers, aclosing(write(answers)) as events:
            async for each in events:
                yield each


async def _write(services: Services, request: Request, plan: AnswerPlan, write: Write) -> dict[str, Any]:
    """The document; where the model has to give way the answers are made once more, when it has its place back."""
    name = await services.name_for(request, plan.model)
    with services.admission.place(plan.num_answers):
        while True:
            try:
                async with _lease_answers(services, request, plan, name) as answers:
                    return await write(answers)
            except Preempted:
                record_of(request.scope).notes.append("gave way")


async def choice_events(
    answers: Answers,
    head: dict[str, Any],
    firsts: Sequence[dict[str, Any]],
    choices_of: Callable[[int, Chunk], Sequence[dict[str, Any]]],
    *,
    has_usage: bool,
) -> AsyncGenerator[bytes, None]:
    """The events of answers that are choices, each event with one.

    Args:
        firsts: Those that come before any chunk.
        choices_of: Makes those of a chunk, of the answer of an index.
    """
    nothing = {"usage": None} if has_usage else {}
    for choice in firsts:
        yield event({**head, "choices": [choice], **nothing})
    async with aclosing(answers.chunks()) as chunks:
        async for i, chunk in chunks:
            for choice in choices_of(i, chunk):
                yield event({**head, "choices": [choice], **nothing})
    if has_usage:
        yield event({**head, "choices": [], **answers.tail()})
    yield DONE


@asynccontextmanager
async def _lease_answers(
    services: Services, request: Request, plan: AnswerPlan, name: str
) -> AsyncIterator[Answers]:
    async with services.lease(name, plan.priority) as lease, AsyncExitStack() as streams:
        if lease.has_to_end.is_set():  # since it was being loaded
            raise Preempted
        engine = lease.engine
        requests = await services.admission.wait_for(in_thread(plan.requests, engine))
        opened = [
            await streams.enter_async_context(await _open_answer(services, engine, each)) for each in requests
        ]
        firsts = range(0, len(opened), len(opened) // plan.num_prompts)
        are_open = [*map(begins_open, requests, opened)]
        reasoning = [
            None if is_open is None else ReasoningTokens(TextStream(engine.tokenizer), is_open=is_open)
            for is_open in are_open
        ]
        answers = Answers(lease, requests, opened, firsts, are_open, reasoning)
        try:
            yield answers
        finally:
            _record(services.metrics, record_of(request.scope), answers)


async def _open_answer(services: Services, engine: Engine, request: AnswerRequest) -> AnswerStream:
    """Encode and check a request, while other tasks run; raises what Engine.stream raises.

    Raises ApiError: 400, no answer can match its format.
    """
    options, most = request.options, services.limits.num_tokens
    if most is not None and options.get("max_tokens") is None:
        of_preset = engine.preset and engine.preset.answer_options.get("max_tokens")
        options = {**options, "max_tokens": min(most, of_preset or most)}
    ask = partial(engine.stream, request.prompt, **options)
    # In a thread of its own, as a grammar may take minutes to compile, and asyncio's threads are few.
    try:
        return await services.admission.wait_for(in_daemon(ask))
    except FormatError as error:
        raise explain_format(error, request.format_field) from None


def _record(metrics: Metrics, record: RequestRecord, answers: Answers) -> None:
    record.prompt_tokens = answers.prompt_tokens
    record.completion_tokens = answers.num_tokens.total()
    if answers.stats:
        record.notes += notes_of(answers.speculation())
    for i, opened in enumerate(answers.opened):
        if (stats := answers.stats.get(i)) is not None:
            metrics.count_answer(answers.model.name, opened.prompt_tokens, stats)
        elif num_tokens := answers.num_tokens[i]:
            metrics.count_tokens(answers.model.name, opened.prompt_tokens, num_tokens)


async def merge(
    streams: Sequence[AnswerStream], has_to_end: asyncio.Event
) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Chunks of several streams, with the index of each, as they come.

    Raises Preempted: They have to end.
    """
    ending = asyncio.ensure_future(has_to_end.wait())
    pending = {asyncio.ensure_future(anext(stream, None)): i for i, stream in enumerate(streams)}
    try:
        while pending:
            await asyncio.wait({*pending, ending}, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                raise Preempted
            for task in [each for each in pending if each.done()]:
                i = pending.pop(task)
                chunk = task.result()
                if chunk is None:
                    continue
                if chunk.finish_reason is None:
                    pending[asyncio.ensure_future(anext(streams[i], None))] = i
                yield i, chunk
    finally:
        for each in (*pending, ending):
            each.cancel()
        await asyncio.gather(*pending, ending, return_exceptions=True)
