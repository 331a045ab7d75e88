"""A JSON file that may have been made to harm, read in bounded time and memory.

Knows nothing of what it states.
"""

import json
import stat
from pathlib import Path
from typing import Any


def read_json(path: Path, most_bytes: int) -> Any:
    """What a file states; each key once, and numbers that are some.

    Raises:
        OSError: It cannot be read; FileNotFoundError where there is none.
        ValueError: It is no plain file, larger than most_bytes, no JSON, nested too deep, or says something twice.
    """
    state = path.stat()
    if not stat.S_ISREG(state.st_mode):
        raise ValueError("it is no regular file")
    if state.st_size > most_bytes:
        raise ValueError(f"it has {state.st_size} bytes, which is more than {most_bytes >> 20} MiB")
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(stated := dict(pairs)) < len(pairs):
        raise ValueError("a key occurs twice")
    return stated
