"""The one place where the server talks to an engine: from a request to the chunks of its answer."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from edgespec.decoding.sampling import SamplingParams
from edgespec.engine.answer_stream import chunks_of
from edgespec.engine.answers import Chunk
from edgespec.engine.drafting import Drafting
from edgespec.engine.engine import Engine
from edgespec.errors import FormatError
from edgespec.server.answer_fields import StatedFormat
from edgespec.server.errors import explain_format
from edgespec.server.model_host import in_daemon
from edgespec.tokenization.prompt_encoder import Prompt
from edgespec.tools.tool import ToolUse


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRequest:
    """An answer that is asked for.

    raw: The prompt is continued as it is, without the chat template.
    prefill: The beginning of the answer, which the model continues.
    response_format: What the answer has to match.
    whole_tool_calls: Give calls once they are whole.
    priority: Answers of a lower one wait for it.
    thinking: Whether the model is to reason first; None leaves that to its chat template.
    thinking_budget: The most tokens of the reasoning; None for no bound.
    opens_reasoning: The prompt ends with the mark that begins the reasoning.
    num_top_logprobs: Likeliest tokens to give beside each token; None for no log-probabilities.
    """

    prompt: Prompt
    sampling: SamplingParams
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    raw: bool = False
    prefill: str = ""
    num_top_logprobs: int | None = None
    drafting: Drafting | None = None
    response_format: StatedFormat | None = None
    tool_use: ToolUse | None = None
    whole_tool_calls: bool = False
    priority: int = 0
    thinking: bool | None = None
    thinking_budget: int | None = None
    opens_reasoning: bool = False


class OpenAnswer(NamedTuple):
    """An answer that is ready to be made: nothing is before its first chunk is asked for."""

    prompt_tokens: int
    chunks: AsyncGenerator[Chunk, None]


async def open_answer(engine: Engine, request: AnswerRequest) -> OpenAnswer:
    """Encode and check a request, while other tasks run; raises what Engine.stream raises.

    Raises ApiError: 400, no answer can match its format.
    """
    use, stated = request.tool_use, request.response_format
    ask = partial(
        engine.stream,
        request.prompt,
        sampling=request.sampling,
        max_tokens=request.max_tokens,
        stop=request.stop,
        raw=request.raw,
        prefill=request.prefill,
        logprobs=request.num_top_logprobs,
        drafting=request.drafting,
        response_format=stated.value if stated else None,
        tools=use.tools if use else None,
        tool_choice=use.choice if use else None,
        parallel_tool_calls=use.is_parallel if use else True,
        whole_tool_calls=request.whole_tool_calls,
        priority=request.priority,
        thinking=request.thinking,
        thinking_budget=request.thinking_budget,
    )
    # In a thread of its own, as a grammar may take minutes to compile, and asyncio's threads are few.
    try:
        stream = await in_daemon(ask)
    except FormatError as error:
        raise explain_format(error, stated.field if stated else None) from None
    return OpenAnswer(stream.prompt_tokens, chunks_of(lambda: stream))


def default_sampling(engine: Engine) -> SamplingParams:
    """How tokens are chosen where a request does not say: as the model's own settings have it, else greedily."""
    return engine.model_sampling or SamplingParams()


def fingerprint(engine: Engine) -> str:
    """A name of all that decides the text of a seed: the model's weights, and its device."""
    manifest = engine.manifest
    weights = manifest.files.get(manifest.weights)
    key = weights.sha256 if weights else manifest.vocab_sha256
    return f"{key[:12]}-{engine.device_names[0]}"
