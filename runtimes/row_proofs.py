"""What the proof of rows found, stored beside a model for each device and set of kernels."""

import json
import os
import platform
import zlib
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from edgespec.manifest import Manifest
from edgespec.runtimes.devices import Device, device_key, import_onnxruntime, physical_cores
from edgespec.runtimes.row_probe import RowProof
from edgespec.runtimes.row_rule import read_l2_bytes
from edgespec.system.disk import replace_file
from edgespec.system.system_info import processor_name
from edgespec.system.typed_json import read_as, read_json
from edgespec.types import Report

FILE_NAME = "row_proofs.json"
_VERSION = 1  # raised when passes or their proof change
_LARGEST_BYTES = 1 << 20
_MOST = 64  # proofs that a folder keeps


def proof_key(manifest: Manifest, device: Device, num_threads: int | None) -> str:
    """What a proof holds for: the graph, the device, ONNX Runtime, and what its kernels are chosen by."""
    graph = manifest.files.get(manifest.graph)
    parts = [
        f"version {_VERSION}",
        f"{manifest.graph} {graph.sha256[:16] if graph else manifest.precision}",
        f"{device.provider} {device_key(device)}",
        f"onnxruntime {import_onnxruntime().__version__}",
        f"{processor_name()} {platform.machine()} {_instruction_sets()}",
        f"L2 {read_l2_bytes()}",
        f"{device.host_threads or num_threads or physical_cores()} threads of {os.cpu_count()}",
    ]
    return ", ".join(parts)


def read_row_proof(folder: Path, key: str) -> RowProof | None:
    """The proof of a key; None where there is none, or none that can be used, so that it is made again."""
    with suppress(ValueError):
        return _read_all(folder).get(key)
    return None


def write_row_proof(folder: Path, key: str, proof: RowProof, report: Report = lambda line: None) -> None:
    """Store a proof. A damaged file is reported and replaced; one that cannot be written is reported."""
    path, damage = folder / FILE_NAME, ""
    try:
        proofs = _read_all(folder)
    except ValueError as error:
        proofs, damage = {}, str(error)
    proofs.pop(key, None)
    kept = dict([*proofs.items(), (key, proof)][-_MOST:])
    document = {"version": _VERSION, "proofs": {each: asdict(found) for each, found in kept.items()}}
    try:
        replace_file(path, json.dumps(document, indent=1).encode())
    except OSError as error:
        report(
            f"{path} cannot be written ({error.strerror}): whether the model gives one text in all passes is "
            "found out again the next time"
        )
        return
    if damage:
        report(f"{path} was damaged ({damage}); it was made again")


def _read_all(folder: Path) -> dict[str, RowProof]:
    """All proofs of a folder; none of a file that is missing, cannot be read, or is of another version.

    Raises ValueError: The file is damaged.
    """
    try:
        document = read_json(folder / FILE_NAME, _LARGEST_BYTES)
    except OSError:
        return {}
    if not isinstance(document, dict):
        raise ValueError("it holds no JSON object")
    if document.get("version") != _VERSION:
        return {}
    return read_as(dict[str, RowProof], document.get("proofs"))


def _instruction_sets() -> str:
    """A short name for what the processor says it can do; empty where the system does not list it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(("flags", "Features")):
                return f"{zlib.crc32(line.encode()):08x}"
    return ""
