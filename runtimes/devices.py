"""Finds the device that runs a model, and checks ONNX Runtime, which no other module imports."""

import importlib
import importlib.metadata
import os
import platform
import sys
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import psutil

from edgespec.errors import DeviceUnavailable
from edgespec.manifest import Manifest
from edgespec.memory.device_memory import Nvidia, read_nvidia_driver
from edgespec.runtimes import cuda
from edgespec.runtimes.device_names import (
    BY_KIND,
    DEVICES,
    KINDS,
    DeviceName,
    format_device_name,
    parse_device_name,
)
from edgespec.runtimes.device_names import Device as Device
from edgespec.runtimes.hardware import graphics_drivers
from edgespec.runtimes.plugins import PLUGINS, Missing, list_devices, register_plugin
from edgespec.system.signals import defer_signals
from edgespec.system.system_info import cpuinfo_line, physical_cores, processor_name, read_l2_bytes

# Distributions that all install the module onnxruntime, one over the other.
_BUILDS = (
    "onnxruntime", "onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-openvino", "onnxruntime-training",
    "ort-nightly",
)  # fmt: skip
PROVIDERS: dict[str, str] = {name: each["provider"] for name, each in DEVICES.items()}
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
THREADS_PER_CORE = 4  # more are taken for a mistake
# Files by which programs reach a GPU or NPU on Linux; nvmap is that of a Jetson, dxg that of WSL.
_DEVICE_FILES = (
    "dri/renderD*", "nvidia[0-9]*", "nvidiactl", "nvmap", "kfd", "accel/accel*", "dxg", "mali*", "fastrpc-cdsp*",
)  # fmt: skip


@cache  # each pass asks for it, and looking for its builds takes 0.5 to 4 ms
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
            f'run: pip uninstall -y {" ".join(found)}, then: pip install "edgespec[{extra}]"'
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
    """The distributions of ONNX Runtime that are installed."""
    found = []
    for name in _BUILDS:
        with suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.distribution(name)
            found.append(name)
    return found


def may_have_accelerator(system: str = sys.platform, files: Path = Path("/dev")) -> bool:
    """True if programs here may reach a GPU or NPU, or nothing tells; found without loading anything."""
    return system != "linux" or any(found for pattern in _DEVICE_FILES for found in files.glob(pattern))


def find_device(name: str, option: str = "--device") -> Device:
    """Find a device by its name; gpu and npu are the first real one of their kind, auto is the CPU.

    option: What a user named it with, for messages.

    Raises:
        DeviceUnavailable: The device cannot be used here, with how to fix that.
        UsageError: It is no name of a device.
    """
    asked = parse_device_name(name)
    if asked.provider is None:
        assert asked.kind is not None
        return _first_of_kind(asked.kind, option)
    found = find_devices(asked.provider)
    if isinstance(found, Missing):
        raise found.as_error(name.lower(), option)
    same = [each for each in found if each.index == asked.index and asked.kind in (None, each.kind)]
    if len(same) == 1:
        return same[0]
    raise _choose_error(name.lower(), asked, same or found)


def _choose_error(name: str, asked: DeviceName, there: Sequence[Device]) -> DeviceUnavailable:
    names = ", ".join(f"{each.name} ({each.hardware})" if each.hardware else each.name for each in there)
    if asked.kind is None and len(there) > 1:
        return DeviceUnavailable(f"'{name}' is more than one device here; name one of: {names}", device=name)
    return DeviceUnavailable(f"there is no device '{name}' here; {asked.provider} has: {names}", device=name)


def _first_of_kind(kind: str, option: str) -> Device:
    """Raises DeviceUnavailable: None of the kind can be used, or only an emulator, which has to be named."""
    found, problems = _look_for(kind, option)
    for device in found:
        if not device.is_software:
            return device
    if found:
        names = " or ".join(f"{option} {each.name}" for each in found)
        raise DeviceUnavailable(
            f"no real {kind} can be used: {found[0].name} only emulates one on the processor; to use it all the "
            f"same, name it: {names}; otherwise use {option} cpu",
            device=kind,
        )
    raise DeviceUnavailable(
        "\n  ".join([f"no {kind} can be used; use {option} cpu, or fix one of these:", *problems]), device=kind
    )


def _look_for(kind: str, option: str = "--device") -> tuple[list[Device], list[str]]:
    """The devices of a kind, emulators among them, and why providers have none."""
    found, problems = [], []
    for provider in BY_KIND[kind]:
        devices = find_devices(provider)
        if isinstance(devices, Missing):
            problems.append(str(devices.as_error(provider, option)))
        else:
            found += [each for each in devices if each.kind == kind]
    return found, problems


def find_accelerator(kind: str) -> Device | None:
    """The first device of a kind (gpu, npu) that can be used and is no emulator; None where there is none."""
    return next((device for device in _look_for(kind)[0] if not device.is_software), None)


def usable_devices() -> list[Device]:
    """Every device that can be used, emulators included: the CPU first, then GPUs, then NPUs.

    Raises DeviceUnavailable: ONNX Runtime is not installed properly.
    """
    providers = dict.fromkeys(provider for kind in BY_KIND for provider in BY_KIND[kind])
    listed = [devices for provider in providers if not isinstance(devices := find_devices(provider), Missing)]
    found = [device for devices in listed for device in devices if device.kind != "cpu"]
    return [find_device("cpu"), *sorted(found, key=lambda device: device.kind)]


