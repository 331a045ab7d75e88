"""The words that name a model: what each of them stands for, and names that are like it."""

import difflib
from collections.abc import Iterable
from pathlib import Path

from edgespec.setup import ollama_models
from edgespec.setup.catalog import CATALOG
from edgespec.setup.repository import HubId, parse_hub_id

_PRECISIONS = ("source", "fp32", "fp16", "int8", "int4", "w8a16")  # that may follow the name of a model


def split_precision(model: str) -> tuple[str, str | None]:
    """The name of a model, and the precision after it if there is one."""
    name, _, precision = model.rpartition(":")
    return (name, precision) if precision in _PRECISIONS else (model, None)


def find_hub_id(name: str) -> HubId | None:
    """The hub id that name is, unless a file or folder has that name."""
    hub_id = parse_hub_id(name)
    return None if hub_id is None or Path(name).exists() or Path(hub_id.repository).exists() else hub_id


def is_named(source: str) -> bool:
    """True if a source is no path, but a name of the catalogue, of the hub or of ollama."""
    return source in CATALOG or source.startswith(ollama_models.PREFIX) or find_hub_id(source) is not None


def near_names(model: str, names: Iterable[str]) -> list[str]:
    """Names like one that no model has; that of ollama's llama3.2:latest begins like llama-3.2-1b."""
    known = {name.casefold(): name for name in names}
    wanted, _, tag = model.casefold().partition(":")
    near = [wanted] if wanted in known else difflib.get_close_matches(model.casefold(), known, 3, cutoff=0.6)
    if tag and not near:
        near = [each for each in known if each.replace("-", "").startswith(wanted.replace("-", ""))]
    return [known[each] for each in near[:3]]
