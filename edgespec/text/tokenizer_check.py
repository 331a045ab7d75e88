"""Tokenizers that come with models are tried once, in a process that can be ended, before this one reads them.

Rules may grow a text, never end or panic, and what they do is not seen from how they are written. That a file was
tried is recorded in the model home, by its content.
"""

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from edgespec.config.config_file import default_home
from edgespec.errors import ModelError, UsageError
from edgespec.system.line_process import WorkEnded, ask_once
from edgespec.system.typed_json import RecordFile

_PROBE = Path(__file__).with_name("tokenizer_probe.py")
_FILE_NAME = "tokenizers.json"
_MOST = 500  # files that are recorded
# And for each byte of the file: real ones take 0.2 s and 25 MB for each MB.
_MAX_S, _S_EACH = 5.0, 1e-6
_MAX_BYTES, _BYTES_EACH = 512 << 20, 25


@dataclass(frozen=True, kw_only=True)
class TriedTokenizer:
    """library: The version of tokenizers that it was tried with."""

    library: str


def require_harmless(path: Path, data: bytes, kind: type[ModelError], advice: str) -> None:
    """Raises an error of the given kind, ending in advice: The tokenizer at path, whose content is data, harms."""
    key, library = hashlib.sha256(data).hexdigest(), version("tokenizers")
    records = _records()
    if records is not None and (known := records.read().get(key)) and known.library == library:
        return
    if said := _try(path, len(data)):
        raise kind(f"{path} is not a usable tokenizer ({said}); {advice}")
    remember_harmless(data)


def remember_harmless(data: bytes) -> None:
    """Record a tokenizer that was made of one that was tried, or by rules of edgespec."""
    if (records := _records()) is not None:
        with suppress(OSError):  # a home that may not be written: it is tried again the next time
            records.path.parent.mkdir(parents=True, exist_ok=True)
            records.write(hashlib.sha256(data).hexdigest(), TriedTokenizer(library=version("tokenizers")))


def _records() -> RecordFile[TriedTokenizer] | None:
    with suppress(UsageError):  # the configuration, which others complain of, names no home
        path = default_home() / _FILE_NAME
        return RecordFile(path, dict[str, TriedTokenizer], "tried", version=1, most=_MOST)
    return None


def _try(path: Path, num_bytes: int) -> str:
    """The fault of a tokenizer in words; empty for one that can be used."""
    most_s, most_bytes = _MAX_S + _S_EACH * num_bytes, _MAX_BYTES + _BYTES_EACH * num_bytes
    try:
        return ask_once([str(_PROBE), str(path.absolute())], b"\n", most_s, most_bytes).decode().strip()
    except OSError as error:
        raise ModelError(f"cannot start Python to try the tokenizer ({error})") from None
    except WorkEnded as ended:
        return str(ended)
