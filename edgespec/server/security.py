"""Who may ask: the host name, the origin and the key of a request. Pure ASGI, before anything else is looked at.

A page of another site can make a browser send requests here, and can point a host name of its own at this machine
(DNS rebinding). So a server for this machine alone refuses other host names, and lets in its own page and those of
origins that its user has named (CORS).
"""

import re
import secrets
from collections.abc import Sequence
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgespec import UsageError
from edgespec.server.errors import ApiError, error_response

OPEN_PAGE = "/health"  # says nothing but that the server runs
_OPEN = (OPEN_PAGE, "/")  # the chat page holds nothing of its user
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s*]+")  # a scheme, a host and perhaps a port
_OWN_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
# No site can own a name under these (RFC 6761, ICANN): containers ask host.docker.internal for this machine.
_RESERVED = (".localhost", ".internal")
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
    if key is not None and not (key.isascii() and key.isprintable() and key == key.strip()):
        raise UsageError(
            "--api-key or EDGESPEC_API_KEY begins or ends with white space, or has a character that an HTTP "
            "header cannot contain; give a key of ASCII letters, digits and signs"
        )
    if key is None and not is_loopback(host):
        raise UsageError(
            f"--host {host} lets other machines use the server, and there is no key; give one with --api-key or "
            "EDGESPEC_API_KEY, or use --host 127.0.0.1"
        )


def parse_origins(text: str | None) -> tuple[str, ...]:
    """The origins of a list with commas. Raises UsageError: One is no origin."""
    found = [part.strip().rstrip("/").lower() for part in (text or "").split(",") if part.strip()]
    for origin in found:
        if not _ORIGIN.fullmatch(origin):
            raise UsageError(
                f"--allow-origin {origin} is not the origin of a page; wanted a scheme and a host, as in "
                "http://localhost:3000 or app://obsidian.md (* would let every page in that you open)"
            )
    return tuple(found)


class Security:
    """Middleware that refuses requests of sites that were not named, and those without the key."""

    def __init__(self, app: ASGIApp, host: str, key: str | None, origins: Sequence[str] = ()) -> None:
        self._app = app
        self._origins = frozenset(origins)
        self._names = _OWN_NAMES | {host.strip("[]").lower()} if is_loopback(host) else None
        self._key = key.encode() if key is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *_SAFE_HEADERS, *allowed]
            await send(message)

        _read_whole_address(scope)
        headers = Headers(scope=scope)
        allowed = self._cors_headers(headers)
        try:
            name = _host_name(headers.get("host", ""))
            is_own = self._names is None or name in self._names
            if not is_own and not name.endswith(_RESERVED):
                raise ApiError(
                    403,
                    f"the host name is '{name[:80]}', and this server is for this machine alone: ask localhost "
                    "(from a container host.docker.internal), or start it with --host 0.0.0.0 --api-key KEY",
                )
            if allowed and scope["method"] == "OPTIONS":  # a browser asks for leave, without the key
                await Response(status_code=204)(scope, receive, send_safely)
                return
            self._require_allowed(scope["path"], headers, has_pages=is_own)
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, send_safely)
            return
        await self._app(scope, receive, send_safely)

    def _cors_headers(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Headers that let a page of an origin that was named read the response; none for others."""
        origin = headers.get("origin", "")
        if origin.lower() not in self._origins:
            return []
        return [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-allow-methods", b"GET, POST"),
            (
                b"access-control-allow-headers",
                headers.get("access-control-request-headers", "*").encode("latin-1"),
            ),
            (b"access-control-allow-private-network", b"true"),
            (b"access-control-max-age", b"600"),
            (b"vary", b"Origin"),
        ]

    def _require_allowed(self, path: str, headers: Headers, *, has_pages: bool) -> None:
        """Raises ApiError: 403 or 401. has_pages: The host that is asked may have the server's own page."""
        own = {f"{scheme}://{headers.get('host', '')}" for scheme in ("http", "https") if has_pages}
        if not {origin.lower() for origin in headers.getlist("origin")} <= own | self._origins:
            raise ApiError(
                403,
                "web pages of other sites may not use this server; to allow one: edgespec serve --allow-origin "
                "URL",
            )
        if self._key is not None and path not in _OPEN and not _has_key(headers, self._key):
            raise ApiError(
                401,
                "the key is missing or wrong; send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _has_key(headers: Headers, key: bytes) -> bool:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return secrets.compare_digest(given.encode("latin-1", "replace"), key)


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
