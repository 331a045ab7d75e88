"""One line for each request, without what was asked and answered."""

import logging
from dataclasses import dataclass, field
from time import perf_counter
from typing import cast
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgespec.server.errors import error_response, explain
from edgespec.server.metrics import Metrics
from edgespec.system.printable import one_line

_LOG = logging.getLogger("edgespec.server")
_KEY = "edgespec.record"  # in the scope of a request
_LEFT = 499  # the status of a request whose client left before it was answered
_MOST = 60  # characters of a name
_ONE_MODEL = "/v1/models/{model}"  # the only route with a parameter


@dataclass(slots=True)
class RequestRecord:
    """The figures of a request once it has ended."""

    method: str
    path: str
    status: int = _LEFT
    model: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    notes: list[str] = field(default_factory=list)  # such as the drafter and the gain

    def line(self, taken_s: float) -> str:
        """Words that a client chose are printable, and a path has no spaces, so it cannot imitate what follows."""
        parts = [f"{one_line(self.method, _MOST)} {quote(self.path)[:_MOST]} {self.status} in {taken_s:.2f} s"]
        if self.model is not None:
            parts.append(one_line(self.model, _MOST))
        if self.prompt_tokens is not None:
            parts.append(f"{self.prompt_tokens} + {self.completion_tokens or 0} tokens")
        return ", ".join([*parts, *(one_line(note, _MOST) for note in self.notes)])


def record_of(scope: Scope) -> RequestRecord:
    return cast(RequestRecord, scope[_KEY])


def log_failure(scope: Scope, error: Exception) -> None:
    """Log an error of the server; the traceback only where decisions are explained too (--verbose)."""
    record = record_of(scope)
    _LOG.warning("%s %s failed: %s: %s", record.method, record.path[:60], type(error).__name__, error)
    _LOG.debug("traceback", exc_info=error)


class RequestLog:
    """Middleware that logs and counts each request when it has ended, and answers one that failed unforeseen.

    Starlette would raise the error once more behind its answer. uvicorn then closes the connection, on which the
    client may already have asked the next thing.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        record = scope[_KEY] = RequestRecord(scope["method"], scope["path"])
        started = perf_counter()

        async def note_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note_status)
        except Exception as error:
            log_failure(scope, error)
            if record.status != _LEFT:  # the response has begun
                record.status = 500
                raise
            await error_response(explain(error), scope["path"])(scope, receive, note_status)
        finally:
            taken_s = perf_counter() - started
            path = _ONE_MODEL if scope.get("path_params") else str(scope["path"])
            # No client can fill the metrics with paths that are no routes.
            self._metrics.count_request(path if "endpoint" in scope else "other", record.status, taken_s)
            _LOG.info("%s", record.line(taken_s))
