"""A server of this user on this machine, asked over HTTP: the models that it has loaded."""

import json
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from edgespec import EdgeSpecError, UsageError
from edgespec.system.printable import one_line

_WAIT_S = 3.0
_MOST_BYTES = 1 << 20


def loaded_models(host: str, port: int, key: str | None) -> tuple[str, list[dict[str, Any]]]:
    """The address of a server, and the models that it has loaded, as ollama's API tells of them.

    Raises EdgeSpecError: No server answers there, or it refuses the key, or no header can hold that.
    """
    if key and not (key.isascii() and key.isprintable()):
        raise UsageError(
            "--api-key or EDGESPEC_API_KEY has a character that an HTTP header cannot contain; give the key of "
            "the server"
        )
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host).strip("[]")
    url = f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urlopen(Request(f"{url}/api/ps", headers=headers), timeout=_WAIT_S) as answer:
            found = list(json.loads(answer.read(_MOST_BYTES))["models"])
        if not all("device" in each for each in found):
            raise ValueError("another program does, such as ollama")
        return url, found
    except (URLError, OSError, HTTPException, ValueError, KeyError, TypeError) as error:
        if isinstance(error, HTTPError) and error.code == 401:
            wrong = "refuses the API key" if key else "wants a key"
            raise EdgeSpecError(f"the server at {url} {wrong}; give the key in EDGESPEC_API_KEY") from None
        why = getattr(error, "reason", error)
        why = one_line(str(getattr(why, "strerror", None) or why))
        raise EdgeSpecError(
            f"no server of edgespec answers at {url} ({why}); start one with: edgespec serve, or give the port of "
            "one that runs with --port"
        ) from None
