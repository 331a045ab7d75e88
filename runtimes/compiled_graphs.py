"""Graphs as a device's compiler left them (EPContext), kept so that only the first load compiles.

They lie in a folder of their own below the model's, COMPILED/KEY-NUMBER, or below the model home where the model's
cannot be written. The key is made of all that a compiled graph depends on: the model's files, the device and its
options, and the versions of ONNX Runtime, provider and driver. Those of other versions for a device are deleted.
"""

import hashlib
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from edgespec.config.config_file import default_home
from edgespec.errors import DeviceUnavailable, EdgeSpecError
from edgespec.manifest import COMPILED, Manifest
from edgespec.runtimes.devices import Device, driver_versions, import_onnxruntime
from edgespec.runtimes.plugins import QNN_SHARED_MEMORY
from edgespec.runtimes.session import SessionOptions, load_graph, session_settings
from edgespec.system.disk import install_folder
from edgespec.system.file_hashes import FileRecord, file_record, verify_files
from edgespec.system.system_info import processor_name
from edgespec.system.typed_json import read_as, read_json

_log = logging.getLogger(__name__)
RECORD = "compiled.json"
_COMPILERS = frozenset({"QNNExecutionProvider", "OpenVINOExecutionProvider"})
_UNFINISHED = ".compiling-"
_ABANDONED_S = 86400.0  # of a process that was killed
_SHARE, _LAST = "ep.share_ep_contexts", "ep.stop_share_ep_contexts"
# What a device says of itself that depends on where its library lies, or on what runs at the moment.
_PASSING = frozenset({"library_path", "AVAILABLE_DEVICES", "EXECUTION_DEVICES", "CACHING_PROPERTIES"})


@dataclass(frozen=True, kw_only=True)
class Record:
    """The origin of a folder of compiled graphs.

    device: What the device is. versions: Of ONNX Runtime, provider and driver. files: Of the folder.
    shares_weights: The graphs hold one copy of the weights, and have to be loaded together.
    """

    device: dict[str, str]
    options: dict[str, str]
    versions: list[str]
    sources: dict[str, str]
    shares_weights: bool = False
    files: dict[str, FileRecord]

    @property
    def key(self) -> str:
        made_of = [self.device, self.options, self.versions, self.sources]
        return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:16]


def load_graphs(
    folder: Path, manifest: Manifest, graphs: Sequence[str], device: Device, **options: Unpack[SessionOptions]
) -> list[Any]:
    """An InferenceSession for each graph, compiled before or now where the device's provider compiles.

    A compiled graph that is damaged, or that the device refuses, is reported and compiled again. Where graphs
    cannot be compiled apart from loading, or kept, they are loaded as they are, which is reported too.

    Raises as load_graph does.
    """
    if device.provider not in _COMPILERS or not manifest.is_ours:
        return _load([folder / graph for graph in graphs], device, **options)
    record = _describe(manifest, graphs, device)
    places = [folder / COMPILED, _place_in_home(manifest)]
    for kept in [each for place in places for each in sorted(place.glob(f"{record.key}*"))]:
        if sessions := _load_kept(kept, graphs, device, **options):
            return sessions
        shutil.rmtree(kept, ignore_errors=True)
    # QNN's emulator compiles graphs that share their weights, and then does not load them.
    can_share = len(graphs) > 1 and not (device.provider == "QNNExecutionProvider" and device.is_software)
    for shares_weights in (True, False) if can_share else (False,):
        wanted = replace(record, shares_weights=shares_weights)
        if made := _compile(folder, manifest, wanted, graphs, device, places, **options):
            if sessions := _load_kept(made, graphs, device, **options):
                return sessions
            shutil.rmtree(made, ignore_errors=True)
    return _load([folder / graph for graph in graphs], device, **options)


def compiled_folders(folder: Path, manifest: Manifest) -> Iterator[Path]:
    """Where graphs of a model were compiled to, for all devices."""
    for place in (folder / COMPILED, _place_in_home(manifest)):
        if place.is_dir():
            yield from sorted(each for each in place.iterdir() if each.is_dir() and not _is_unfinished(each))


def compiled_files(folder: Path) -> list[Path]:
    """The files of a folder of compiled graphs, without its link to the model's weights."""
    record = _read_record(folder)
    return [folder / RECORD, *(folder / name for name in record.files)]


def find_damage(folder: Path) -> str | None:
    """The fault of a folder of compiled graphs; None where its files are those of its record."""
    try:
        record = _read_record(folder)
    except (OSError, ValueError) as error:
        return f"{RECORD} cannot be read: {error}"
    for name, wanted in record.files.items():
        if Path(name).name != name:
            return f"{RECORD} names {name!r}, which is not a file of its own folder"
        try:
            found = file_record(folder / name)
        except OSError as error:
            return f"{name}: {error.strerror}"
        if found != wanted:
            return f"{name} was changed since it was written"
    return None


def _read_record(folder: Path) -> Record:
    """Raises OSError, ValueError: It cannot be read, or is none."""
    return read_as(Record, read_json(folder / RECORD))


def _describe(manifest: Manifest, graphs: Sequence[str], device: Device) -> Record:
    handle = device.handles[0] if device.handles else None
    about = dict(getattr(handle, "ep_metadata", {}))
    versions = [f"onnxruntime {import_onnxruntime().__version__}", *driver_versions(device)]
    hardware = getattr(handle, "device", None)
    identity = {
        "provider": device.provider,
        "kind": device.kind,
        "vendor": str(getattr(hardware, "vendor_id", "")),
        "hardware": str(getattr(hardware, "device_id", "")),
        "name": device.hardware or "",
        **{name: value for name, value in about.items() if name not in _PASSING | {"version"}},
        **({"processor": processor_name()} if device.is_software else {}),
    }
    if "version" in about:
        versions.append(f"provider {about['version']}")
    return Record(
        device=identity,
        options=dict(_without_shared_memory(device).options),
        versions=versions,
        sources={name: manifest.files[name].sha256 for name in (*graphs, manifest.weights)},
        files={},
    )


