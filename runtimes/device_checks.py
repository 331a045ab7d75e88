"""What checks of a model on devices have found, as data; saved beside the model, so that each is done once.

A saved check counts for one device with its drivers, one version of ONNX Runtime and one graph with its weights.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
from msgspec import Meta

from edgespec.manifest import Manifest
from edgespec.runtimes.devices import Device, device_key, import_onnxruntime
from edgespec.system.disk import replace_file
from edgespec.system.system_info import processor_name
from edgespec.system.typed_json import read_as, read_json
from edgespec.types import Logits

FILE_NAME = "device_checks.json"
_VERSION = 1
_LARGEST_BYTES = 1 << 20
_MOST_CHECKS = 32
_SAMPLE = 64  # numbers of a row that are saved
_TOLERANCE = 0.05  # as of whole rows
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCheck:
    """Passes that a device computes correctly, of one graph.

    max_pass_tokens: the widest. num_compared: how many tokens were compared.
    has_argmax: the tokens that it chooses are those of its rows. runs_trees: None where that was not tried.
    sample: numbers of the row after the first token, evenly spread, by which another driver is noticed.
    """

    max_pass_tokens: Annotated[int, Meta(ge=1, le=4096)]
    num_compared: Annotated[int, Meta(ge=1, le=4096)]
    has_argmax: bool
    runs_trees: bool | None = None
    sample: Annotated[tuple[float, ...], Meta(min_length=1, max_length=_SAMPLE)]


@dataclass(frozen=True)
class _Document:
    version: int
    checks: dict[str, DeviceCheck]


class DeviceChecks:
    """The saved check of one graph on one device."""

    def __init__(self, folder: Path, manifest: Manifest, device: Device) -> None:
        self._path = folder / FILE_NAME
        self._key = _key(manifest, device) if manifest.is_ours else None

    def read(self) -> DeviceCheck | None:
        """None where there is none, or none that can be used: a check is repeated then."""
        return self._read_all().get(self._key) if self._key else None

    def write(self, check: DeviceCheck) -> None:
        """Save a check, in place of the oldest where there are many; not into a folder that is read-only."""
        if self._key is None:
            return
        known = {key: each for key, each in self._read_all().items() if key != self._key}
        kept = dict([*known.items(), (self._key, check)][-_MOST_CHECKS:])
        document = {"version": _VERSION, "checks": {key: asdict(each) for key, each in kept.items()}}
        try:
            replace_file(self._path, json.dumps(document, indent=1).encode())
        except OSError as error:
            _log.info("%s cannot be written (%s), so the check is repeated each time", self._path, error.strerror)

    def write_trees(self, runs_trees: bool) -> None:
        """Add to the saved check whether trees of drafts run in one pass."""
        if check := self.read():
            self.write(replace(check, runs_trees=runs_trees))

    def _read_all(self) -> Mapping[str, DeviceCheck]:
        try:
            document = read_as(_Document, read_json(self._path, _LARGEST_BYTES))
        except (OSError, ValueError):
            return {}
        return document.checks if document.version == _VERSION else {}


def row_sample(row: Logits) -> tuple[float, ...]:
    """Numbers of a row, [vocab_size], evenly spread."""
    places = np.linspace(0, len(row) - 1, min(_SAMPLE, len(row))).astype(np.int64)
    return tuple(float(number) for number in np.nan_to_num(row[places]))


def is_same_row(row: Logits, sample: tuple[float, ...]) -> bool:
    """Whether a sample is that of a row, apart from the rounding between two versions of a kernel."""
    found = np.asarray(row_sample(row))
    if len(found) != len(sample):
        return False
    return bool(np.sqrt(np.square(found - sample).mean()) <= _TOLERANCE * found.std())


def _key(manifest: Manifest, device: Device) -> str:
    files = [
        manifest.files[name].sha256[:16] for name in (manifest.graph, manifest.weights) if name in manifest.files
    ]
    processor = [processor_name()] if device.is_software else []
    runtime = f"onnxruntime {import_onnxruntime().__version__}"
    return ", ".join([device_key(device), *processor, runtime, *files, f"{manifest.context_length} tokens"])
