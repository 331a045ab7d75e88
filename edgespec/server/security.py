"""Who may ask: the host name, the origin and the key of a request. Pure ASGI, before anything else is looked at.

A page of another site can make a browser send requests here, and can point a host name of its own at this machine
(DNS rebinding). So a server for this machine alone refuses other host names, and no page of any site is let in: no
response allows an origin (CORS).
"""

import re
import secrets
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgespec import UsageError
from edgespec.server.errors import ApiError
from edgespec.server.sse import error_response

OPEN_PAGE = "/health"  # says nothing but that the server runs
_OWN_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
_HOST = re.compile(r"(?:\[([^]]*)\]|([^:]*))(?::\d*)?")  # a name, or an address of IPv6, and a port
_SAFE_HEADERS = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]


def is_loopback(host: str) -> bool:
    """True if only this machine reaches an address; another name than localhost may lead anywhere."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def require_key_on_network(host: str, key: str | None) -> None:
    """Raises UsageError: Other machines could use the server without a key, or no client could send the key."""
    if key is not None and not key.strip():
        raise UsageError(
            "--api-key or EDGESPEC_API_KEY is empty; give a key, or leave it out on the loopback address"
        )
    if key is not None and not (key.isprintable() and key == key.strip()):
        raise UsageError(
            "--api-key or EDGESPEC_API_KEY has white space at an end, or a character that no header can have, so "
            "that no client could send it; give a key of letters, digits and signs"
        )
    if key is None and not is_loopback(host):
        raise UsageError(
            f"--host {host} lets other machines in, and there is no key; give one with --api-key or "
            "EDGESPEC_API_KEY, or use --host 127.0.0.1"
        )


class Security:
    """Middleware that refuses requests of other sites and without the key."""

    def __init__(self, app: ASGIApp, host: str, key: str | None) -> None:
        self._app = app
        self._names = _OWN_NAMES | {host.strip("[]").lower()} if is_loopback(host) else None
        self._key = key.encode() if key is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *_SAFE_HEADERS]
            await send(message)

        _read_whole_address(scope)
        try:
            self._require_allowed(scope["path"], Headers(scope=scope))
        except ApiError as error:
            await error_response(error)(scope, receive, send_safely)
            return
        await self._app(scope, receive, send_safely)

    def _require_allowed(self, path: str, headers: Headers) -> None:
        if self._names is not None and _host_name(headers.get("host", "")) not in self._names:
            raise ApiError(403, "wrong host name; this server is for this machine alone: ask localhost")
        if "origin" in headers:
            raise ApiError(403, "pages of other sites may not use this server; ask from a program")
        if self._key is not None and path != OPEN_PAGE and not self._has_key(headers):
            raise ApiError(
                401,
                "the key is missing or wrong; send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        assert self._key is not None
        return secrets.compare_digest(given.encode("latin-1", "replace"), self._key)


def _read_whole_address(scope: Scope) -> None:
    """Take host and path from a request for a whole address, as for a proxy; its Host header counts no more."""
    scheme, _, rest = scope["path"].partition("://")
    if scheme.lower() != "http":
        return
    host, _, path = rest.partition("/")
    others = [(name, value) for name, value in scope["headers"] if name != b"host"]
    scope["headers"] = [(b"host", host.encode("latin-1", "replace")), *others]
    scope["path"] = f"/{path}"
    scope["raw_path"] = scope["path"].encode()


def _host_name(host: str) -> str:
    """The name in a Host header, without the port."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2]).lower().rstrip(".") if found else ""
