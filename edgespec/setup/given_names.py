"""Names that a user gave to models of the home, by the names that their folders had before."""

import json
import re
from pathlib import Path

from edgespec.errors import UsageError
from edgespec.setup.catalog import CATALOG
from edgespec.system.disk import replace_file
from edgespec.system.text_files import read_plain

_FILE = "names.json"
_NAME = re.compile(r"\w[\w.+-]{0,95}")
_MOST_BYTES = 1 << 20


def require_name(name: str) -> None:
    """Raises UsageError: No model of the home can have a name."""
    if not _NAME.fullmatch(name) or name.endswith("."):
        raise UsageError(
            f"'{name[:100]}' is no name for a model; wanted letters, digits and - _ . + alone, 96 at most, as in "
            "my-model"
        )
    if name in CATALOG:
        raise UsageError(f"'{name}' is a model of the catalogue; give another name")


def given_name(home: Path, folder_name: str) -> str | None:
    """The name that a user gave to the model that a folder name stands for."""
    return _read(home).get(folder_name)


def note_name(home: Path, old: str, new: str) -> None:
    """Remember that a model has another name now, under the name that its folder had at first."""
    names = _read(home)
    first = next((folder for folder, given in names.items() if given == old), old)
    kept = {folder: given for folder, given in names.items() if given != new}
    replace_file(home / _FILE, json.dumps({**kept, first: new}, indent=1).encode())


def _read(home: Path) -> dict[str, str]:
    try:
        stated = json.loads(read_plain(home / _FILE, _MOST_BYTES))
    except (OSError, ValueError):  # a damaged file costs an export at most
        return {}
    return {str(key): str(value) for key, value in stated.items()} if isinstance(stated, dict) else {}
