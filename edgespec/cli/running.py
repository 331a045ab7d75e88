"""A server of this user on this machine, asked over HTTP: the models that it has loaded."""

import json
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from edgespec import EdgeSpecError
from edgespec.config.config_file import read_settings
from edgespec.config.options import OPTIONS

_WAIT_S = 3.0
_MOST_BYTES = 1 << 20


def loaded_models() -> tuple[str, list[str]]:
    """The address of the server that the configuration names, and the models that it has loaded.

    Raises EdgeSpecError: No server answers there, or it refuses the key.
    """
    stated = read_settings()
    host, port, key = (
        stated[name].value if name in stated else OPTIONS[name].default for name in ("host", "port", "api-key")
    )
    url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urlopen(Request(f"{url}/v1/models", headers=headers), timeout=_WAIT_S) as answer:
            models = json.loads(answer.read(_MOST_BYTES))["data"]
        return url, [str(model["id"]) for model in models if model.get("is_loaded")]
    except (URLError, OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, HTTPError) and error.code == 401:
            wrong = "refuses the api-key that is set" if key else "wants a key"
            raise EdgeSpecError(f"the server at {url} {wrong}; give the key in EDGESPEC_API_KEY") from None
        why = getattr(error, "reason", error)
        raise EdgeSpecError(
            f"no server of edgespec answers at {url} ({why}); start one with: edgespec serve, or name its port: "
            "EDGESPEC_PORT=8081 edgespec models ps"
        ) from None