def find_devices(provider: str) -> tuple[Device, ...] | Missing:
    """All devices of one of PROVIDERS, at least one, or what keeps it from working.

    Raises DeviceUnavailable: ONNX Runtime is not installed properly.
    """
    ort = import_onnxruntime()
    if provider == "cpu":
        return (Device("cpu", PROVIDERS["cpu"]),)
    for plugin in PLUGINS:
        if plugin.name == provider:
            handles = register_plugin(ort, plugin)
            return handles if isinstance(handles, Missing) else tuple(list_devices(plugin, handles))
    available = list(ort.get_available_providers())
    if provider == "cuda":
        driver = read_nvidia_driver()
        missing = cuda.find_missing(driver, available, partial(cuda.opening_problem, ort))
        return missing or _cuda_devices(driver)
    return find_missing(provider, available, sys.platform) or (
        Device(provider, PROVIDERS[provider], DEVICES[provider].get("memory", "cpu"), kind=KINDS[provider][0]),
    )


def _cuda_devices(driver: Nvidia | None) -> tuple[Device, ...]:
    """One for each GPU that NVIDIA's driver lists; one that has no name where it lists none, and one works."""
    gpus = driver.gpus if driver else ()
    return tuple(
        replace(
            cuda.CUDA,
            name=format_device_name("cuda", "gpu", index),
            options=(*cuda.CUDA.options, *((("device_id", str(index)),) if index else ())),
            index=index,
            memory_index=index,
            hardware=gpu.name,
        )
        for index, gpu in enumerate(gpus)
    ) or (cuda.CUDA,)


def find_missing(name: str, available: list[str], platform: str) -> Missing | None:
    """Why a provider that some builds of onnxruntime have is not available; None where it is."""
    provider, build = PROVIDERS[name], DEVICES[name]["build"]
    if provider in available:
        return None
    if platform != build["platform"]:
        return Missing(f"it works on {build['system']} only")
    return Missing(f"this onnxruntime has no {provider}, only {', '.join(available)}", build.get("fix"))


def request_device(options: Any, device: Device) -> dict[str, Any]:
    """Ask for a device in SessionOptions; returns the other arguments that InferenceSession needs for it."""
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    for key, value in device.entries:
        options.add_session_config_entry(key, value)
    if device.handles:
        options.add_provider_for_devices(list(device.handles), dict(device.options))
        return {"enable_fallback": 0}
    return {"providers": [(device.provider, dict(device.options))], "enable_fallback": 0}


def limit_arena(device: Device, arena_bytes: int) -> Device:
    """Limit what a session takes of its device, weights and KV cache included, where a provider can."""
    if device.provider != cuda.PROVIDER:
        return device
    return replace(device, options=(*device.options, ("gpu_mem_limit", str(arena_bytes))))


def max_threads() -> int:
    """The most threads that a user may ask for: 512 on two cores slow a pass of SmolLM2 from 7 to 1,300 ms."""
    return THREADS_PER_CORE * (psutil.cpu_count() or 1)


def machine_key(device: Device, num_threads: int | None, deterministic: bool) -> str:
    """All that the cost of a pass depends on, apart from the model."""
    threads = f"{num_threads or physical_cores()} threads of {os.cpu_count()}"
    passes = " and ".join(["padded"] * deterministic + ["recorded"] * device.records_passes) or "as they are"
    runtime = f"onnxruntime {import_onnxruntime().__version__}"
    # One name for the first device of a provider, as before there were others.
    name = device.provider if ":" not in device.name else f"{device.provider} {device.name}"
    return ", ".join([name, threads, passes, runtime, processor_name(), *hardware_and_drivers(device)])


def nvidia_bytes(name: str) -> int | None:
    """The memory of an NVIDIA GPU by its name as a device; None of other devices, and where it is not here."""
    try:
        device = find_device(name)
    except DeviceUnavailable:
        return None
    driver = read_nvidia_driver() if device.provider == cuda.PROVIDER else None
    return driver.gpus[device.index].memory_bytes if driver and device.index < len(driver.gpus) else None


def device_key(device: Device) -> str:
    """All that speed depends on, apart from the model and the processor: the device, the hardware, its drivers."""
    return ", ".join([device.name, *hardware_and_drivers(device)])


def kernels_key(manifest: Manifest, device: Device, num_threads: int | None) -> str:
    """The graph, the device, ONNX Runtime, and what its kernels are chosen by."""
    graph, listed = manifest.files.get(manifest.graph), cpuinfo_line("flags", "Features")
    parts = [
        f"{manifest.graph} {graph.sha256[:16] if graph else manifest.precision}",
        f"{device.provider} {device_key(device)}",
        f"onnxruntime {import_onnxruntime().__version__}",
        f"{processor_name()} {platform.machine()} " + (f"{zlib.crc32(listed.encode()):08x}" if listed else ""),
        f"L2 {read_l2_bytes()}",
        f"{device.host_threads or num_threads or physical_cores()} threads of {os.cpu_count()}",
    ]
    return ", ".join(parts)


def hardware_and_drivers(device: Device) -> tuple[str, ...]:
    """The hardware of a device, if its name is known, and the versions of its drivers; nothing of the CPU."""
    return (*([device.hardware] if device.hardware else ()), *driver_versions(device))


def driver_versions(device: Device) -> tuple[str, ...]:
    """Versions of an accelerator's drivers, where the system or the wheel of its plugin has them."""
    if device.name == "cpu":
        return ()
    found = []
    for plugin in PLUGINS:
        if plugin.provider == device.provider:
            with suppress(importlib.metadata.PackageNotFoundError):
                found.append(f"{plugin.package} {importlib.metadata.version(plugin.package)}")
    if device.kind == "gpu" and device.provider != cuda.PROVIDER:
        found += graphics_drivers()
    with suppress(OSError, IndexError):
        found.append(_NVIDIA_DRIVER.read_text(encoding="utf-8", errors="replace").splitlines()[0].strip())
    return tuple(found)
