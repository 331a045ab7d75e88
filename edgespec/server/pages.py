"""The pages beside answers: models, texts to tokens and back, health and metrics."""

from contextlib import suppress
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from edgespec import Engine
from edgespec.server.answers import Services
from edgespec.server.client import run_for_client
from edgespec.server.errors import ApiError
from edgespec.server.messages import conversation_of
from edgespec.server.metrics import CONTENT_TYPE
from edgespec.server.model_host import HostedModel
from edgespec.server.protocol import DetokenizeRequest, TokenizeRequest, text_of
from edgespec.system.threads import in_thread


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
    names, loaded = services.names, set(services.host.loaded)
    found = {model.name: model.document() for model in names.models()}
    plain = {"object": "model", "created": 0, "owned_by": "edgespec"}
    found |= {each.name: {"id": each.name, **plain, "preset_of": each.model} for each in names.unprepared()}
    if names.own_name is not None:
        found = {names.own_name: {"id": names.own_name, **plain}, **found}

    def is_loaded(name: str) -> bool:
        with suppress(ApiError):  # a preset that cannot be used
            return name in loaded or names.served_as(name)[0] in loaded
        return False

    return [{**document, "is_loaded": is_loaded(name)} for name, document in found.items()]


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

    def text(model: HostedModel) -> dict[str, Any]:
        return {"content": model.engine.detokenize(asked.tokens)}

    return await _with_model(services, request, asked.model, text)


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
        ("models_loaded", "Models that are loaded.", len(services.host.loaded)),
    ]
    return PlainTextResponse(services.metrics.text(gauges), media_type=CONTENT_TYPE)
