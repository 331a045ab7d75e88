"""Files of dataclasses by key, in JSON: what was found out once about a model or a device, to be looked up."""

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, TypeVar

from edgespec.system.disk import replace_file
from edgespec.system.typed_json import read_as, read_json

T = TypeVar("T")
_LARGEST_BYTES = 1 << 20


class RecordFile(Generic[T]):
    """A file that keeps the records written last. One that is damaged, or of another version, counts as empty."""

    def __init__(self, path: Path, kind: type[dict[str, T]], field: str, *, version: int, most: int) -> None:
        """Read nothing yet.

        Args:
            field: The field of the document that holds the records.
            most: How many are kept.
        """
        self.path = path
        self._kind, self._field, self._version, self._most = kind, field, version, most

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
        kept: list[tuple[str, Any]] = [*records.items(), (key, record)][-self._most :]
        document = {"version": self._version, self._field: {key: asdict(each) for key, each in kept}}
        replace_file(self.path, json.dumps(document, indent=1).encode())
        return damage

    def _load(self) -> dict[str, T]:
        """Raises ValueError: It is damaged."""
        try:
            document = read_json(self.path, _LARGEST_BYTES)
        except OSError:
            return {}
        if not isinstance(document, dict):
            raise ValueError("it holds no JSON object")
        if document.get("version") != self._version:
            return {}
        return read_as(self._kind, document.get(self._field))
