"""The chat page at the address of the server: it asks this server alone, and loads nothing from anywhere."""

import secrets
from pathlib import Path

from starlette.responses import HTMLResponse, Response

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
