"""Refusals and failures as clients read them: an HTTP status, and a body in the shape of the API that was asked.

{"error": {"message": …, "type": …, "param": …, "code": …}} is that of OpenAI's, {"error": …} that of ollama's.
"""

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from starlette.responses import JSONResponse, Response

from edgespec import (
    ContextOverflow,
    ConversationError,
    EdgeSpecError,
    FormatError,
    MemoryExhausted,
    SamplingParams,
    ToolError,
    UnsuitedModel,
    UsageError,
    in_flags,
)

_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_CODES = {413: "too_large", 415: "unsupported_media_type", 429: "queue_full"}
# Names that messages of the engine begin with, and the fields of a request that they are.
_FIELDS = {each.name: each.name for each in fields(SamplingParams)} | {
    "draft_length": "speculation.length",
    "template_options": "chat_template_kwargs",
    "token_ids": "tokens",
    "tools": "tools",
}
_CONVERSATIONS = {  # fields that have what chat completions have as messages
    "/v1/responses": "input",
    "/v1/completions": "prompt",
    "/api/generate": "prompt",
}
OLLAMA = "/api/"  # what addresses of ollama's API begin with
# Names that messages begin with, as ollama's API has them.
_OLLAMA_FIELDS = {each.name: f"options.{each.name}" for each in fields(SamplingParams)} | {
    "repetition_penalty": "options.repeat_penalty",
    "stop": "options.stop",
    "response_format": "format",
    "json_schema": "format",
}
_LISTS = ("GET /v1/models lists", "GET /api/tags lists")  # of either API
_PROMPT, _NOTHING_LEFT = "the prompt ", "no token may follow here"  # as other messages of the engine begin
# In messages of the engine, and not within a text or a path of the schema that they quote.
_FORMAT_NAME = re.compile(r"(?<![\w/'\".#])(?:response_format|json_schema)\b")
_PATH = re.compile(r"[/\\]\w")  # of a file of the server
RETRY_S = 5  # when a client may ask again where nobody can say


class ApiError(Exception):
    """A request that is not answered.

    param: The field of the request that is wrong.
    code: A word for programs.
    headers: Further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code or _CODES.get(status)
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        return _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self, path: str) -> dict[str, Any]:
        """The body of a response from an address."""
        if path.startswith(OLLAMA):
            name, space, rest = str(self).replace(*_LISTS, 1).partition(" ")
            return {"error": _OLLAMA_FIELDS.get(name, name) + space + _FORMAT_NAME.sub("format", rest, 1)}
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def error_response(error: ApiError, path: str) -> Response:
    return JSONResponse(error.body(path), error.status, headers=error.headers)


def wrong(param: str, what: str, place: str = "") -> ApiError:
    """The refusal of a request for one of its fields: its name, or its place in the request, and what is wrong."""
    return ApiError(400, f"{place or param} {what}", param=param)


class Preempted(ApiError):
    """The model has to give its place up to a request of a higher priority."""

    def __init__(self) -> None:
        super().__init__(
            503,
            "a request of a higher priority needs the place of this model; send the request again, or raise "
            "--max-models",
            code="preempted",
            headers={"Retry-After": str(RETRY_S)},
        )


def explain(error: Exception, path: str = "") -> ApiError:
    """Tell a client of an error; of one that nobody foresaw, no more than that there was one.

    path: The address that was asked: errors of the engine name the fields that requests to it have.
    """
    said = in_flags(str(error))  # of options of the command that serves; fields of requests have no flags
    conversation = _CONVERSATIONS.get(path, "messages")
    match error:
        case ApiError():
            return error
        case ContextOverflow():
            return ApiError(400, said, param=conversation, code="context_length_exceeded")
        case ConversationError():
            return ApiError(400, said, param=conversation, code="messages_refused")
        case ToolError():
            return ApiError(400, said, param=error.field)
        case UnsuitedModel():
            return ApiError(400, said, param="model", code="unsuited_model")
        case UsageError():
            return _explain_usage(said, conversation)
        case MemoryExhausted():
            return ApiError(503, said, code="out_of_memory", headers={"Retry-After": str(RETRY_S)})
        case EdgeSpecError() if not _PATH.search(said):
            return ApiError(500, said, code="engine_error")
        case EdgeSpecError():
            return ApiError(500, "the model cannot be used; the server's log says why", code="engine_error")
    return ApiError(500, "the server failed on this request; its log says more", code="internal_error")


def _explain_usage(message: str, conversation: str) -> ApiError:
    """The error of a message of the engine, with the field that it is about where it begins with one."""
    if message.startswith(_PROMPT):
        return ApiError(400, message, param=conversation)
    if message.startswith(_NOTHING_LEFT):
        return ApiError(400, message, param="logit_bias")
    name, space, rest = message.partition(" ")
    field = _FIELDS.get(name)
    return ApiError(400, (field or name) + space + rest, param=field and field.partition(".")[0])


def explain_format(error: FormatError, field: str | None) -> ApiError:
    """Tell a client of a format that no answer can match; field is where the request has it."""
    return ApiError(400, _FORMAT_NAME.sub(field or "response_format", str(error), 1), param=field)


def closing() -> ApiError:
    """The refusal for clients whose answers a shutdown cuts short."""
    return ApiError(503, "the server is shutting down", code="shutting_down", headers={"Retry-After": "5"})
