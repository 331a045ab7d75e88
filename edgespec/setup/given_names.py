"""Names that a user gave to models of the home, by the names that their folders had before; and their sources."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from edgespec.config.drafter_names import WORDS
from edgespec.errors import UsageError
from edgespec.manifest import FILE_NAME
from edgespec.runtimes.device_names import device_names
from edgespec.setup.catalog import CATALOG
from edgespec.system.console import warn
from edgespec.system.context_managers import contextmanager
from edgespec.system.disk import hold_lock, put_aside, replace_file
from edgespec.system.typed_json import read_as, read_json

_FILE, _LOCK = "names.json", ".names.lock"
_WAS = "was/"  # before each name that a model had, which may also be that of another source's folder
_FROM = "from/"  # before each name of a model whose source is on this machine or the hub
_NAME = re.compile(r"\w[\w.+-]{0,95}")
_OF_WINDOWS = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


def require_name(name: str) -> None:
    """Raises UsageError: No model of the home can have a name."""
    if not _NAME.fullmatch(name) or name.endswith("."):
        raise UsageError(
            f"'{name[:100]}' cannot be the name of a model; wanted at most 96 letters, digits and - _ . +, as in "
            "my-model"
        )
    if name in CATALOG:
        raise UsageError(f"'{name}' is a model of the catalogue; give another name")
    if name in WORDS:
        raise UsageError(f"'{name}' has a meaning for --drafter; give another name")
    if name in device_names():
        raise UsageError(f"'{name}' is the name of a device; give another name")
    if _OF_WINDOWS.fullmatch(name):
        raise UsageError(f"no file can have the name '{name}' on Windows; give another name")


def given_name(home: Path, folder_name: str) -> str | None:
    """The name that a user gave to the prepared model that a folder name stands for, also while it is repaired."""
    if given := _read(home).get(folder_name):
        folder = home / "models" / given
        return given if any((each / FILE_NAME).is_file() for each in (folder, place_aside(folder))) else None
    return None


def place_aside(folder: Path) -> Path:
    """Where a damaged model lies while it is prepared again."""
    return folder.with_name(f".{folder.name}.damaged.partial")


def current_name(home: Path, name: str) -> str:
    """The name that a model has now which was called by a name or by its folder before; else the name as it is."""
    own = home / "models"
    old = name.removeprefix(f"{own}{os.sep}")
    now = _read(home).get(f"{_WAS}{old}")
    is_gone = now is not None and not os.path.exists(name) and not os.path.exists(own / old)
    return now if now is not None and is_gone and (own / now).is_dir() else name


def note_name(home: Path, old: str, new: str) -> None:
    """Remember that a model has another name now, under the name that its folder had at first and since."""
    with _changing(home) as noted:
        kept = {former: given for former, given in noted.items() if given != new and former != f"{_WAS}{new}"}
        has_first = any(given == old and not former.startswith(_WAS) for former, given in kept.items())
        noted.clear()
        noted.update({former: new if given == old else given for former, given in kept.items()})
        if not has_first:
            noted[old] = new
        if source := noted.pop(f"{_FROM}{old}", None):
            noted[f"{_FROM}{new}"] = source
        noted[f"{_WAS}{old}"] = new


def source_of(home: Path, name: str) -> str | None:
    """The source that a model, which may be gone, was exported from under a name; None where it is not known."""
    return _read(home).get(f"{_FROM}{name}")


def note_source(home: Path, name: str, source: str) -> None:
    """Remember the source of a model by its name, if the home can be written to."""
    with suppress(OSError), _changing(home) as noted:
        noted[f"{_FROM}{name}"] = source


@contextmanager
def _changing(home: Path) -> Iterator[dict[str, str]]:
    """What is noted, to be changed within the block; one process at a time has it."""
    with hold_lock(home / _LOCK):
        noted = _read(home)
        yield noted
        replace_file(home / _FILE, json.dumps(noted, indent=1).encode())


def _read(home: Path) -> dict[str, str]:
    """What is noted; nothing where the file is damaged, which is told, and put aside."""
    path = home / _FILE
    with suppress(OSError):
        try:
            return read_as(dict[str, str], read_json(path))
        except ValueError as error:
            warn(f"{path} is damaged ({error}): models are no longer found by their earlier names")
            warn(f"the damaged file was renamed to {put_aside(path)}")
    return {}
