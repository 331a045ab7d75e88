"""JSON that may be hostile: files read in bounded time and memory, values checked against their types.

Types may carry bounds: `Annotated[int, msgspec.Meta(ge=1)]`. Also files of such values by key, which are written.
"""

import json
import re
import reprlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from edgespec.system.disk import replace_file
from edgespec.system.text_files import decode_text, read_plain

T = TypeVar("T")
_LARGEST_BYTES = 1 << 20  # of what others do not expect to be larger: most have a few kB
_PLACE = re.compile(r" - at (?:`key` in )?`\$\.?(.*)`$")
_TYPES = re.compile(r"expected `([^`]+)`(?:, got `\w+`)?", re.IGNORECASE)
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
# What msgspec says beside that, and how a user would say it.
_SAYINGS = (
    (re.compile(r"object missing required field `(\w+)`", re.IGNORECASE), r"\1 is missing"),
    (re.compile(r"invalid (?:enum )?value .*", re.IGNORECASE), "none of the values that may stand there"),
    (re.compile(r"invalid RFC3339 encoded (\w+)", re.IGNORECASE), r"it is no \1 as RFC 3339 writes one"),
    (re.compile(r"of at least length (\d+), got \d+"), r"of length >= \1"),
    (re.compile(r"of at most length (\d+), got \d+"), r"of length <= \1"),
)


def read_json(path: Path, most_bytes: int = _LARGEST_BYTES) -> Any:
    """Read a file in which no key occurs twice and no number is NaN or infinite.

    Raises:
        OSError: It cannot be read; FileNotFoundError where there is none.
        ValueError: It is no plain file, larger than most_bytes, no JSON, nested too deep, or repeats a key.
    """
    text = decode_text(read_plain(path, most_bytes))
    try:
        return json.loads(text, parse_constant=_refuse, object_pairs_hook=require_unique)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


class OtherVersion(ValueError):
    """A file states another version than the one that is read, or none."""


def read_versioned(path: Path, version: int, most_bytes: int = _LARGEST_BYTES) -> dict[str, Any]:
    """Read a file that holds an object and its version.

    Raises OSError and ValueError as read_json does; OtherVersion too.
    """
    document = read_json(path, most_bytes)
    if not isinstance(document, dict):
        raise ValueError("it holds no JSON object")
    if (found := document.get("version", "unknown")) != version:
        raise OtherVersion(f"it is of version {str(found)[:20]}, wanted {version}")
    return document


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not a number")


def require_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON as a dictionary. Raises ValueError: It has a key twice."""
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("a key occurs twice")
    return found


def read_as(kind: type[T], stated: Any) -> T:
    """A value of a type, such as a dataclass, from what JSON holds; unknown fields are ignored.

    Raises ValueError: Where something else is stated, what, and what was expected, such as "kv_cache.head_dim is
    0: wanted a whole number >= 1".
    """
    try:
        return msgspec.convert(stated, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise ValueError(explained(str(error), stated)) from None


def read_lines_as(kind: type[T], content: str) -> Iterator[T]:
    """A value from each line of JSON Lines that is not blank.

    Raises ValueError: A line is no JSON, or read_as refuses it.
    """
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            try:
                yield read_as(kind, json.loads(line))
            except RecursionError:
                raise ValueError(f"line {number} is nested too deep") from None
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number} is not JSON ({error})") from None
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None


def require_known_fields(stated: Any, found: object) -> None:
    """Raises ValueError: Something is stated that read_as left out of what it found."""
    if unknown := _unknown_fields(stated, msgspec.to_builtins(found, str_keys=True)):
        raise ValueError(f"unknown fields {', '.join(unknown)}")


def _unknown_fields(stated: Any, known: Any) -> list[str]:
    if not isinstance(stated, dict):
        return []
    below = [name for key in stated.keys() & known.keys() for name in _unknown_fields(stated[key], known[key])]
    return sorted(map(ascii, stated.keys() - known.keys())) + below


def explained(message: str, stated: Any) -> str:
    """The message of msgspec on a value as a user would say it, with the part of the value that it is about."""
    place = _PLACE.search(message)
    text = message[: place.start()] if place else message
    text = _TYPES.sub(_in_words, text[0].lower() + text[1:])
    for said, plain in _SAYINGS:
        text = said.sub(plain, text)
    if not place or not place[1]:
        return text
    # [...] stands for a key that is not known here, so that the value cannot be looked up.
    if "[...]" in place[1] or "`key`" in place[0]:
        return f"{place[1]}: {text}"
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", place[1]):
        stated = stated[int(index)] if index else stated[name]
    return f"{place[1]} is {reprlib.repr(stated)}: {text}"


def _in_words(types: re.Match[str]) -> str:
    names = [each for each in types[1].split(" | ") if each != "null"]
    return f"wanted {' or '.join(_WORDS.get(each, each) for each in names)}"


@dataclass(frozen=True)
class RecordFile(Generic[T]):
    """A file of dataclasses by key, those written last: what was found out once, to be looked up.

    One that is damaged, or of another version, counts as empty.
    """

    path: Path
    kind: type[dict[str, T]]
    field: str  # of the document, that holds them
    _: KW_ONLY
    version: int
    most: int  # that are kept

    def read(self) -> dict[str, T]:
        with suppress(ValueError):
            return self._load()
        return {}

    def write(self, key: str, record: T) -> str:
        """Store a record; returns what was wrong with the file, which is made again then, and "" if nothing was.

        Raises OSError: The file cannot be written.
        """
        damage = ""
        try:
            records = self._load()
        except ValueError as error:
            records, damage = {}, str(error)
        records.pop(key, None)
        kept: list[tuple[str, Any]] = [*records.items(), (key, record)][-self.most :]
        document = {"version": self.version, self.field: {key: asdict(each) for key, each in kept}}
        replace_file(self.path, json.dumps(document, indent=1).encode())
        return damage

    def _load(self) -> dict[str, T]:
        """Raises ValueError: It is damaged."""
        try:
            document = read_versioned(self.path, self.version)
        except (OSError, OtherVersion):
            return {}
        return read_as(self.kind, document.get(self.field))
