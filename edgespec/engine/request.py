"""A request to an engine: its options as a caller gives them, and checked, with its prompt and its drafters."""

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import Parameter, signature
from types import NoneType
from typing import Any, NamedTuple, TypedDict, TypeVar, cast, get_args

import numpy as np

from edgespec.config.drafter_names import MAX_DRAFT_TOKENS
from edgespec.config.options import LOAD_PARAMETERS
from edgespec.decoding.sampling import SamplingParams
from edgespec.draft.answer_cache import PredictionDrafter
from edgespec.draft.drafter import Drafter
from edgespec.draft.speculation import ALL_DRAFTERS, DraftChoice
from edgespec.draft.text_source import constrained
from edgespec.errors import ContextOverflow, ManifestError, UnsuitedModel, UsageError
from edgespec.grammar.python_type import read_schema
from edgespec.manifest import Manifest
from edgespec.system.arguments import advise, explains_arguments, plain_number, require_kind
from edgespec.system.printable import HALF
from edgespec.text.tokenizer import Tokenizer
from edgespec.tools.formats import CallFormat
from edgespec.tools.tool import ToolUse, parse_tools
from edgespec.types import Overflow, TokenConstraint, TokenIds, TokenMask, ToolChoice, append

OVERFLOWS = get_args(Overflow)
Method = TypeVar("Method", bound=Callable[..., Any])
_LIMITS = ("max_tokens", "thinking_budget")  # of which -1 is none
_SECONDS = "a number of seconds above 0"
_LONG = 16  # characters of a prediction for each token of the context, more than any answer has


@explains_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """How drafts are made for one answer. Where the engine is deterministic, its text stays the same.

        Drafting(drafters=())  # plain decoding
        Drafting(drafters=["suffix"], draft_length=4)
        Drafting(prediction="def area(width, height):")  # the answer may repeat this text

    drafters: Names of open drafters that may draft; None for all of them.
    draft_length: Tokens in a draft, at most 24; None for as many as save time.
    prediction: A text that the answer is expected to repeat in part. Parts of it are drafted, and count as drafted
        by "prediction". It is cut where no answer can reach.

    Raises:
        UsageError: A value has the wrong type or is out of range.
    """

    drafters: Sequence[str] | None = None
    draft_length: int | None = None
    prediction: str = ""

    def __post_init__(self) -> None:
        names, length = self.drafters, self.draft_length
        are_named = isinstance(names, Collection) and all(isinstance(name, str) for name in names)
        if names is not None and (isinstance(names, str) or not are_named):
            raise UsageError(f"drafters is {names!r:.60}; wanted a list of names")
        if length is not None and (type(length) is not int or not 1 <= length <= MAX_DRAFT_TOKENS):
            raise UsageError(f"draft_length is {length!r}; wanted a whole number from 1 to {MAX_DRAFT_TOKENS}")
        require_kind("prediction", self.prediction, str, "a text")


def choose_drafters(
    drafting: Drafting, open_drafters: Sequence[str], prompt: TokenIds, tokenizer: Tokenizer, context: int
) -> DraftChoice:
    """The drafters of an answer to a prompt.

    Args:
        open_drafters: Names of the engine's drafters.
        context: The engine's context length, in tokens.

    Raises UsageError: A drafter is named that is not open.
    """
    if unknown := [name for name in drafting.drafters or () if name not in open_drafters]:
        there = ", ".join(open_drafters) or "none, as the model was loaded without"
        raise UsageError(f"no drafter '{unknown[0]}' is open; open are: {there}")
    further: tuple[Drafter, ...] = ()
    if drafting.prediction:
        predicted = tokenizer.encode(drafting.prediction[: _LONG * context])[:context]
        further = (PredictionDrafter(prompt, predicted),)
    names = None if drafting.drafters is None else frozenset(drafting.drafters)
    return DraftChoice(names, drafting.draft_length, further)


def under_constraint(choice: DraftChoice, constraint: TokenConstraint, num_prompt: int) -> DraftChoice:
    """The drafters of an answer that has to match a grammar: what it forces is drafted too, and drafts are cut."""
    return replace(choice, adapt=partial(constrained, constraint=constraint, num_prompt=num_prompt))


