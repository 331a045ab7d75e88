"""The parts of a split GGUF file, by their names: NAME-00001-of-00003.gguf. Reads no file."""

import re
from pathlib import Path

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def part_names(name: str) -> list[str]:
    """The names of all parts, the first one first, of the file that name is a part of.

    `m-00002-of-00002.gguf` gives `m-00001-of-00002.gguf` and itself; `m.gguf`, which is whole, itself.
    """
    match = _PART.fullmatch(name)
    if not match or not 1 <= int(match[2]) <= int(match[3]):
        return [name]
    return [f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)]


def as_text(name: str) -> str:
    """A file name for manifests and cards: bytes of it that are not UTF-8 become U+FFFD."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def part_paths(path: Path) -> list[Path]:
    return [path.with_name(name) for name in part_names(path.name)]


def whole_name(name: str) -> str:
    """What a file would be called without its number: `m.gguf` for `m-00002-of-00003.gguf`."""
    match = _PART.fullmatch(name)
    return f"{match[1]}.gguf" if match else name
