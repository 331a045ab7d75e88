"""The layers of the target that a head reads, as its settings number them."""

from collections.abc import Sequence
from typing import Any

from edgespec.errors import SourceError
from edgespec.export.heads.head_source import HeadSource


def read_numbers(source: HeadSource, key: str, found: Any) -> list[int]:
    """The value of a setting that lists layers; raises SourceError where it is something else."""
    if isinstance(found, list) and found and all(type(number) is int for number in found):
        return found
    raise SourceError(f"{source.settings.path}: {key} is {found!r}, wanted numbers of layers")


def require_layers(source: HeadSource, layers: Sequence[int], num_layers: int) -> None:
    """Raises SourceError: The target has no such layers, or its embedding is meant."""
    if min(layers) < 0:
        raise SourceError(f"{source.path} reads the embedding of its target, which is not supported")
    if max(layers) >= num_layers:
        raise SourceError(
            f"{source.path} reads the states after layers {', '.join(map(str, layers))} of its target, which has "
            f"layers 0 to {num_layers - 1}; it was made for another model: name a head that was made for this one"
        )
