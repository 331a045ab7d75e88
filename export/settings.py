"""Settings of a source, checked as they are read, since a file may state anything."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgespec.errors import SourceError

_TOO_LARGE = 1_000_000_000


@dataclass(frozen=True)
class Settings:
    """Values by key, each key after the prefix; None counts as missing."""

    path: object
    values: Mapping[str, Any]
    prefix: str = ""

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(self.prefix + key)
        return default if value is None else value

    def number(self, key: str, default: Any = None) -> float:
        """Raises SourceError: the value is not a positive number, or is too large for any model."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < _TOO_LARGE:
            raise SourceError(
                f"{self.path}: {self.prefix}{key} is {value!r}, wanted a positive number below {_TOO_LARGE}"
            )
        return value

    def count(self, key: str, default: Any = None) -> int:
        """Raises SourceError: the value is not a positive whole number."""
        value = self.number(key, default)
        if not isinstance(value, int):
            raise SourceError(f"{self.path}: {self.prefix}{key} is {value!r}, wanted a whole number")
        return value

    def optional(self, key: str, default: Any = None) -> float | None:
        """A positive number, or None where source and default state none."""
        return None if self.get(key, default) is None else self.number(key, default)
