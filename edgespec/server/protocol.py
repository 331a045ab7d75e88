"""Requests of the OpenAI API as dataclasses, and what is checked of each before any work is done for it.

Fields that are not listed are ignored, as clients send many that mean nothing here. Knows nothing of engines and
of HTTP.
"""

import json
import re
from codecs import BOM_UTF8
from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec

from edgespec.server.errors import ApiError, wrong
from edgespec.server.limits import Limits
from edgespec.system.printable import HALF
from edgespec.system.typed_json import read_as, require_known_fields

T = TypeVar("T", bound="ModelRequest")
# No context has room for more, so that a longer list is refused before it makes work.
MAX_TOKENS = 1 << 20
MAX_MESSAGES = 10_000
_MISSING = re.compile(r"(\w+) is missing$")  # of the request itself
_TEXTS = ("text", "input_text", "output_text")  # types of parts


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """A request; each may name a model."""

    model: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationField:
    """edgespec's own field of a request.

    drafter: The name of an open drafter, several joined by "+", auto or none.
    length: Tokens in a draft, or auto.
    off: Decode plainly.
    """

    drafter: str | None = None
    length: int | str | None = None
    off: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    include_usage: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentPart:
    type: str
    text: str | None = None


Content = str | list[ContentPart]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """reasoning is the name of reasoning_content in newer versions of vLLM and in OpenRouter."""

    role: str
    content: Content | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A text that the answer is expected to repeat in part."""

    content: Content
    type: str = "content"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFields(ModelRequest):
    """How tokens are chosen; None is what the model's own settings, or else greedy decoding, have.

    repeat_penalty is the name of repetition_penalty in llama.cpp and Ollama. stop_token_ids, min_tokens and
    ignore_eos of vLLM say when an answer ends, which models here do not follow.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    speculation: SpeculationField | None = None
    priority: int | None = None
    stream: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputs:
    """The format that an answer has to match, by one of these fields."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFields(SamplingFields):
    """The fields that chat completions and completions have in common.

    structured_outputs and the older guided_… are names of vLLM for a response_format; json_schema and grammar are
    those of llama.cpp.
    """

    n: int | None = None
    stream_options: StreamOptions | None = None
    prediction: Prediction | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str | None = None

    @property
    def has_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(GenerationFields):
    """POST /v1/chat/completions

    chat_template_kwargs: enable_thinking turns reasoning on or off, as in vLLM and llama.cpp; in Qwen's API it is
        a field of the request.
    thinking_budget: The most tokens of the reasoning, by Qwen's name; the two below it are those of vLLM and
        llama.cpp. -1 is no limit.
    reasoning_effort: "none" turns it off; others turn it on and are for the chat template, as that of gpt-oss.
    """

    messages: Annotated[list[ChatMessage], msgspec.Meta(max_length=MAX_MESSAGES)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_budget: int | None = None
    thinking_token_budget: int | None = None
    thinking_budget_tokens: int | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest(GenerationFields):
    """POST /v1/completions"""

    prompt: str | Annotated[list[Any], msgspec.Meta(max_length=MAX_TOKENS)]
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


Metadata = Annotated[dict[str, Annotated[str, msgspec.Meta(max_length=512)]], msgspec.Meta(max_length=16)]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputItem:
    type: str = "message"
    role: str | None = None
    content: Content | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TextField:
    format: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningField:
    """effort: "none" turns reasoning off; "low", "medium" and "high" are for templates that know them."""

    effort: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest(SamplingFields):
    """POST /v1/responses; chat_template_kwargs and the budget of reasoning as in a ChatRequest."""

    input: str | Annotated[list[InputItem], msgspec.Meta(max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    text: TextField | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: Metadata | None = None
    include: list[str] | None = None
    reasoning: ReasoningField | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_budget: int | None = None
    thinking_token_budget: int | None = None
    thinking_budget_tokens: int | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingsRequest(ModelRequest):
    """POST /v1/embeddings"""

    input: str | Annotated[list[Any], msgspec.Meta(max_length=MAX_TOKENS)]
    encoding_format: str | None = None
    dimensions: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest(ModelRequest):
    """POST /tokenize: a text, as content or prompt, or messages, to which the chat template is applied."""

    content: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], msgspec.Meta(max_length=MAX_MESSAGES)] | None = None
    with_pieces: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeRequest(ModelRequest):
    """POST /detokenize"""

    tokens: Annotated[list[int], msgspec.Meta(max_length=MAX_TOKENS)] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallRequest(ModelRequest):
    """POST /v1/tools/call"""

    name: str
    arguments: dict[str, Any] | str = "{}"
    id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRequest(ModelRequest):
    """POST /v1/files/text: a file as OpenAI's API has it in a message.

    file_data: In base64, with or without data:application/pdf;base64, before it.
    """

    filename: str
    file_data: str


def parse(kind: type[T], body: bytes) -> T:
    """A request from the body that a client sent.

    Raises ApiError: 400, it is no JSON, an object has a name twice, or a field has a wrong type.
    """
    try:
        body = body.removeprefix(BOM_UTF8)  # curl and PowerShell send files as they are
        stated = msgspec.json.decode(body)
        if not isinstance(stated, dict):
            raise ApiError(400, "the body is not a JSON object; send the fields of the request as one")
        _require_names_once(body)
        found = read_as(kind, stated)
        if isinstance(stated.get("speculation"), dict) and isinstance(found, SamplingFields):
            _require_known_speculation(stated["speculation"], found.speculation)
        return found
    except RecursionError:
        raise ApiError(400, "the body is nested too deep; send a flat request") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if (half := _half_of_pair(body)) is not None:
            raise ApiError(
                400, f"the body has {half}, half of a surrogate pair, which is not a character; send both halves"
            ) from None
        raise ApiError(400, f"the body is not JSON in UTF-8 ({error}); send JSON") from None
    except ValueError as error:
        if missing := _MISSING.match(str(error)):
            raise wrong(missing[1], "is missing; give it") from None
        raise ApiError(400, str(error), param=_first_name(str(error))) from None


def _require_known_speculation(stated: dict[str, Any], found: SpeculationField | None) -> None:
    try:
        require_known_fields(stated, found)
    except ValueError as error:
        raise wrong("speculation", f"has {str(error)[:200]}") from None


def _require_names_once(body: bytes) -> None:
    """Raises ApiError: 400, an object has a name twice, which programs on the way may read differently."""

    def read(pairs: list[tuple[str, Any]]) -> None:
        if len(names := dict(pairs)) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            twice = next(name for name in names if counts[name] > 1)
            raise ApiError(400, f"the name {twice[:40]!r} stands twice in one object; give it once")

    json.loads(body, object_pairs_hook=read)


def _half_of_pair(body: bytes) -> str | None:
    """The escape of half a surrogate pair without the other half in JSON, if there is one."""
    try:
        found = HALF.search(json.dumps(json.loads(body), ensure_ascii=False))
    except (ValueError, RecursionError):
        return None
    return f"\\u{ord(found[0]):04x}" if found else None


def _first_name(message: str) -> str | None:
    """The field that a message of read_as begins with."""
    name = message.partition(" ")[0].partition(".")[0].partition("[")[0].rstrip(":")
    return name if name.isidentifier() and name not in ("wanted", "unknown") else None


def text_of(content: Content | None, place: str) -> str:
    """The text of a message at a place of the request, such as messages[2].

    Raises ApiError: 400, a part is no text, such as an image.
    """
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type not in _TEXTS or part.text is None:
            why = " without a text; give one" if part.type in _TEXTS else "; models here read text alone"
            if part.type in ("file", "input_file"):
                why += ": POST /v1/files/text gives that of a PDF"
            raise wrong(place.partition("[")[0], f"has a part of the type '{part.type[:40]}'{why}", place)
    return "".join(part.text or "" for part in content)


def stop_strings(stop: str | list[str] | None, limits: Limits) -> list[str]:
    """The strings that are not empty. Raises ApiError: 400, there are too many, or one is too long."""
    strings = [each for each in ([stop] if isinstance(stop, str) else stop or []) if each]
    if len(strings) > limits.num_stops:
        raise wrong("stop", f"has {len(strings)} texts; wanted at most {limits.num_stops}")
    for each in strings:
        if len(each) > limits.stop_length:
            raise wrong("stop", f"has a text of {len(each)} characters; wanted at most {limits.stop_length}")
    return strings


def within(param: str, value: int | None, low: int, high: int | None = None) -> int | None:
    """Raises ApiError: 400, a whole number is out of its range."""
    if value is not None and (value < low or (high is not None and value > high)):
        bounds = f"{low} or more" if high is None else f"{low} to {high}"
        raise wrong(param, f"is {value}; wanted {bounds}")
    return value


def answer_length(param: str, asked: int | None, limits: Limits) -> int | None:
    """The most tokens of an answer; None for what a preset says and fits, -1 for as many as fit.

    Raises ApiError: 400, fewer than none are asked for.
    """
    stated = within(param, None if asked == -1 else asked, 0)
    bounds = [bound for bound in (stated, limits.num_tokens) if bound is not None]
    return None if asked is None else min(bounds, default=asked)


Text = str | list[int]


def texts_of(field: str, stated: str | list[Any], *, may_be_empty: bool = False) -> list[Text]:
    """The texts of a field. Raises ApiError: 400, one is none, or empty where it may not be."""
    several = [stated] if isinstance(stated, str) or all(type(each) is int for each in stated) else stated
    for each in several:
        is_ids = isinstance(each, list) and all(type(token) is int for token in each)
        if not (each or may_be_empty) or not (isinstance(each, str) or is_ids):
            raise wrong(field, "is empty or mixed; wanted a text, token ids, or a list of either")
    return [each or "" for each in several]
