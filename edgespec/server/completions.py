"""POST /v1/completions: texts or token ids that the model continues as they are."""

from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from edgespec import AnswerOptions, Chunk, Completion, Engine
from edgespec.server.answer_fields import (
    AnswerPlan,
    AnswerRequest,
    drafting_of,
    format_of,
    priority_of,
    require_followed,
    sampling_of,
)
from edgespec.server.answer_parts import Identity, TextPlaces, TokenWords, completion_logprobs, new_identity
from edgespec.server.answers import Answers, Services, choice_events, respond
from edgespec.server.errors import wrong
from edgespec.server.limits import Limits
from edgespec.server.protocol import CompletionRequest, answer_length, stop_strings, texts_of, within
from edgespec.system.threads import in_thread

_MAX_TOKENS = 16  # where a request does not say, as the API has it


async def completions(services: Services, request: Request) -> Response:
    asked = await services.bodies.read(CompletionRequest, request)
    plan, identity = completion_plan(asked, services.limits), new_identity("cmpl-")
    events = partial(_events, asked, identity) if asked.stream else None
    return await respond(services, request, plan, partial(_document, asked, identity), events)


def completion_plan(asked: CompletionRequest, limits: Limits, length: int | None = _MAX_TOKENS) -> AnswerPlan:
    """The answers that a request asks for, of so many tokens where it states no number.

    Raises ApiError: 400, it asks for what cannot be.
    """
    prompts = texts_of("prompt", asked.prompt, may_be_empty=True)
    num_each = within("n", asked.n, 1, limits.num_choices) or 1
    num_answers = num_each * len(prompts)
    if num_answers > limits.num_choices:
        raise wrong("prompt", f"and n ask for {num_answers} answers; wanted at most {limits.num_choices}")
    top = within("logprobs", asked.logprobs, 0, limits.num_top_logprobs)
    if asked.suffix:
        raise wrong("suffix", "is given, and models here only write at the end; leave it out")
    if asked.best_of is not None and asked.best_of > num_each:
        raise wrong("best_of", f"is {asked.best_of}; wanted at most n, {num_each}")
    stated = length if asked.max_tokens is None else asked.max_tokens
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
    return {**answers.head(identity, "text_completion"), "choices": choices, **answers.tail()}


def _events(asked: CompletionRequest, identity: Identity, answers: Answers) -> AsyncGenerator[bytes, None]:
    words = answers.model.words if asked.logprobs is not None else None
    texts = [_echoed(answers, i, asked) for i in range(len(answers.requests))]
    firsts = [_choice(i, echoed) for i, echoed in enumerate(texts) if echoed]
    places = [TextPlaces(words, echoed) for echoed in texts] if words else []

    def choices(index: int, chunk: Chunk) -> list[dict[str, Any]]:
        has_logprobs = words and (chunk.logprobs or chunk.prompt_logprobs)
        logprobs = _logprobs(chunk, words, places[index]) if words and has_logprobs else None
        if not (chunk.text or chunk.finish_reason or logprobs):
            return []
        return [_choice(index, chunk.text, logprobs, chunk.finish_reason)]

    head = answers.head(identity, "text_completion")
    return choice_events(answers, head, firsts, choices, has_usage=asked.has_usage)


def _logprobs(found: Chunk | Completion, words: TokenWords, places: TextPlaces) -> dict[str, Any]:
    """The lists of the field `logprobs`: scored tokens of the prompt first, then those of the answer."""
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
