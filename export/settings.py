"""Settings of a source, checked as they are read, since a file may state anything."""

import errno
import glob
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgespec.errors import MemoryExhausted, SourceError
from edgespec.manifest import FILE_NAME, SuggestedSampling
from edgespec.system.command_line import quote
from edgespec.system.context_managers import contextmanager
from edgespec.system.tables import read_table
from edgespec.system.text_files import POINTER, decode_text, is_pointer, read_plain
from edgespec.system.typed_json import read_as

SETTING_NAMES = read_table(__file__, "setting_names.toml")
_TOO_LARGE = 1_000_000_000
_LARGEST = 1e15  # bases of rotary positions are up to 1e11, of Falcon-H1
_MAX_TEXT_BYTES = 16 << 20  # ten times a configuration that lists thousands of added tokens
# Errors of reading a setting of an unexpected type; sources are foreign files.
UNUSUAL = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, OSError)
# Endings of names while programs download.
_UNFINISHED = (".part", ".partial", ".incomplete", ".crdownload", ".download", ".tmp", ".aria2")
_CUTS = ("top_k", "top_p", "min_p")
_SAMPLING_NAMES = ("temperature", *_CUTS, "repetition_penalty")
# What a GGUF file calls them; newer converters write them there.
_GGUF_SAMPLING_NAMES = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
_DIGITS = 6  # of single precision, in which GGUF has them
ADAPTER_SETTINGS = "adapter_config.json"  # of PEFT


class UnreadLayout(SourceError):
    """A key or a tensor that no model of its family has, or one that each has is missing."""


@dataclass(frozen=True)
class SourceSettings:
    """Values by key, each key after the prefix; None counts as missing."""

    path: object
    values: Mapping[str, Any]
    prefix: str = ""

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(self.prefix + key)
        return default if value is None else value

    def number(self, key: str, default: Any = None) -> float:
        """Raises SourceError: The value is not a positive number, or is too large for any model."""
        return float(self._positive(key, default))  # the attributes of a graph tell 4 from 4.0

    def _positive(self, key: str, default: Any) -> float:
        value = self.get(key, default)
        if isinstance(value, Sequence) and not isinstance(value, str) and len(set(map(repr, value))) == 1:
            value = value[0]  # of each layer, as newer converters write some
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < _LARGEST:
            found = "missing" if value is None else repr(value)
            raise SourceError(
                f"{self.path}: {self.prefix}{key} is {found}, wanted a positive number below {_LARGEST:g}"
            )
        return value

    def count(self, key: str, default: Any = None) -> int:
        """Raises SourceError: The value is not a positive whole number, or is too large for any model."""
        value = self._positive(key, default)
        if not isinstance(value, int) or value >= _TOO_LARGE:
            raise SourceError(
                f"{self.path}: {self.prefix}{key} is {value!r}, wanted a whole number below {_TOO_LARGE}"
            )
        return value

    def optional(self, key: str, default: Any = None) -> float | None:
        """A positive number, or None where source and default state none."""
        return None if self.get(key, default) is None else self.number(key, default)


@contextmanager
def translate_unusual(source: Path) -> Iterator[None]:
    """Errors of reading a foreign file as SourceError."""
    try:
        yield
    except PermissionError as error:
        raise SourceError(f"{error.filename or source} may not be read; fix its permissions") from None
    except UNUSUAL as error:
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            raise MemoryExhausted(f"out of memory while reading {source}; close other programs") from None
        raise SourceError(
            f"{source} cannot be understood ({type(error).__name__}: {error}); it is damaged or of an unknown kind"
        ) from error


def require_no_pointer(path: Path) -> None:
    """Raises SourceError: The file is a pointer of Git LFS."""
    if path.is_file() and is_pointer(path):
        raise SourceError(f"{path} {POINTER}")


def describe_unfinished(path: Path) -> str | None:
    """The part of a file that a download left, in words; None where there is none."""
    beside = [path.with_name(path.name + ending) for ending in _UNFINISHED]
    beside += sorted(path.parent.glob(f".cache/huggingface/download/{glob.escape(path.name)}*.incomplete"))
    for part in beside:
        if part.is_file():
            return f"{part} ({part.stat().st_size} bytes) is a download that did not end; resume or repeat it"
    return None


def advise_gguf(folder: Path) -> str | None:
    """The advice to give a GGUF file of a folder; None where it has none."""
    files = (each for each in sorted(folder.glob("*.gguf")) if "mmproj" not in each.name)
    return next((f"give the GGUF file itself: {quote(each)}" for each in files), None)


def missing(path: Path, why: str, advice: str) -> SourceError:
    """The error of a file that is not there, which names the part of it that a download left."""
    return SourceError(f"{path} {why}; {describe_unfinished(path) or advice}")


def read_json(path: Path, *, needed: bool = True) -> dict[str, Any]:
    """A JSON object; empty where an unneeded file is missing. Raises SourceError: It is none."""
    if not path.exists() and not needed:
        return {}
    try:
        stated = json.loads(read_text(path))
    except FileNotFoundError:
        if (path.parent / FILE_NAME).exists():
            raise SourceError(
                f"{path.parent} is prepared already, and can be used as it is; to export again, give what it was "
                "exported from"
            ) from None
        raise SourceError(
            f"{path.parent} has no {path.name}; {advise_gguf(path.parent) or 'it is not a complete model folder'}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} is not JSON ({error}); fetch it again") from None
    if not isinstance(stated, dict):
        raise SourceError(f"{path} does not hold a JSON object; fetch it again")
    return stated


def read_text(path: Path) -> str:
    """The text of a small file. Raises SourceError: It is too large, no plain file, or no text."""
    try:
        return decode_text(read_plain(path, _MAX_TEXT_BYTES))
    except ValueError as error:
        raise SourceError(f"{path} cannot be read: {error}; fetch it again") from None


def sampling_from_json(path: object, stated: Mapping[str, Any]) -> SuggestedSampling | None:
    """The sampling that a generation_config.json states; None where it states none.

    As transformers reads it: nothing is sampled where do_sample is false, and the temperature is 1 where none is
    stated. Where do_sample is missing, a temperature or a cut says that tokens are sampled.

    Raises SourceError: A value is no number, or out of range.
    """
    found = {name: value for name in _SAMPLING_NAMES if (value := stated.get(name)) is not None}
    samples = stated.get("do_sample")
    if not found and samples is None:
        return None
    if samples is None:
        samples = any(name in found for name in ("temperature", *_CUTS))
    found = {"temperature": 1.0} | found if samples else {**found, "temperature": 0.0}
    if type(found.get("top_k")) is int:
        found["top_k"] = max(0, found["top_k"])  # some files state -1 for all
    try:
        return read_as(SuggestedSampling, found)
    except ValueError as error:
        raise SourceError(
            f"{path} suggests a sampling that makes no sense: {error}; correct that value or remove it"
        ) from None


def sampling_from_gguf(path: object, metadata: Mapping[str, Any]) -> SuggestedSampling | None:
    """The sampling that the metadata of a GGUF file states; None and errors as for JSON."""
    values = {
        name: metadata.get(f"general.sampling.{_GGUF_SAMPLING_NAMES.get(name, name)}") for name in _SAMPLING_NAMES
    }
    rounded = {
        name: round(value, _DIGITS) if isinstance(value, float) else value for name, value in values.items()
    }
    return sampling_from_json(path, rounded)
