"""Tables of the product that are data: TOML files beside the modules that read them."""

import tomllib
from pathlib import Path
from typing import Any


def read_table(module_file: str, name: str) -> dict[str, Any]:
    """The table in a file beside a module, with tuples in the place of lists."""
    table: dict[str, Any] = _frozen(tomllib.loads(Path(module_file).with_name(name).read_text(encoding="utf-8")))
    return table


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _frozen(each) for name, each in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
