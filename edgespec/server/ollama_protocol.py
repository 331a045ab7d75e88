"""Requests of ollama's API as dataclasses, and the requests of OpenAI's API that ask for the same.

Fields that are not listed are ignored, as in OpenAI's. Knows nothing of engines and of HTTP.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec

from edgespec.server.errors import wrong
from edgespec.server.model_host import DEFAULT_S
from edgespec.server.protocol import MAX_MESSAGES, ChatMessage, ChatRequest, CompletionRequest, ModelRequest

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?(e[+-]?\d+)?")
_LONGEST_S = 1e9
# Keywords of a schema that hold a schema or several, and such that hold them by names.
_INNER = {"items", "prefixItems", "anyOf", "oneOf", "additionalProperties"}
_NAMED = {"properties", "$defs", "definitions", "patternProperties"}
_JOINED = {"allOf", "anyOf", "oneOf", "$ref", "patternProperties"}  # may give an object further names
_Whole = int | float | None  # which may come as 512.0; what is behind the point is left out, as in ollama
_EFFORTS = ("low", "medium", "high", "max")
# Ways of sampling that models here do not have, and the value with which each does nothing.
_OFF = {"mirostat": 0, "tfs_z": 1, "typical_p": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaOptions:
    """The options of a request; those on loading a model, such as num_gpu, mean nothing here.

    num_ctx: The context that a client would like; that of a model is fixed when it is loaded.
    num_predict: The most tokens of an answer; -1 and -2 are no limit.
    repeat_penalty: 0 turns it off, as does a repeat_last_n of 0; otherwise it looks at the whole text.
    """

    num_ctx: _Whole = None
    num_predict: _Whole = None
    temperature: float | None = None
    top_k: _Whole = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: _Whole = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: _Whole = None
    stop: str | list[str] | None = None
    mirostat: float | None = None
    tfs_z: float | None = None
    typical_p: float | None = None

    def fields(self) -> dict[str, Any]:
        """Fields of a request of OpenAI's API. Raises ApiError: 400, an option cannot be followed."""
        for name, off in _OFF.items():
            if (value := getattr(self, name)) not in (None, off):
                raise wrong(f"options.{name}", f"is {value:g}, which models here do not have; leave it out")
        stated = (self.num_predict, self.top_k, self.seed)
        length, top_k, seed = (None if each is None else int(each) for each in stated)
        if length is not None and length < -2:
            raise wrong("options.num_predict", f"is {length}; wanted 0 or more, or -1 for no limit")
        names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "stop")
        return {
            **{name: getattr(self, name) for name in names},
            "top_k": top_k,
            "repeat_penalty": 1.0 if 0 in (self.repeat_last_n, self.repeat_penalty) else self.repeat_penalty,
            "seed": seed,
            "max_tokens": -1 if length == -2 else length,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaRequest(ModelRequest):
    """The fields that requests for an answer have in common.

    stream: True where it is left out.
    format: "json", or a JSON schema.
    keep_alive: How long the model stays loaded after it: seconds, or a text such as 5m; below 0 for ever.
    think: Whether the model is to reason, or how much.
    """

    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def _fields(self) -> dict[str, Any]:
        return {"model": self.model, **(self.options or OllamaOptions()).fields(), **self._format_fields()}

    def _chat_fields(self) -> dict[str, Any]:
        """Beside those, the fields of a conversation."""
        logprobs = {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs if self.logprobs else None}
        if isinstance(self.think, bool) or self.think is None:
            return {**self._fields(), **logprobs, "enable_thinking": self.think}
        if self.think not in _EFFORTS:
            raise wrong("think", f"is '{self.think[:40]}'; wanted true, false, {', '.join(_EFFORTS)}")
        return {**self._fields(), **logprobs, "reasoning_effort": self.think}

    def _format_fields(self) -> dict[str, Any]:
        if isinstance(self.format, dict):
            try:
                return {"json_schema": closed(self.format)}
            except RecursionError:
                raise wrong("format", "is nested too deep; use a flatter schema") from None
        if self.format not in (None, "", "json"):
            raise wrong("format", f"is '{self.format[:40]}'; wanted json, or a JSON schema")
        return {"response_format": {"type": "json_object"} if self.format else None}


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaMessage:
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[Any] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaChat(OllamaRequest):
    """POST /api/chat"""

    messages: Annotated[list[OllamaMessage], msgspec.Meta(max_length=MAX_MESSAGES)] | None = None
    tools: list[Any] | None = None

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to answer, and the model is only to be loaded, or closed."""
        return not self.messages

    def as_openai(self) -> ChatRequest:
        """The request of OpenAI's API that asks for the same. Raises ApiError: 400, none does."""
        messages = [_message(each, f"messages[{i}]") for i, each in enumerate(self.messages or ())]
        return ChatRequest(messages=_with_calls(messages), tools=self.tools, **self._chat_fields())


def _message(stated: OllamaMessage, place: str) -> ChatMessage:
    if stated.images:
        raise wrong("messages", "has images; models here read text alone", place)
    return ChatMessage(
        role=stated.role,
        content=stated.content,
        reasoning_content=stated.thinking,
        tool_calls=stated.tool_calls,
        tool_call_id=stated.tool_call_id,
        name=stated.tool_name,
    )


def _with_calls(stated: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages, where clients cut some off: a result without a call before it is what the user says."""
    found: list[ChatMessage] = []
    ids: set[str] = set()
    for each in stated:
        ids |= {str(call.get("id") or "") for call in each.tool_calls or () if isinstance(call, dict)}
        if each.role == "tool" and not ids:
            before = f"{found.pop().content or ''}\n" if found and found[-1].role == "user" else ""
            said = f"{before}<tool_response>\n{each.content or ''}\n</tool_response>"
            found.append(ChatMessage(role="user", content=said))
        else:
            found.append(each if each.tool_call_id in ids else replace(each, tool_call_id=None))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaGenerate(OllamaRequest):
    """POST /api/generate: a prompt as a message of the user, or as it is where raw is true."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None
    images: list[Any] | None = None

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to answer, and the model is only to be loaded, or closed."""
        return not self.prompt

    def as_openai(self) -> ChatRequest | CompletionRequest:
        """The request of OpenAI's API that asks for the same. Raises ApiError: 400, none does."""
        refused = {
            "suffix": "and models here only write at the end; leave it out",
            "template": "and a model here has its own chat template; leave it out, or send a raw prompt",
            "context": "which is not kept here; send the conversation to /api/chat",
            "images": "and models here read text alone; leave them out",
        }
        for name, why in refused.items():
            if getattr(self, name):
                raise wrong(name, f"is given, {why}")
        prompt = self.prompt or ""
        if not self.raw:
            system = [ChatMessage(role="system", content=self.system)] if self.system else []
            return ChatRequest(messages=[*system, ChatMessage(role="user", content=prompt)], **self._chat_fields())
        for name in ("system", "think"):
            if getattr(self, name):
                raise wrong(
                    name, "is given with raw, with which the prompt is read as it is; leave one of them out"
                )
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return CompletionRequest(prompt=prompt, logprobs=logprobs, **self._fields())


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaEmbed(ModelRequest):
    """POST /api/embed with input, and /api/embeddings with prompt.

    truncate: Cut texts to the context, as where it is left out; false to have them refused.
    """

    input: str | list[str] | None = None
    prompt: str | None = None
    truncate: bool | None = None
    dimensions: int | None = None
    keep_alive: float | str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaName(ModelRequest):
    """Requests on a model by its name, which older clients send as name."""

    name: str | None = None
    stream: bool | None = None


def closed(schema: Any) -> Any:
    """A schema whose objects have no names but its properties where it does not say more, as in ollama."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) if key in _INNER else value for key, value in schema.items()}
    for key in _NAMED & schema.keys():
        if isinstance(schema[key], dict):
            made[key] = {name: closed(each) for name, each in schema[key].items()}
    is_open = not schema.get("properties") or schema.keys() & _JOINED
    return made if is_open else {"additionalProperties": False, **made}


def keep_alive_s(stated: float | str | None) -> float | None:
    """The seconds that a model stays loaded, as Lease.keep takes them.

    Raises ApiError: 400, what is stated is no time.
    """
    if stated is None:
        return DEFAULT_S
    text = str(stated).strip()
    parts = _PART.findall(text.lstrip("+-"))
    if parts and text.lstrip("+-") == "".join(map("".join, parts)):
        seconds = sum(float(number) * _UNITS_S[unit] for number, unit in parts)
    elif _NUMBER.fullmatch(text):
        seconds = abs(float(text))
    else:
        raise wrong("keep_alive", f"is '{text[:40]}'; wanted seconds, or a time such as 5m, 0 or -1")
    return None if text.startswith("-") else min(seconds, _LONGEST_S)
