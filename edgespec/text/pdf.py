"""The text of a PDF, read by pypdf in a process of its own: a file may be hostile, and is given up in time."""

import base64
import json
from importlib.util import find_spec
from pathlib import Path

from edgespec.errors import EdgeSpecError, UsageError
from edgespec.system.line_process import WorkEnded, ask_once

_MOST_S = 60.0
_MOST_BYTES = 1 << 30  # that the process may hold
_READER = Path(__file__).with_name("pdf_reader.py")


def read_pdf(data: bytes, shown: str, most_bytes: int) -> str:
    """The text of all pages, with an empty line between two.

    Args:
        shown: What messages call the file.
        most_bytes: Of the text.

    Raises:
        UsageError: The file is damaged or encrypted, has no text or too much of it, or takes too long.
        EdgeSpecError: pypdf is missing.
    """
    if find_spec("pypdf") is None:
        raise EdgeSpecError(
            f'{shown} is a PDF, whose text pypdf reads, which is missing; pip install "edgespec[pdf]"'
        )
    asked = {"data": base64.b64encode(data).decode(), "most_bytes": most_bytes}
    try:
        found = json.loads(ask_once([str(_READER)], json.dumps(asked).encode() + b"\n", _MOST_S, _MOST_BYTES))
    except WorkEnded as error:
        raise UsageError(f"{shown} is a PDF that cannot be read ({error}); attach its text") from None
    if "fault" in found:
        raise UsageError(f"{shown} {found['fault']}")
    return str(found["text"])
