"""The answers to one request: a place for them, their model, and their chunks as they are made.

What the endpoints have in common; each says what it asks (a Plan) and writes the chunks in its own shape.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from edgespec.engine.answers import Chunk, Completion, join_chunks
from edgespec.engine.engine import Engine
from edgespec.engine.stats import Stats
from edgespec.server.admission import Admission
from edgespec.server.drain import Drain
from edgespec.server.engine_adapter import AnswerRequest, OpenAnswer, open_answer
from edgespec.server.limits import Limits
from edgespec.server.metrics import Metrics
from edgespec.server.model_host import HostedModel, ModelHost
from edgespec.server.model_names import ModelNames
from edgespec.server.request_log import Record
from edgespec.server.usage import notes_of, speculation_of, usage_of


@dataclass(frozen=True, slots=True)
class Services:
    """What all requests share."""

    names: ModelNames
    host: ModelHost
    admission: Admission
    metrics: Metrics
    drain: Drain
    limits: Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answers that a request asks for.

    num_answers: How many.
    requests: What to ask the engine for each of them; called in a thread once the model is loaded.
    num_prompts: How many prompts they are answers to, each to as many as the others.
    """

    model: str | None
    num_answers: int
    requests: Callable[[Engine], Sequence[AnswerRequest]]
    num_prompts: int = 1


@dataclass(slots=True)
class Answers:
    """The answers to a request, which are being made.

    firsts: The index of the first answer to each prompt.
    """

    model: HostedModel
    requests: Sequence[AnswerRequest]
    opened: Sequence[OpenAnswer]
    firsts: Sequence[int]
    stats: dict[int, Stats] = field(default_factory=dict)  # of those that have ended, by their index
    num_tokens: Counter[int] = field(default_factory=Counter)  # that were made so far, by the index of the answer

    @property
    def prompt_tokens(self) -> int:
        return sum(self.opened[i].prompt_tokens for i in self.firsts)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompts that were not read, as a cache held them."""
        ended = [(self.opened[i], self.stats[i]) for i in self.firsts if i in self.stats]
        return sum(max(0, opened.prompt_tokens - stats.num_read) for opened, stats in ended)

    async def chunks(self) -> AsyncGenerator[tuple[int, Chunk], None]:
        """Indices of answers and their chunks, as they come."""
        merged = merge([answer.chunks for answer in self.opened])
        try:
            async for i, chunk in merged:
                self.num_tokens[i] += len(chunk.token_ids)
                if chunk.stats is not None:
                    self.stats[i] = chunk.stats
                yield i, chunk
        finally:
            await merged.aclose()

    async def complete(self) -> list[Completion]:
        """All answers, whole."""
        parts: list[list[Chunk]] = [[] for _ in self.opened]
        async for i, chunk in self.chunks():
            parts[i].append(chunk)
        return [join_chunks(chunks, self.opened[i].prompt_tokens) for i, chunks in enumerate(parts)]

    def usage(self) -> dict[str, object]:
        return usage_of(self.prompt_tokens, self.cached_tokens, list(self.stats.values()))


@asynccontextmanager
async def open_answers(services: Services, plan: Plan, record: Record) -> AsyncIterator[Answers]:
    """The answers to a request, with a place in the queue and a model that stays loaded meanwhile.

    Raises:
        ApiError: 404 or 429, there is no such model or no place.
        EdgeSpecError: As loading a model and Engine.stream raise it.
    """
    name = await asyncio.to_thread(services.names.require, plan.model)
    record.model = name
    async with _place(services.admission, plan.num_answers), services.host.lease(name) as model:
        requests = await asyncio.to_thread(plan.requests, model.engine)
        opened = [await open_answer(model.engine, request) for request in requests]
        answers = Answers(model, requests, opened, range(0, len(opened), len(opened) // plan.num_prompts))
        try:
            yield answers
        finally:
            for each in opened:
                await each.chunks.aclose()
            _record(services.metrics, record, answers)


@asynccontextmanager
async def _place(admission: Admission, num_answers: int) -> AsyncIterator[None]:
    with admission.place(num_answers):
        yield


def _record(metrics: Metrics, record: Record, answers: Answers) -> None:
    record.prompt_tokens = answers.prompt_tokens
    record.completion_tokens = answers.num_tokens.total()
    if answers.stats:
        record.notes += notes_of(speculation_of(list(answers.stats.values())))
    for i, opened in enumerate(answers.opened):
        if (stats := answers.stats.get(i)) is not None:
            metrics.count_answer(answers.model.name, opened.prompt_tokens, stats)
        elif num_tokens := answers.num_tokens[i]:
            metrics.count_tokens(answers.model.name, opened.prompt_tokens, num_tokens)


async def merge(streams: Sequence[AsyncGenerator[Chunk, None]]) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Chunks of several streams, with the index of each, as they come; all end with this one."""
    pending = {asyncio.ensure_future(anext(stream, None)): i for i, stream in enumerate(streams)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                i = pending.pop(task)
                chunk = task.result()
                if chunk is None:
                    continue
                if chunk.finish_reason is None:
                    pending[asyncio.ensure_future(anext(streams[i], None))] = i
                yield i, chunk
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
