"""What is asked of an engine: its options as a caller gives them, and checked, with the prompt, as a request."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np

from edgespec.decoding.sampling import SamplingParams
from edgespec.engine.drafting import Drafting
from edgespec.engine.reasoning import ReasoningGate
from edgespec.engine.writing import TextStop
from edgespec.errors import ContextOverflow, ManifestError, UnsuitedModel, UsageError
from edgespec.manifest import Manifest
from edgespec.policy.draft_choice import ALL_DRAFTERS, DraftChoice
from edgespec.tools.call_parser import CallReader
from edgespec.tools.formats import CallFormat
from edgespec.tools.tool import ToolUse
from edgespec.types import TokenConstraint, TokenIds, TokenMask, append


class AnswerOptions(TypedDict, total=False):
    """How to answer a prompt; Engine.stream explains each."""

    system: str | None
    sampling: SamplingParams | None
    max_tokens: int | None
    stop: str | Sequence[str] | None
    raw: bool
    prefill: str | Sequence[int] | TokenIds | None
    drafting: Drafting | None
    logprobs: int | None
    banned: str | Sequence[str] | None
    response_format: Mapping[str, Any] | None
    timeout_s: float | None
    priority: int
    tools: Sequence[Any] | None
    tool_choice: Any
    parallel_tool_calls: bool
    thinking: bool | None
    thinking_budget: int | None
    ends_loops: bool


class CallReading(NamedTuple):
    """The tools that an answer may call, and how its calls are found.

    holds_arguments: Pass on whole calls alone.
    opens_reasoning: The prompt has begun the reasoning, in which nothing is a call.
    """

    use: ToolUse
    format: CallFormat
    holds_arguments: bool = False
    opens_reasoning: bool = False

    def reader(self, stop: TextStop) -> CallReader:
        return CallReader(self.use, self.format, holds_arguments=self.holds_arguments, stop=stop)

    def reasoning(self) -> ReasoningGate | None:
        """Tells which text may have calls; None where all of it may, as a call is demanded from its beginning."""
        return ReasoningGate(is_open=self.opens_reasoning) if self.use.choice == "auto" else None


class Request(NamedTuple):
    """A prompt, and how to answer it.

    prefill: The beginning of the answer, which is given, [num_tokens].
    logprobs: Beside how many of the likeliest tokens to give each token's log-probability; None to give none.
    mask: Which tokens may follow; None for all.
    constraint: What the answer has to match, prefill included; None for any text.
    timeout_s: When to end the answer, in seconds from now; inf for never.
    priority: Answers of a lower one wait for it between two passes.
    calls: Which tools it may call; None for none.
    ends_loops: End it when it repeats one span of tokens over and over.
    """

    prompt: TokenIds  # [num_tokens]
    sampling: SamplingParams
    max_tokens: int
    stop: Sequence[str] = ()
    prefill: TokenIds = np.zeros(0, np.int32)
    drafters: DraftChoice = ALL_DRAFTERS
    logprobs: int | None = None
    mask: TokenMask | None = None
    constraint: TokenConstraint | None = None
    timeout_s: float = math.inf
    priority: int = 0
    calls: CallReading | None = None
    ends_loops: bool = False

    @property
    def reads_logits(self) -> bool:
        """Whether it takes more of a row than the likeliest token."""
        return self.logprobs is not None or self.mask is not None or self.constraint is not None

    @property
    def tokens(self) -> TokenIds:
        """All that the model reads before it writes, [num_tokens]."""
        return append(self.prompt, self.prefill)


def check_texts(name: str, given: str | Sequence[str] | None) -> Sequence[str]:
    """One or several texts as a sequence; raises UsageError: they are none."""
    texts = [given] if isinstance(given, str) else given or ()
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{name} is {given!r}; wanted one or several texts")
    return texts


def check_path(name: str, given: str | Path) -> Path:
    """Raises UsageError: it is no text and no path."""
    if not isinstance(given, str | Path):
        raise UsageError(f"{name} is {given!r}; wanted the path of a file")
    return Path(given)


def check_count(name: str, given: int | None, least: int) -> int | None:
    """Raises UsageError: it is no whole number, or too small."""
    if given is not None and (type(given) is not int or given < least):
        raise UsageError(f"{name} is {given!r}; wanted a whole number from {least}")
    return given


def check_flag(name: str, given: bool) -> bool:
    """Raises UsageError: it is neither True nor False."""
    if type(given) is not bool:
        raise UsageError(f"{name} is {given!r}; wanted True or False")
    return given


def check_priority(given: int) -> int:
    """Raises UsageError: it is no whole number."""
    if type(given) is not int:
        raise UsageError(f"priority is {given!r}; wanted a whole number")
    return given


def check_seconds(name: str, given: float | None) -> float:
    """Seconds above 0, inf for None; raises UsageError: they are none."""
    if given is None:
        return math.inf
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not given > 0:
        raise UsageError(f"{name} is {given!r}; wanted a number of seconds above 0")
    return float(given)


def require_writer(manifest: Manifest) -> None:
    """Raises UnsuitedModel: The model gives vectors of texts, and writes none."""
    if manifest.pooling is not None:
        raise UnsuitedModel(
            f"{manifest.name} was trained to give vectors of texts, and writes none; use Engine.embed, or POST "
            "/v1/embeddings of edgespec serve, or choose a model that writes"
        )


def require_embedding_model(manifest: Manifest) -> None:
    """Raises UnsuitedModel: The model writes text, and gives no vectors."""
    if manifest.pooling is None:
        raise UnsuitedModel(
            f"{manifest.name} is a model that writes text (of the family {manifest.architecture}); a vector of a "
            "text needs one that was trained for embeddings, such as Qwen/Qwen3-Embedding-0.6B"
        )


def require_answerable(request: Request, manifest: Manifest, context_length: int) -> None:
    """Check a request against the model that is to answer it.

    Raises:
        ContextOverflow: The prompt does not fit.
        ManifestError: The prompt has a token that the model does not have.
        UsageError: The prompt has no token, or the sampling is none or biases a token that the model lacks.
    """
    sampling, tokens = request.sampling, request.tokens
    if not isinstance(sampling, SamplingParams):
        raise UsageError(f"sampling is {sampling!r}; wanted SamplingParams")
    if (largest := max(sampling.logit_bias, default=0)) >= manifest.vocab_size:
        raise UsageError(
            f"logit_bias has the token {largest}, which the model lacks; wanted ids from 0 to "
            f"{manifest.vocab_size - 1}"
        )
    if not len(tokens):
        raise UsageError("the prompt is empty; give at least one token")
    if len(tokens) > context_length:
        raise ContextOverflow(len(tokens), context_length, manifest.context_length)
    if (last := int(tokens.max())) >= manifest.vocab_size:
        raise ManifestError(
            f"the tokenizer of {manifest.name} gives the token {last}, and the model has "
            f"{manifest.vocab_size}; they are not of one model, export it again"
        )
