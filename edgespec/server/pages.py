"""The pages beside answers: models, tools of MCP servers, files, texts to tokens, health, and the chat page.

Models are not told of the tools by themselves: a client sends those that it wants with a request, asks its user
before each call, and sends the result on. The chat page asks this server alone, and loads nothing from anywhere.
"""

import base64
import binascii
import json
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response

from edgespec import EdgeSpecError, Engine, ToolCall, UsageError, read_pdf
from edgespec.server.answers import Services
from edgespec.server.client import run_for_client
from edgespec.server.errors import ApiError, wrong
from edgespec.server.messages import conversation_of
from edgespec.server.metrics import CONTENT_TYPE
from edgespec.server.model_host import HostedModel, in_daemon
from edgespec.server.protocol import DetokenizeRequest, FileRequest, TokenizeRequest, ToolCallRequest, text_of
from edgespec.server.request_log import record_of
from edgespec.system.printable import one_line
from edgespec.system.threads import in_thread

_PAGE = Path(__file__).with_name("page.html")


def show_page() -> Response:
    """The page, whose scripts and styles carry a number that a browser has only from this response."""
    nonce = secrets.token_urlsafe(16)
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    page = _PAGE.read_text(encoding="utf-8").replace("{{nonce}}", nonce)
    return HTMLResponse(page, headers={"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"})


async def list_models(services: Services, request: Request) -> Response:
    return JSONResponse({"object": "list", "data": await in_thread(_documents, services)})


async def show_model(services: Services, request: Request) -> Response:
    if not request.path_params["model"]:
        raise HTTPException(404)
    name = await in_thread(services.names.require, request.path_params["model"])
    documents = await in_thread(_documents, services)
    return JSONResponse(next(each for each in documents if each["id"] == name))


def _documents(services: Services) -> list[dict[str, Any]]:
    """The served models, that of the command line first; those that are loaded say so."""
    names = services.names
    found = {model.name: model.document() for model in names.models()}
    plain = {"object": "model", "created": 0, "owned_by": "edgespec"}
    found |= {each.name: {"id": each.name, **plain, "preset_of": each.model} for each in names.unprepared()}
    if names.own_name is not None:
        found = {names.own_name: {"id": names.own_name, **plain}, **found}
    hosted = {name: services.hosted(name) for name in found}
    contexts = {name: {"context_length": each.engine.context_length} for name, each in hosted.items() if each}
    return [
        {**document, **contexts.get(name, {}), "is_loaded": name in contexts} for name, document in found.items()
    ]


async def tokenize(services: Services, request: Request) -> Response:
    asked = await services.bodies.read(TokenizeRequest, request)
    messages = [text_of(each.content, "messages") + str(each.tool_calls) for each in asked.messages or ()]
    if sum(map(len, [asked.content or asked.prompt or "", *messages])) > services.limits.tokenize_length:
        raise ApiError(
            413, f"the text has more than {services.limits.tokenize_length} characters; send it in parts"
        )
    return await _with_model(services, request, asked.model, lambda model: _tokens(model, asked))


async def detokenize(services: Services, request: Request) -> Response:
    asked = await services.bodies.read(DetokenizeRequest, request)
    return await _with_model(
        services, request, asked.model, lambda model: {"content": model.engine.detokenize(asked.tokens)}
    )


async def _with_model(services: Services, request: Request, name: str | None, work: Any) -> Response:
    """Do work on a loaded model in a thread; the response has its result as JSON."""

    async def lend() -> Response:
        found = await services.name_for(request, name)
        with services.admission.place(1):
            async with services.lease(found) as lease:
                made = services.bodies.in_turn(lambda: JSONResponse(work(lease.model)))
                return await services.admission.wait_for(made)

    return await run_for_client(request.receive, lend())


def _tokens(model: HostedModel, asked: TokenizeRequest) -> dict[str, Any]:
    text = asked.prompt if asked.content is None else asked.content
    if (text is None) == (asked.messages is None):
        raise ApiError(400, "wanted content, which is a text, or messages", param="content")
    engine: Engine = model.engine
    if asked.messages is not None:
        messages, prefill = conversation_of(asked.messages)
        tokens = [*engine.encode(messages, prefill=prefill)]
    else:
        tokens = list(engine.tokenize(text or ""))
    words = model.words if asked.with_pieces else None
    shown = [{"id": token, "piece": words.text(token)} for token in tokens] if words else tokens
    return {"tokens": shown, "count": len(tokens), "max_model_len": engine.context_length}


async def health(services: Services, request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def metrics(services: Services, request: Request) -> Response:
    gauges = [
        ("answers", "Answers that are being made or wait.", services.admission.num_taken),
        ("models_loaded", "Models that are loaded.", len(services.host.hosted)),
    ]
    return PlainTextResponse(services.metrics.text(gauges), media_type=CONTENT_TYPE)


async def list_tools(services: Services, request: Request) -> Response:
    return JSONResponse({"object": "list", "data": [tool.as_dict() for tool in services.tools]})


async def call_tool(services: Services, request: Request) -> Response:
    """Run a call, as the last message of the model has it; its arguments are an object, or the text of one."""
    asked = await services.bodies.read(ToolCallRequest, request)
    runners = {tool.name: tool.run for tool in services.tools}
    if (run := runners.get(asked.name)) is None:
        there_are = (
            f"there are {', '.join(runners)}" if runners else "none was given on start: edgespec serve --mcp"
        )
        raise ApiError(
            404, f"there is no tool '{asked.name[:100]}'; {there_are}", param="name", code="tool_not_found"
        )
    stated = asked.arguments if isinstance(asked.arguments, str) else json.dumps(asked.arguments)
    call = ToolCall(id=asked.id, name=asked.name, arguments=stated)
    record_of(request.scope).notes.append(asked.name)
    text = await _in_place(services, request, partial(run, call))
    return JSONResponse({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text})


async def read_text(services: Services, request: Request) -> Response:
    """The text of a PDF that the request has whole; nothing of it is stored."""
    asked, limits = await services.bodies.read(FileRequest, request), services.limits
    shown = one_line(asked.filename, 100)
    try:
        data = base64.b64decode(asked.file_data.rpartition(",")[2], validate=True)
    except (binascii.Error, ValueError) as error:
        raise wrong("file_data", f"is not base64 ({error}); send the bytes of the file in base64") from None
    if not data.startswith(b"%PDF-"):
        raise wrong("file_data", f"of {shown} is not a PDF; send PDFs here, and text in the message itself")

    def read() -> str:
        try:
            return read_pdf(data, shown, limits.file_text_bytes)
        except UsageError as error:
            raise ApiError(400, str(error), param="file_data") from None
        except EdgeSpecError as error:  # pypdf is missing
            raise ApiError(501, str(error)) from None

    text = await _in_place(services, request, read)
    return JSONResponse({"filename": asked.filename, "text": text})


async def _in_place(services: Services, request: Request, work: Callable[[], str]) -> str:
    """The result of work in a thread; it has a place among the answers until it ends, also without its client."""

    async def run() -> str:
        with services.admission.place(1):
            return await services.admission.wait_for(in_daemon(work))

    return await services.run(request, run())
