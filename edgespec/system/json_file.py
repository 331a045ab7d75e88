"""Read a JSON file that may be hostile, in bounded time and memory."""

import json
import stat
from pathlib import Path
from typing import Any


def read_json(path: Path, most_bytes: int) -> Any:
    """Read a file in which no key occurs twice and no number is NaN or infinite.

    Raises:
        OSError: It cannot be read; FileNotFoundError where there is none.
        ValueError: It is no plain file, larger than most_bytes, no JSON, nested too deep, or repeats a key.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is no regular file")
    if found.st_size > most_bytes:
        raise ValueError(f"it has {found.st_size} bytes, which is more than {most_bytes >> 20} MiB")
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=_require_unique)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no number")


def _require_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a key occurs twice")
    return found
