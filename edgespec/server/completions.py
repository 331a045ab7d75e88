"""POST /v1/completions: texts or token ids that the model continues as they are."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from edgespec import AnswerOptions, Chunk, Completion, Engine
from edgespec.server.answer_fields import (
    AnswerRequest,
    drafting_of,
    format_of,
    priority_of,
    require_followed,
    sampling_of,
)
from edgespec.server.answer_parts import Identity, TextPlaces, TokenWords, completion_logprobs, new_identity
from edgespec.server.answers import AnswerPlan, Answers, Services, respond
from edgespec.server.errors import ApiError
from edgespec.server.limits import Limits
from edgespec.server.protocol import CompletionRequest, answer_length, stop_strings, texts_of, within
from edgespec.server.sse import DONE, event
from edgespec.system.threads import in_thread

_MAX_TOKENS = 16  # where a request does not say, as the API has it


async def completions(services: Services, request: Request) -> Response:
    asked = await services.bodies.read(CompletionRequest, request)
    plan, identity = _plan(asked, services.limits), new_identity("cmpl-")
    events = partial(_events, asked, identity) if asked.stream else None
    return await respond(services, request, plan, partial(_document, asked, identity), events)


def _plan(asked: CompletionRequest, limits: Limits) -> AnswerPlan:
    """The answers that a request asks for. Raises ApiError: 400, it asks for what cannot be."""
    prompts = texts_of("prompt", asked.prompt, may_be_empty=True)
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
    stated = _MAX_TOKENS if asked.max_tokens is None else asked.max_tokens
    max_tokens = answer_length("max_tokens", stated, limits)
    stop = stop_strings(asked.stop, limits)
    priority = priority_of(asked)

    def requests(engine: Engine) -> Sequence[AnswerRequest]:
        require_followed(asked, engine)
        drafting = drafting_of(asked.speculation, asked.prediction, engine.open_drafters)
        stated = format_of(asked)
        options = AnswerOptions(
            max_tokens=max_tokens,
            stop=stop,
            raw=True,
            logprobs=top,
            prompt_logprobs=bool(asked.echo) and top is not None,
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


async def _document(asked: CompletionRequest, identity: Identity, answers: Answers) -> dict[str, Any]:
    words = answers.model.words if asked.logprobs is not None else None

    def choice(index: int, answer: Completion) -> dict[str, Any]:
        echoed = _echoed(answers, index, asked)
        logprobs = _logprobs(answer, words, TextPlaces(words, echoed)) if words else None
        return _choice(index, echoed + answer.text, logprobs, answer.finish_reason)

    made = await answers.complete()
    # Not in the event loop: a prompt may have many tokens.
    choices = await in_thread(lambda: [choice(i, answer) for i, answer in enumerate(made)])
    return {**answers.head(identity, "text_completion"), "choices": choices, "usage": answers.usage()}


async def _events(asked: CompletionRequest, identity: Identity, answers: Answers) -> AsyncGenerator[bytes, None]:
    head = answers.head(identity, "text_completion")
    words = answers.model.words if asked.logprobs is not None else None
    has_usage = bool(asked.stream_options and asked.stream_options.include_usage)
    nothing = {"usage": None} if has_usage else {}
    num_answers = len(answers.requests)
    texts = [_echoed(answers, i, asked) for i in range(num_answers)]
    places = [TextPlaces(words, echoed) if words else None for echoed in texts]
    for i, echoed in enumerate(texts):
        if echoed:
            yield event({**head, "choices": [_choice(i, echoed)], **nothing})
    async with aclosing(answers.chunks()) as chunks:
        async for i, chunk in chunks:
            if chunk.text or chunk.finish_reason or (words and _has_logprobs(chunk)):
                yield event({**head, "choices": [_part(i, chunk, words, places[i])], **nothing})
    if has_usage:
        yield event({**head, "choices": [], "usage": answers.usage()})
    yield DONE


def _part(index: int, chunk: Chunk, words: TokenWords | None, places: TextPlaces | None) -> dict[str, Any]:
    """The addition of a chunk to a choice."""
    logprobs = _logprobs(chunk, words, places) if words and places and _has_logprobs(chunk) else None
    return _choice(index, chunk.text, logprobs, chunk.finish_reason)


def _has_logprobs(chunk: Chunk) -> bool:
    return bool(chunk.logprobs or chunk.prompt_logprobs)


def _logprobs(found: Chunk | Completion, words: TokenWords, places: TextPlaces) -> dict[str, Any]:
    """Those of the prompt, where it has them, and of the answer."""
    prompt = completion_logprobs(found.prompt_logprobs, words, places)
    if found.logprobs:
        places.begin_answer()
    answer = completion_logprobs(found.logprobs, words, places)
    return {name: [*prompt[name], *answer[name]] for name in prompt}


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None = None, reason: str | None = None
) -> dict[str, Any]:
    ended = reason and ("stop" if reason == "stop" else "length")
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": ended}


def _echoed(answers: Answers, index: int, asked: CompletionRequest) -> str:
    """The prompt, where a request wants it before the answer."""
    if not asked.echo:
        return ""
    prompt = texts_of("prompt", asked.prompt, may_be_empty=True)[index // (asked.n or 1)]
    return prompt if isinstance(prompt, str) else answers.model.engine.detokenize(prompt)
