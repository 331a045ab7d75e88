"""The ASGI application: which path is answered by which endpoint, and what every request passes first."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edgespec import EdgeSpecError
from edgespec.server import ollama_answers, ollama_pages, pages
from edgespec.server.answers import Services
from edgespec.server.chat_completions import chat_completions
from edgespec.server.client import ClientGone
from edgespec.server.completions import completions
from edgespec.server.embeddings import embeddings
from edgespec.server.errors import OLLAMA, ApiError, error_response, explain
from edgespec.server.request_log import RequestLog, log_failure, record_of
from edgespec.server.responses import responses
from edgespec.server.security import Security

Endpoint = Callable[[Services, Request], Awaitable[Response]]
_GET: dict[str, Endpoint] = {
    "/v1/models": pages.list_models,
    "/v1/models/{model:path}": pages.show_model,
    "/v1/tools": pages.list_tools,
    "/health": pages.health,
    "/metrics": pages.metrics,
    "/api/version": ollama_pages.version,
    "/api/tags": ollama_pages.tags,
    "/api/ps": ollama_pages.ps,
}
_POST: dict[str, Endpoint] = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/v1/responses": responses,
    "/v1/embeddings": embeddings,
    "/v1/tools/call": pages.call_tool,
    "/v1/files/text": pages.read_text,
    "/tokenize": pages.tokenize,
    "/detokenize": pages.detokenize,
    "/api/chat": ollama_answers.chat,
    "/api/generate": ollama_answers.generate,
    "/api/embed": ollama_pages.embed,
    "/api/embeddings": ollama_pages.embeddings,
    "/api/show": ollama_pages.show,
    "/api/pull": ollama_pages.pull,
    "/api/push": ollama_pages.refuse_change,
    "/api/create": ollama_pages.refuse_change,
    "/api/blobs/{model:path}": ollama_pages.refuse_change,  # of a model that is to be created
    "/api/copy": ollama_pages.refuse_change,
}
_DELETE: dict[str, Endpoint] = {"/api/delete": ollama_pages.refuse_change}


def make_app(
    services: Services, host: str, key: str | None, origins: Sequence[str] = (), *, has_page: bool = True
) -> Starlette:
    """The application of a server at an address, which asks for a key if there is one.

    origins: Sites whose pages may ask too.
    """

    get: dict[str, Endpoint] = {"/": partial(ollama_pages.root, has_page=has_page), **_GET}
    routes = [
        Route(path, partial(endpoint, services), methods=[method])
        for method, endpoints in (("GET", get), ("POST", _POST), ("DELETE", _DELETE))
        for path, endpoint in endpoints.items()
    ]
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(RequestLog, metrics=services.metrics),
            Middleware(Security, host=host, key=key, origins=origins),
        ],
        exception_handlers={
            ApiError: _refuse,
            EdgeSpecError: _refuse,
            HTTPException: _no_such_page,
            ClientGone: _forget,
        },
    )
    app.router.redirect_slashes = False  # no client that posts follows one
    return app


async def _refuse(request: Request, error: Exception) -> Response:
    told = explain(error, request.scope["path"])
    record_of(request.scope).notes.append(told.code or told.kind)
    if told.status >= 500 and told is not error:
        log_failure(request.scope, error)
    return error_response(told, request.scope["path"])


async def _no_such_page(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, headers = request.scope["path"], dict(error.headers or {})
    # Those of the API that was asked come first.
    known = sorted(
        ("/", *_GET, *_POST, *_DELETE), key=lambda each: each.startswith(OLLAMA) != path.startswith(OLLAMA)
    )
    meant = (f"/v1{path}", path.removeprefix("/v1"), path.rstrip("/"))
    near = next((f"did you mean {each}? " for each in meant if each in known), "")
    what = f"is not an address of this server; {near}there are {', '.join(known).replace('{model:path}', 'NAME')}"
    if error.status_code == 405:
        what = f"takes {' or '.join(sorted(headers['Allow'].split(', ')))}, and {request.method[:20]} was sent"
    told = ApiError(error.status_code, f"{path[:100]} {what}", headers=headers)
    return error_response(told, path)


async def _forget(request: Request, error: Exception) -> Response:
    """Nobody reads this."""
    record_of(request.scope).notes.append("client gone")
    return Response(status_code=499)