class SamplingOptions(TypedDict, total=False):
    """Fields of SamplingParams by themselves; None leaves one as the sampling has it."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    logit_bias: Mapping[int, float] | None


class _MessageOptions(TypedDict, total=False):
    """How any message of a conversation is to be answered."""

    sampling: SamplingParams | None
    max_tokens: int | None
    stop: str | Sequence[str] | None
    response_format: Mapping[str, Any] | None
    schema: Any
    thinking: bool | None
    thinking_budget: int | None
    ends_loops: bool | None


class TalkOptions(_MessageOptions, total=False):
    """Those, and the tools of a conversation."""

    tools: Sequence[Any] | None
    tool_choice: ToolChoice | None
    parallel_tool_calls: bool


class Settings(TalkOptions, total=False):
    """How a conversation is to be answered; Conversation explains each."""

    overflow: Overflow


class ReplyOptions(_MessageOptions, SamplingOptions, total=False):
    """How one message is to be answered, beside what its conversation says; Engine.stream explains each."""

    drafting: Drafting | None
    logprobs: int | None
    prompt_logprobs: bool
    banned: str | Sequence[str] | None
    timeout_s: float | None
    priority: int


class AnswerOptions(TalkOptions, ReplyOptions, total=False):
    """How to answer a prompt; Engine.stream explains each."""

    system: str | None
    raw: bool
    prefill: str | Sequence[int] | TokenIds | None
    template_options: Mapping[str, Any] | None
    whole_tool_calls: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSettings:
    """AnswerOptions with their defaults, checked; what an answer is made by.

    Raises:
        UsageError: One has a wrong type or is out of range.
    """

    system: str | None = None
    sampling: SamplingParams | None = None
    max_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    raw: bool = False
    prefill: str | Sequence[int] | TokenIds | None = None
    drafting: Drafting | None = None
    logprobs: int | None = None
    prompt_logprobs: bool = False
    banned: str | Sequence[str] | None = None
    response_format: Mapping[str, Any] | None = None
    schema: Any = None
    timeout_s: float | None = None
    priority: int = 0
    tools: Sequence[Any] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    whole_tool_calls: bool = False
    thinking: bool | None = None
    template_options: Mapping[str, Any] | None = None
    thinking_budget: int | None = None
    ends_loops: bool | None = None

    def __post_init__(self) -> None:
        for name in ("raw", "prompt_logprobs", "parallel_tool_calls", "whole_tool_calls"):
            require_kind(name, getattr(self, name), bool, "True or False")
        for name in ("ends_loops", "thinking"):
            require_kind(name, getattr(self, name), (bool, NoneType), "True, False or None")
        for name in (*_LIMITS, "logprobs"):
            given = getattr(self, name)
            if given is not None and (type(given) is not int or given < 0):
                no_limit = ", or -1 or None for no limit" if name in _LIMITS else ""
                raise UsageError(f"{name} is {given!r}; wanted a whole number from 0{no_limit}")
        for name in ("stop", "banned"):
            _require_spelled(name, check_texts(name, getattr(self, name)))
        if self.schema is not None and self.response_format is not None:
            raise UsageError(
                "schema and response_format both say what the answer has to match; leave one of them out"
            )
        require_kind("drafting", self.drafting, (Drafting, NoneType), "Drafting, such as Drafting(drafters=())")
        require_kind("priority", self.priority, int, "a whole number")
        require_kind("timeout_s", self.timeout_s, (int, float, NoneType), _SECONDS)
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise UsageError(f"timeout_s is {self.timeout_s!r}; wanted {_SECONDS}")

    @property
    def is_loop_ended(self) -> bool:
        """True if an answer ends where it repeats itself: as asked for, or because nothing else bounds it."""
        return self.max_tokens is None if self.ends_loops is None else self.ends_loops

    @property
    def format(self) -> Mapping[str, Any] | None:
        """The format of the answer, as response_format states it; None for any text.

        Raises FormatError: schema is none.
        """
        if self.schema is None:
            return None if is_any_text(self.response_format) else self.response_format
        return {"type": "json_schema", "schema": read_schema(self.schema)}

    @property
    def banned_texts(self) -> Sequence[str]:
        return check_texts("banned", self.banned)


def answer_settings(
    options: AnswerOptions | TalkOptions | ReplyOptions, suggested: SamplingParams | None
) -> AnswerSettings:
    """The options; their sampling, or else the one that the model's files suggest, with single fields in it.

    Of max_tokens and thinking_budget -1 is no limit.
    """
    given: dict[str, Any] = {name: plain_number(value) for name, value in options.items()}
    for name in _LIMITS:
        if type(given.get(name)) is int and given[name] == -1:
            given[name] = None
    require_kind("sampling", found := given.pop("sampling", None), (SamplingParams, NoneType), "SamplingParams")
    sampling = found or suggested or SamplingParams()
    stated = {name: given.pop(name, None) for name in SamplingOptions.__annotations__}
    single = {name: value for name, value in stated.items() if value is not None}
    return AnswerSettings(sampling=replace(sampling, **single) if single else sampling, **given)


def checked_setting(name: str, value: Any, engine: Any) -> Any:
    """The value of a setting of a conversation, as it is kept.

    Raises:
        AttributeError: There is no setting of this name.
        UsageError: It cannot have this value.
    """
    if name == "engine" and not hasattr(value, "model_sampling"):
        raise UsageError(f"engine is {value!r:.60}; wanted an Engine, which load returns")
    if name == "system":
        require_kind(name, value, (str, NoneType), "a text")
    if name == "overflow" and value not in OVERFLOWS:
        raise UsageError(f"overflow is {value!r:.60}; wanted {' or '.join(OVERFLOWS)}")
    if name == "max_tokens" and value == 0:
        raise UsageError("max_tokens is 0; wanted a whole number from 1")
    if name == "tools":
        parse_tools(value)
        return tuple(value or ())
    if name in TalkOptions.__annotations__:
        settings = answer_settings(cast("TalkOptions", {name: value}), engine.model_sampling)
        if settings.format is not None:
            require_format(settings.format)
        return getattr(settings, name)
    if name not in (known := ("engine", "system", *Settings.__annotations__)):
        raise AttributeError(
            f"a conversation has no setting '{name}'{advise(name, known, advice_of('Conversation'))}"
        )
    return value


def lists_options(method: Method) -> Method:
    """Has help() and inspect.signature list the options that a method takes by **, and errors explain others."""
    stated, defaults = signature(method), signature(AnswerSettings).parameters
    *own, taken = stated.parameters.values()
    (kind,) = get_args(taken.annotation)
    others = {"overflow": "error"}  # of a field of SamplingParams None leaves the sampling as it is
    options = [
        defaults.get(name) or Parameter(name, Parameter.KEYWORD_ONLY, default=others.get(name))
        for name in kind.__annotations__
    ]
    checked = explains_arguments(method, kind.__annotations__, advice_of)
    vars(checked)["__signature__"] = stated.replace(parameters=[*own, *options])
    return checked


class CallReading(NamedTuple):
    """The tools that an answer may call, and how its calls are found.

    holds_arguments: Pass on whole calls alone.
    """

    use: ToolUse
    format: CallFormat
    holds_arguments: bool = False


class Request(NamedTuple):
    """A prompt as tokens, and how to answer it.

    prefill: The beginning of the answer, which is given, [num_tokens].
    mask: Which tokens may follow; None for all.
    constraint: What the answer has to match, prefill included; None for any text.
    calls: Which tools it may call; None for none.
    is_raw: The prompt is a text, or token ids, that the answer continues.
    opens_reasoning: The prompt has begun the reasoning, in which nothing is a call.
    answer_marks: Texts around what comes behind the reasoning, which are left out; none where there are no such.
    """

    prompt: TokenIds  # [num_tokens]
    options: AnswerSettings
    prefill: TokenIds = np.zeros(0, np.int32)
    drafters: DraftChoice = ALL_DRAFTERS
    mask: TokenMask | None = None
    constraint: TokenConstraint | None = None
    calls: CallReading | None = None
    is_raw: bool = False
    opens_reasoning: bool = False
    answer_marks: tuple[str, ...] = ()

    @property
    def sampling(self) -> SamplingParams:
        return self.options.sampling or SamplingParams()

    @property
    def max_tokens(self) -> int:
        """The most tokens of the answer; more than any context has where none were said."""
        return sys.maxsize if self.options.max_tokens is None else self.options.max_tokens

    @property
    def stop(self) -> Sequence[str]:
        return check_texts("stop", self.options.stop)

    @property
    def tokens(self) -> TokenIds:
        """All that the model reads before it writes, [num_tokens]."""
        return append(self.prompt, self.prefill) if len(self.prefill) else self.prompt


def advice_of(function: str) -> dict[str, str]:
    """What to do with arguments that a function of an engine or a conversation lacks, and others have."""
    said = {name: f"{name} is an argument of load" for name in (*LOAD_PARAMETERS.values(), "report", "progress")}
    said |= {
        "precision": "precision is an argument of models.export",
        "prompt": "the prompt is the first argument, a text or messages",
        "stream": "Engine.stream gives an answer as it is made",
    }
    is_of_talk = function.startswith(("Conversation", "Engine.chat"))
    for name in AnswerOptions.__annotations__:
        where = "Engine.generate"
        if is_of_talk and name in ReplyOptions.__annotations__:
            where = "say or stream of the conversation"
        if function.startswith("Conversation.") and name in (*Settings.__annotations__, "system"):
            where = "Engine.chat"
        if function in ("Conversation", "Engine.chat") and name in SamplingOptions.__annotations__:
            where += f", or to {function} in sampling="
        said[name] = f"{name} is an option of an answer; give it to {where}"
    if function in ("Conversation", "Engine.chat"):
        said["prompt"] = "Engine.generate answers messages; Conversation.load goes on with a saved conversation"
    return said


def _require_spelled(name: str, texts: Sequence[str]) -> None:
    """Raises UsageError: A text is empty, or has half of a surrogate pair, which no answer has."""
    for text in texts:
        if not text:
            raise UsageError(f"{name} has an empty text, which every answer holds; wanted at least one character")
        if not text.isascii() and HALF.search(text):
            raise UsageError(f"{name} has {text!r:.60}, half of a surrogate pair, which is not a character")


def check_texts(name: str, given: str | Sequence[str] | None) -> Sequence[str]:
    """One or several texts as a sequence; raises UsageError: they are none."""
    texts = [given] if isinstance(given, str) else given or ()
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{name} is {given!r}; wanted one or several texts")
    return texts


def is_any_text(response_format: object) -> bool:
    """True if a response_format leaves an answer free: there is none, or it is of the type text."""
    return response_format is None or (
        isinstance(response_format, Mapping) and response_format.get("type") == "text"
    )


def require_format(stated: Mapping[str, Any]) -> None:
    """Raises FormatError: No answer can match it, whatever the model is."""
    from edgespec.grammar.response_format import read_format  # with all that reads grammars

    read_format(stated)


def require_writer(manifest: Manifest) -> None:
    """Raises UnsuitedModel: The model gives vectors of texts, and writes none."""
    if manifest.pooling is not None:
        raise UnsuitedModel(
            f"{manifest.name} is an embedding model and writes no text; use Engine.embed, or POST /v1/embeddings "
            "of edgespec serve, or choose a model that writes text"
        )


def require_embedding_model(manifest: Manifest) -> None:
    """Raises UnsuitedModel: The model writes text, and gives no vectors."""
    if manifest.pooling is None:
        raise UnsuitedModel(
            f"{manifest.name} is a model that writes text (of the family {manifest.architecture}); embeddings "
            "need one that was trained for them, such as Qwen/Qwen3-Embedding-0.6B"
        )


def require_answerable(request: Request, manifest: Manifest, context_length: int) -> None:
    """Check a request against the model that is to answer it.

    Raises:
        ContextOverflow: The prompt does not fit.
        ManifestError: The prompt has a token that the model does not have.
        UsageError: The prompt has no token, or the sampling biases a token that the model lacks.
    """
    sampling, tokens = request.sampling, request.tokens
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