def _place_in_home(manifest: Manifest) -> Path:
    """Where to keep the compiled graphs of a model whose own folder cannot be written."""
    return default_home() / COMPILED / manifest.files[manifest.graph].sha256[:16]


def _load_kept(
    folder: Path, graphs: Sequence[str], device: Device, **options: Unpack[SessionOptions]
) -> list[Any] | None:
    """Sessions of compiled graphs; None, which is reported, where they are damaged or the device refuses them."""
    problem = find_damage(folder)
    if problem is None:
        record = _read_record(folder)
        entries = ((_SHARE, "1"),) if record.shares_weights else ()
        sharing = replace(device, entries=(*device.entries, *entries))
        try:
            return _load([folder / graph for graph in graphs], sharing, **options)
        except DeviceUnavailable as error:
            problem = str(error)
    _log.warning("what was compiled for '%s' in %s cannot be used (%s)", device.name, folder, problem)
    return None


def _load(graphs: Sequence[Path], device: Device, **options: Unpack[SessionOptions]) -> list[Any]:
    """Sessions that read memory which the device shares with the CPU, where the driver gives such memory."""
    plain = _without_shared_memory(device)
    if plain != device:
        try:
            return [load_graph(graph, device, **options) for graph in graphs]
        except DeviceUnavailable as error:
            _log.debug("'%s' shares no memory with the CPU: %s", device.name, error)
    return [load_graph(graph, plain, **options) for graph in graphs]


def _without_shared_memory(device: Device) -> Device:
    return replace(device, options=tuple(each for each in device.options if each != QNN_SHARED_MEMORY))


def _compile(
    folder: Path,
    manifest: Manifest,
    record: Record,
    graphs: Sequence[str],
    device: Device,
    places: Sequence[Path],
    **options: Unpack[SessionOptions],
) -> Path | None:
    """Compile into the first place that can be written; None, which is reported, where that fails."""
    # Else what is compiled of a damaged file would outlive it.
    needed = {name: manifest.files[name] for name in record.sources}
    verify_files(folder, needed, cancel=options.get("cancel"))
    for place in places:
        try:
            place.mkdir(parents=True, exist_ok=True)
            work = place / f"{_UNFINISHED}{secrets.token_hex(4)}"
            work.mkdir()
        except OSError:
            continue
        _log.info("compiling %s for '%s', which is done once and can take minutes", manifest.name, device.name)
        try:
            if record.shares_weights:
                os.link(folder / manifest.weights, work / manifest.weights)
            _compile_graphs(folder, graphs, work, device, record.shares_weights, **options)
            written = sorted(path.name for path in work.iterdir() if path.name != manifest.weights)
            record = replace(record, files={name: file_record(work / name) for name in written})
            (work / RECORD).write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")
            _delete_outdated(place, record)
            # A name of its own: a provider may know an earlier one by its path for as long as the process lives.
            final = place / f"{record.key}-{secrets.token_hex(4)}"
            install_folder(work, final)
            return final
        except (OSError, EdgeSpecError) as error:
            if not isinstance(error, OSError | DeviceUnavailable):
                raise
            how = "over one copy of the weights " if record.shares_weights else ""
            _log.warning("%s cannot be compiled %sand kept for '%s' (%s)", manifest.name, how, device.name, error)
            return None
        finally:
            shutil.rmtree(work, ignore_errors=True)
    _log.warning("neither %s nor %s can be written: graphs are compiled at each load", *places)
    return None


def _compile_graphs(
    folder: Path,
    graphs: Sequence[str],
    output: Path,
    device: Device,
    shares_weights: bool,
    **options: Unpack[SessionOptions],
) -> None:
    """Raises DeviceUnavailable: the provider does not compile a graph."""
    ort, cancel = import_onnxruntime(), options.get("cancel")
    for graph in graphs:
        entries: Mapping[str, str] = {_SHARE: "1", _LAST: str(int(graph == graphs[-1]))} if shares_weights else {}
        sharing = replace(_without_shared_memory(device), entries=(*device.entries, *entries.items()))
        with session_settings(sharing, **options) as (settings, _):
            try:
                ort.ModelCompiler(
                    settings,
                    str(folder / graph),
                    flags=ort.OrtCompileApiFlags.ERROR_IF_NO_NODES_COMPILED,
                    graph_optimization_level=ort.GraphOptimizationLevel.ORT_ENABLE_ALL,  # as a session does
                ).compile_to_file(str(output / graph))
            except Exception as error:  # ONNX Runtime has no common base of its own
                if cancel:
                    cancel.require_unset()
                raise DeviceUnavailable(str(error), device=device.name) from error


def _is_unfinished(folder: Path) -> bool:
    return folder.name.startswith(_UNFINISHED)


def _delete_outdated(place: Path, record: Record) -> None:
    """Delete what was compiled of the same graphs for the same device by other versions, or with other options."""
    for folder in place.iterdir():
        with suppress(OSError, ValueError):  # another process may rename or delete some
            if _is_unfinished(folder):
                if time.time() - folder.stat().st_mtime > _ABANDONED_S:
                    shutil.rmtree(folder, ignore_errors=True)
                continue
            if folder.name.startswith(record.key):
                continue
            other = _read_record(folder)
            if (other.device, other.sources.keys()) == (record.device, record.sources.keys()):
                _log.info("deleting what other versions compiled for this device: %s", folder)
                shutil.rmtree(folder)
