"""Which device runs a model, and whether ONNX Runtime is installed in a state that can serve it.

The only module that imports onnxruntime.
"""

import importlib
import importlib.metadata
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from edgespec.errors import DeviceUnavailable
from edgespec.host import processor
from edgespec.interrupts import held_back
from edgespec.nvml import nvidia
from edgespec.runtimes import cuda
from edgespec.runtimes.plugins import PLUGINS, mend_of, registered

# Distributions that all install the module onnxruntime, one over the other.
_FLAVOURS = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-directml",
    "onnxruntime-openvino",
    "onnxruntime-training",
    "ort-nightly",
)
_PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "coreml": "CoreMLExecutionProvider",
    "directml": "DmlExecutionProvider",
}
_BUILDS = {
    "coreml": "on macOS, pip install --force-reinstall onnxruntime; elsewhere use --device cpu",
    "directml": "on Windows, pip uninstall -y onnxruntime && pip install onnxruntime-directml; elsewhere use "
    "--device cpu",
}
_MEMORY = {"cuda": "cuda", "directml": "dml"}
_KINDS = {"gpu": ("cuda", "tensorrt-rtx", "webgpu", "directml"), "npu": ("qnn", "openvino")}
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
THREADS_A_CORE = 4  # more are taken for a mistake


@dataclass(frozen=True, slots=True)
class Device:
    """An execution provider and the name that users give it.

    memory: what ONNX Runtime calls the place of its arrays. handles: the OrtEpDevices of a plugin. options: of the
    provider; entries: of the session. host_threads: of a session that leaves the host next to nothing to do.
    """

    name: str
    provider: str
    memory: str = "cpu"
    handles: tuple[Any, ...] = ()
    options: tuple[tuple[str, str], ...] = ()
    entries: tuple[tuple[str, str], ...] = ()
    host_threads: int | None = None

    @property
    def is_software(self) -> bool:
        """An emulator or a software adapter, which computes what a device would and is slower than the CPU."""
        return bool(self.handles) and str(self.handles[0].device.type).endswith("CPU")


def import_onnxruntime() -> Any:
    """The module onnxruntime.

    Ctrl-C is heard once it is imported: within, its native part takes that for a failure, and a process that ends
    with half of it crashes.

    Raises:
        DeviceUnavailable: It is not installed, installed twice, or does not load.
    """
    found = installed_flavours()
    if not found:
        raise DeviceUnavailable(
            'ONNX Runtime is not installed; run: pip install "edgespec[cpu]" '
            '(on a machine with an NVIDIA GPU: pip install "edgespec[cuda]")'
        )
    if len(found) > 1:
        raise DeviceUnavailable(
            f"{' and '.join(found)} are both installed and overwrite each other; "
            f'run: pip uninstall -y {" ".join(found)} && pip install "edgespec[{_extra(found)}]"'
        )
    # Official builds of ONNX Runtime report to their maker otherwise, and keep a device id in the user's cache.
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    try:
        with held_back():
            module = importlib.import_module("onnxruntime")
        module.get_available_providers  # noqa: B018  an uninstalled flavour leaves an empty folder behind
    except (ImportError, AttributeError) as error:
        raise DeviceUnavailable(
            f"{found[0]} is installed but does not load ({error}); run: pip install --force-reinstall {found[0]}"
        ) from None
    return module


def _extra(found: list[str]) -> str:
    return "cuda" if "onnxruntime-gpu" in found else "cpu"


def installed_flavours() -> list[str]:
    found = []
    for name in _FLAVOURS:
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found.append(name)
    return found


