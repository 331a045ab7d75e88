"""How fast a device reads weights and starts kernels, found by a short probe, as data; saved in the model home."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from edgespec.system.disk import replace_file
from edgespec.system.typed_json import read_as, read_json

FILE_NAME = "devices.json"
_VERSION = 1
_LARGEST_BYTES = 1 << 20
_MOST_PROBES = 64

_Rate = Annotated[float, Meta(gt=0, le=1e15)]
_Seconds = Annotated[float, Meta(ge=0.0, le=1e3)]
_Factor = Annotated[float, Meta(ge=1.0, le=1e3)]
_Rows = Annotated[int, Meta(ge=1, le=1 << 12)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProbe:
    """The cost of passes over matrices of a model's kind on a device.

    bytes_per_s: weights that a pass over one token reads.
    node_s: for each node of a graph, beside its weights.
    start_s: for each pass, however small.
    rows: time of a pass over several tokens over one of a single token, by their number; 1 has 1.
    """

    bytes_per_s: _Rate
    node_s: _Seconds
    start_s: _Seconds
    rows: Mapping[_Rows, _Factor] = field(default_factory=lambda: {1: 1.0})

    def __post_init__(self) -> None:
        if self.rows.get(1) != 1.0:
            raise ValueError("rows without a pass of a single token")


@dataclass(frozen=True)
class _Document:
    version: int
    probes: dict[str, DeviceProbe]


def read_probes(home: Path) -> dict[str, DeviceProbe]:
    """Probes by the key of a device; none where there is no file, or one that cannot be used: probing is short."""
    try:
        document = read_as(_Document, read_json(home / FILE_NAME, _LARGEST_BYTES))
    except (OSError, ValueError):
        return {}
    return document.probes if document.version == _VERSION else {}


def write_probe(home: Path, key: str, probe: DeviceProbe) -> None:
    """Save a probe; those of devices that were probed longest ago go first where there are many.

    Raises OSError: The home cannot be written.
    """
    known = {name: each for name, each in read_probes(home).items() if name != key}
    kept = dict([*known.items(), (key, probe)][-_MOST_PROBES:])
    document = {"version": _VERSION, "probes": {name: asdict(each) for name, each in kept.items()}}
    home.mkdir(parents=True, exist_ok=True)
    replace_file(home / FILE_NAME, json.dumps(document, indent=1).encode())
