"""How fast a device reads weights and starts kernels, found by a short probe, as data; saved in the model home."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from edgespec.system.record_file import RecordFile

FILE_NAME = "devices.json"

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


def read_probes(home: Path) -> dict[str, DeviceProbe]:
    """Probes by the key of a device; none where there is no file, or one that cannot be used: probing is short."""
    return _probes(home).read()


def write_probe(home: Path, key: str, probe: DeviceProbe) -> None:
    """Save a probe; those of devices that were probed longest ago go first where there are many.

    Raises OSError: The home cannot be written.
    """
    home.mkdir(parents=True, exist_ok=True)
    _probes(home).write(key, probe)


def _probes(home: Path) -> RecordFile[DeviceProbe]:
    return RecordFile(home / FILE_NAME, dict[str, DeviceProbe], "probes", version=1, most=64)