def find_device(name: str) -> Device:
    """The device of a name, or the first that there is of a kind (gpu, npu); auto is the CPU.

    Raises:
        DeviceUnavailable: An unknown name, or one that cannot be used here, with the line that mends it.
    """
    name = name.lower()
    name = "cpu" if name == "auto" else name
    if name in _KINDS:
        return _first_of(name)
    if name in _PROVIDERS:
        return _built_in(name)
    if plugin := next((each for each in PLUGINS if each.name == name), None):
        found = registered(import_onnxruntime(), plugin)
        if found.why_not:
            has_mend = "; run: " in found.why_not
            mend = "" if has_mend else f". To mend that: {mend_of(plugin, found.why_not)}"
            raise DeviceUnavailable(f"device '{name}': {found.why_not}{mend}", device=name)
        return Device(name, plugin.provider, plugin.memory, found.devices, plugin.options)
    near = get_close_matches(name, ["auto", *device_names()], n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    raise DeviceUnavailable(f"unknown device '{name}'; {meant}known are auto, {', '.join(device_names())}")


def device_names() -> list[str]:
    return [*_PROVIDERS, *(plugin.name for plugin in PLUGINS), *_KINDS]


def accelerator(kind: str) -> Device | None:
    """The first device of a kind (gpu, npu) that can be used and is no emulator; None where there is none."""
    for name in _KINDS[kind]:
        with suppress(DeviceUnavailable):
            if not (found := find_device(name)).is_software:
                return found
    return None


def _first_of(kind: str) -> Device:
    reasons = []
    for name in _KINDS[kind]:
        try:
            return find_device(name)
        except DeviceUnavailable as error:
            reasons.append(str(error))
    raise DeviceUnavailable(f"no {kind} can be used: {'; '.join(reasons)}", device=kind)


def _built_in(name: str) -> Device:
    """Of a provider that is part of onnxruntime itself."""
    ort, provider = import_onnxruntime(), _PROVIDERS[name]
    available = list(ort.get_available_providers())
    if name == "cuda":
        return _cuda(ort, available)
    if provider not in available:
        raise DeviceUnavailable(
            f"device '{name}' needs {provider}, this onnxruntime has {', '.join(available)}. To mend that: "
            f"{_BUILDS[name]}",
            device=name,
        )
    return Device(name, provider, _MEMORY.get(name, "cpu"))


def _cuda(ort: Any, available: list[str]) -> Device:
    if found := cuda.lack(nvidia(), available, partial(cuda.refusal, ort)):
        raise DeviceUnavailable(f"device 'cuda': {found.why_not}. To mend that: {found.mend}", device="cuda")
    return Device(
        "cuda",
        cuda.PROVIDER,
        _MEMORY["cuda"],
        options=cuda.OPTIONS,
        entries=cuda.ENTRIES,
        host_threads=cuda.HOST_THREADS,
    )


def with_arena(device: Device, arena_bytes: int) -> Device:
    """For a session that takes so much at most beside its weights and its KV cache, where that can be told."""
    if device.name != "cuda":
        return device
    return replace(device, options=(*device.options, *cuda.arena_options(arena_bytes)))


def physical_cores() -> int:
    return psutil.cpu_count(logical=False) or psutil.cpu_count() or 1


def most_threads() -> int:
    """A pass of SmolLM2 on two cores takes 7 ms with 2 threads, 40 with 8 and 1,300 with 512."""
    return THREADS_A_CORE * (psutil.cpu_count() or 1)


def machine_key(device: Device, num_threads: int | None, deterministic: bool) -> str:
    """What the cost of a pass depends on, beside the model."""
    parts = (
        device.provider,
        f"{num_threads or physical_cores()} threads of {os.cpu_count()}",
        "padded" if deterministic else "as they are",
        f"onnxruntime {import_onnxruntime().__version__}",
        processor(),
        *drivers_of(device),
    )
    return ", ".join(parts)


def drivers_of(device: Device) -> tuple[str, ...]:
    """Versions of what drives an accelerator, where the system or the wheel of its plugin tells them."""
    if device.name == "cpu":
        return ()
    found = []
    for plugin in PLUGINS:
        if plugin.name == device.name:
            with suppress(importlib.metadata.PackageNotFoundError):
                found.append(f"{plugin.package} {importlib.metadata.version(plugin.package)}")
    with suppress(OSError, IndexError):
        found.append(_NVIDIA_DRIVER.read_text(encoding="utf-8", errors="replace").splitlines()[0].strip())
    return tuple(found)
