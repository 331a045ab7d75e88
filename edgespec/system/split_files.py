"""The names of the parts of a split GGUF file: NAME-00001-of-00003.gguf. Reads no file."""

import re
from pathlib import Path

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def part_names(name: str) -> list[str]:
    """List the parts, the first one first, of the file that `name` is a part of.

    `m-00002-of-00002.gguf` gives `m-00001-of-00002.gguf` and itself; `m.gguf`, which is whole, itself.
    """
    match = _PART.fullmatch(name)
    if not match or not 1 <= int(match[2]) <= int(match[3]):
        return [name]
    return [f"{match[1]}-{number:05}-of-{match[3]}.gguf" for number in range(1, int(match[3]) + 1)]


def part_paths(path: Path) -> list[Path]:
    """The paths of all parts of the file that a path names or is a part of."""
    return [path.with_name(name) for name in part_names(path.name)]


def whole_name(name: str) -> str:
    """Leave out the number of a part: `m.gguf` for `m-00002-of-00003.gguf`."""
    match = _PART.fullmatch(name)
    return f"{match[1]}.gguf" if match else name


def source_name(path: Path) -> str:
    """The name of a file or folder; of a commit in the cache of huggingface_hub that of its repository.

    There a file is a link to a blob, whose name is a hash.
    """
    place = path.resolve() if path.is_dir() else path.parent.resolve() / path.name
    is_commit = place.parent.name == "snapshots" and place.parents[1].name.startswith("models--")
    return utf8_name(place.parents[1].name.rpartition("--")[2] if is_commit else place.name)


def utf8_name(name: str) -> str:
    """Replace the bytes of a file name that are not UTF-8 by U+FFFD, for manifests and cards."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
