"""Finds the device that runs a model, and checks ONNX Runtime, which no other module imports."""

import importlib
import importlib.metadata
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from edgespec.errors import DeviceUnavailable
from edgespec.memory.nvml import read_nvidia_driver
from edgespec.runtimes import cuda
from edgespec.runtimes.missing import Missing
from edgespec.runtimes.plugins import PLUGINS, register_plugin
from edgespec.system.signals import defer_signals
from edgespec.system.system_info import processor_name

# Distributions that all install the module onnxruntime, one over the other.
_BUILDS = (
    "onnxruntime", "onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-openvino", "onnxruntime-training",
    "ort-nightly",
)  # fmt: skip


class _BuiltIn(NamedTuple):
    """A provider that some builds of onnxruntime have, and how to get one on the system that it is for."""

    provider: str
    platform: str  # as in sys.platform
    system: str
    fix: str
    memory: str = "cpu"


_BUILT_IN = {
    "coreml": _BuiltIn("CoreMLExecutionProvider", "darwin", "macOS", "pip install --force-reinstall onnxruntime"),
    "directml": _BuiltIn(
        "DmlExecutionProvider",
        "win32",
        "Windows",
        "pip uninstall -y onnxruntime && pip install onnxruntime-directml",
        "dml",
    ),
}
PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": cuda.PROVIDER,
    **{name: each.provider for name, each in _BUILT_IN.items()},
    **{plugin.name: plugin.provider for plugin in PLUGINS},
}
_KINDS = {"gpu": ("cuda", "tensorrt-rtx", "webgpu", "directml"), "npu": ("qnn", "openvino")}
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
THREADS_PER_CORE = 4  # more are taken for a mistake


@dataclass(frozen=True, slots=True)
class Device:
    """An execution provider and the name that users give it.

    memory: what ONNX Runtime calls the place of its arrays. handles: the OrtEpDevices of a plugin. options: for
    the provider; entries: for the session. host_threads: enough where the host has next to nothing to do.
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
        """An emulator or a software adapter, which gives a device's results and is slower than the CPU."""
        return bool(self.handles) and str(self.handles[0].device.type).endswith("CPU")


CUDA = Device(
    "cuda", cuda.PROVIDER, "cuda", options=cuda.OPTIONS, entries=cuda.ENTRIES, host_threads=cuda.HOST_THREADS
)


def import_onnxruntime() -> Any:
    """Import the module onnxruntime.

    Ctrl-C takes effect once it is imported: before, its native part would take that for a failure, and a process
    that ends with half of it crashes.

    Raises DeviceUnavailable: It is not installed, installed twice, or does not load.
    """
    found = installed_builds()
    if not found:
        raise DeviceUnavailable(
            'ONNX Runtime is not installed; run: pip install "edgespec[cpu]" '
            '(on a machine with an NVIDIA GPU: pip install "edgespec[cuda]")'
        )
    if len(found) > 1:
        extra = "cuda" if "onnxruntime-gpu" in found else "cpu"
        raise DeviceUnavailable(
            f"{' and '.join(found)} are both installed and overwrite each other; "
            f'run: pip uninstall -y {" ".join(found)} && pip install "edgespec[{extra}]"'
        )
    # Official builds of ONNX Runtime report to their maker otherwise, and keep a device id in the user's cache.
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    try:
        with defer_signals():
            module = importlib.import_module("onnxruntime")
        module.get_available_providers  # noqa: B018  an uninstalled build leaves an empty folder behind
    except (ImportError, AttributeError) as error:
        raise DeviceUnavailable(
            f"{found[0]} is installed but does not load ({error}); run: pip install --force-reinstall {found[0]}"
        ) from None
    return module


def installed_builds() -> list[str]:
    found = []
    for name in _BUILDS:
        with suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.distribution(name)
            found.append(name)
    return found


def find_device(name: str) -> Device:
    """Find a device by its name; gpu and npu are the first usable one of their kind, auto is the CPU.

    Raises DeviceUnavailable: An unknown name, or a device that cannot be used here, with how to fix that.
    """
    name = "cpu" if name.lower() == "auto" else name.lower()
    if name in PROVIDERS:
        found = look_up(name)
        if isinstance(found, Missing):
            raise found.as_error(name)
        return found
    if name not in _KINDS:
        near = get_close_matches(name, ["auto", *device_names()], n=1)
        guess = f"did you mean {near[0]}? " if near else ""
        raise DeviceUnavailable(
            f"unknown device '{name}'; {guess}the devices are auto, {', '.join(device_names())}"
        )
    problems = []
    for each in _KINDS[name]:
        try:
            return find_device(each)
        except DeviceUnavailable as error:
            problems.append(str(error))
    raise DeviceUnavailable(
        f"no {name} can be used; use --device cpu, or fix one of these: {'; '.join(problems)}", device=name
    )


def device_names() -> list[str]:
    return [*PROVIDERS, *_KINDS]


def find_accelerator(kind: str) -> Device | None:
    """The first device of a kind (gpu, npu) that can be used and is no emulator; None where there is none."""
    for name in _KINDS[kind]:
        with suppress(DeviceUnavailable):
            if not (found := find_device(name)).is_software:
                return found
    return None


def look_up(name: str) -> Device | Missing:
    """Find one of PROVIDERS, or what keeps it from working.

    Raises DeviceUnavailable: ONNX Runtime is not installed properly.
    """
    ort = import_onnxruntime()
    if name == "cpu":
        return Device("cpu", PROVIDERS["cpu"])
    for plugin in PLUGINS:
        if plugin.name == name:
            found = register_plugin(ort, plugin)
            if isinstance(found, Missing):
                return found
            return Device(name, plugin.provider, plugin.memory, found, plugin.options)
    available = list(ort.get_available_providers())
    if name == "cuda":
        return cuda.find_missing(read_nvidia_driver(), available, partial(cuda.opening_problem, ort)) or CUDA
    missing = find_missing(name, available, sys.platform)
    return missing or Device(name, PROVIDERS[name], _BUILT_IN[name].memory)


def find_missing(name: str, available: list[str], platform: str) -> Missing | None:
    """Why a provider that some builds of onnxruntime have is not available; None where it is."""
    built_in = _BUILT_IN[name]
    if built_in.provider in available:
        return None
    if platform != built_in.platform:
        return Missing(f"it works on {built_in.system} only")
    return Missing(f"this onnxruntime has no {built_in.provider}, only {', '.join(available)}", built_in.fix)


def limit_arena(device: Device, arena_bytes: int) -> Device:
    """Limit what a session takes apart from its weights and its KV cache, where a provider can."""
    if device.name != "cuda":
        return device
    return replace(device, options=(*device.options, ("gpu_mem_limit", str(arena_bytes))))


def physical_cores() -> int:
    return psutil.cpu_count(logical=False) or psutil.cpu_count() or 1


def max_threads() -> int:
    """A pass of SmolLM2 on two cores takes 7 ms with 2 threads, 40 with 8 and 1,300 with 512."""
    return THREADS_PER_CORE * (psutil.cpu_count() or 1)


def machine_key(device: Device, num_threads: int | None, deterministic: bool) -> str:
    """What the cost of a pass depends on, apart from the model."""
    threads = f"{num_threads or physical_cores()} threads of {os.cpu_count()}"
    passes = "padded" if deterministic else "as they are"
    runtime = f"onnxruntime {import_onnxruntime().__version__}"
    return ", ".join([device.provider, threads, passes, runtime, processor_name(), *driver_versions(device)])


def driver_versions(device: Device) -> tuple[str, ...]:
    """Versions of an accelerator's drivers, where the system or the wheel of its plugin has them."""
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
