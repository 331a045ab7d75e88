"""POST /v1/completions: texts or token ids that the model continues as they are."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgespec import AnswerOptions, Chunk, Engine
from edgespec.server.answer_fields import AnswerRequest, drafting_of, format_of, priority_of, sampling_of
from edgespec.server.answer_parts import Identity, TokenWords, completion_logprobs, new_identity
from edgespec.server.answers import AnswerPlan, Answers, Services, open_answers, write_answers
from edgespec.server.client import read_request, run_for_client, run_until_closing
from edgespec.server.errors import ApiError
from edgespec.server.limits import Limits
from edgespec.server.protocol import CompletionRequest, answer_length, stop_strings, texts_of, within
from edgespec.server.request_log import RequestRecord, record_of
from edgespec.server.sse import DONE, EventStream, event

_MAX_TOKENS = 16  # where a request does not say, as the API has it


async def completions(services: Services, request: Request) -> Response:
    asked = await read_request(CompletionRequest, request, services.limits)
    plan, record = plan_of(asked, services.limits), record_of(request.scope)
    identity = new_identity("cmpl-")
    if asked.stream:
        events = _events(services, plan, record, asked, identity)
        return EventStream(events, services.limits, services.drain.is_closing)
    work = run_until_closing(services.drain.is_closing, _document(services, plan, record, asked, identity))
    return JSONResponse(await run_for_client(request.receive, work))


def plan_of(asked: CompletionRequest, limits: Limits) -> AnswerPlan:
    """The answers that a request asks for. Raises ApiError: 400, it asks for what cannot be."""
    prompts = texts_of("prompt", asked.prompt)
    num_each = within("n", asked.n, 1, limits.num_choices) or 1
    num_answers = num_each * len(prompts)
    if num_answers > limits.num_choices:
        raise ApiError(
            400, f"prompt and n ask for {num_answers} answers; wanted at most {limits.num_choices}", param="prompt"
        )
    top = within("logprobs", asked.logprobs, 0, limits.num_top_logprobs)
    if asked.suffix:
        raise ApiError(400, "suffix is given, and models here only write at the end; leave it out", param="suffix")
    if asked.best_of is not None and asked.best_of > num_each:
        raise ApiError(400, f"best_of is {asked.best_of}; wanted at most n, {num_each}", param="best_of")
    if asked.echo and top is not None:
        raise ApiError(400, "echo and logprobs go together in no model here; leave out one of them", param="echo")
    stated = _MAX_TOKENS if asked.max_tokens is None else asked.max_tokens
    max_tokens = answer_length("max_tokens", stated, limits)
    stop = stop_strings(asked.stop, limits)
    priority = priority_of(asked)

    def requests(engine: Engine) -> Sequence[AnswerRequest]:
        drafting = drafting_of(asked.speculation, asked.prediction, engine.open_drafters)
        stated = format_of(asked)
        options = AnswerOptions(
            max_tokens=max_tokens,
            stop=stop,
            raw=True,
            logprobs=top,
            drafting=drafting,
            response_format=stated and stated.value,
            priority=priority,
        )
        return [
            AnswerRequest(
                prompt=prompt,
                options={**options, "sampling": sampling_of(asked, engine, limits, i)},
                format_field=stated and stated.field,
            )
            for prompt in prompts
            for i in range(num_each)
        ]

    return AnswerPlan(
        model=asked.model, num_answers=num_answers, requests=requests, num_prompts=len(prompts), priority=priority
    )


async def _document(
    services: Services, plan: AnswerPlan, record: RequestRecord, asked: CompletionRequest, identity: Identity
) -> dict[str, Any]:
    async def write(answers: Answers) -> dict[str, Any]:
        words = answers.model.words if asked.logprobs is not None else None
        choices = [
            {
                "index": i,
                "text": _echoed(answers, i, asked) + answer.text,
                "logprobs": completion_logprobs(answer.logprobs, words) if words else None,
                "finish_reason": "stop" if answer.finish_reason == "stop" else "length",
            }
            for i, answer in enumerate(await answers.complete())
        ]
        return {**answers.head(identity, "text_completion"), "choices": choices, "usage": answers.usage()}

    return await write_answers(services, plan, record, write)


async def _events(
    services: Services, plan: AnswerPlan, record: RequestRecord, asked: CompletionRequest, identity: Identity
) -> AsyncGenerator[bytes, None]:
    async with open_answers(services, plan, record) as answers:
        head = answers.head(identity, "text_completion")
        words = answers.model.words if asked.logprobs is not None else None
        has_usage = bool(asked.stream_options and asked.stream_options.include_usage)
        nothing = {"usage": None} if has_usage else {}
        offsets = [0] * plan.num_answers
        chunks = answers.chunks()
        try:
            for i in range(plan.num_answers):
                if echoed := _echoed(answers, i, asked):
                    yield event({**head, "choices": [_choice(i, echoed)], **nothing})
            async for i, chunk in chunks:
                if chunk.text or chunk.finish_reason or (words and chunk.logprobs):
                    yield event({**head, "choices": [_part(i, chunk, words, offsets)], **nothing})
        finally:
            await chunks.aclose()
        if has_usage:
            yield event({**head, "choices": [], "usage": answers.usage()})
        yield DONE


def _part(index: int, chunk: Chunk, words: TokenWords | None, offsets: list[int]) -> dict[str, Any]:
    """The addition of a chunk to a choice; offsets are where the next token of each choice begins in the text."""
    logprobs = completion_logprobs(chunk.logprobs, words, offsets[index]) if words and chunk.logprobs else None
    if words:
        offsets[index] += sum(len(words.text(each.token_id)) for each in chunk.logprobs)
    reason = chunk.finish_reason and ("stop" if chunk.finish_reason == "stop" else "length")
    return _choice(index, chunk.text, logprobs, reason)


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _echoed(answers: Answers, index: int, asked: CompletionRequest) -> str:
    """The prompt, where a request wants it before the answer."""
    if not asked.echo:
        return ""
    prompt = texts_of("prompt", asked.prompt)[index // (asked.n or 1)]
    return prompt if isinstance(prompt, str) else answers.model.engine.detokenize(prompt)
