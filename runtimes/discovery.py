"""Which devices there are, which can run a model, why another cannot, and the line that mends it.

Says what `devices` would answer to each name that a user can give; opens nothing but what a provider asks for.
"""

import importlib.metadata
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil

from edgespec.host import processor
from edgespec.nvml import Nvidia, nvidia
from edgespec.runtimes import cuda
from edgespec.runtimes.devices import import_onnxruntime
from edgespec.runtimes.hardware import Accelerator, accelerators
from edgespec.runtimes.plugins import PLUGINS, Plugin, mend_of, registered

_BUILT_IN = {
    "coreml": "CoreMLExecutionProvider",
    "directml": "DmlExecutionProvider",
}
_SYSTEMS = {"coreml": ("darwin", "macOS"), "directml": ("win32", "Windows")}
_KINDS = {"openvino": "npu", "qnn": "npu", "coreml": "npu", "cpu": "cpu"}
# Who serves an accelerator that nobody uses yet.
_SERVING = {
    ("gpu", "NVIDIA"): ("cuda", cuda.EXTRA),
    ("gpu", "AMD"): ("webgpu", 'pip install "edgespec[webgpu]"'),
    ("gpu", "Intel"): ("webgpu", 'pip install "edgespec[webgpu]"'),
    ("npu", "Intel"): ("openvino", "pip install onnxruntime-ep-openvino"),
    ("npu", "Qualcomm"): ("qnn", 'pip install "edgespec[qnn]"'),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A device by the name that --device takes.

    why_not and mend say of one that cannot be used what is missing, and the line that changes that.
    """

    device: str
    kind: str  # cpu, gpu or npu
    provider: str
    name: str | None = None
    vendor: str | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None
    driver: str | None = None
    is_usable: bool = False
    why_not: str | None = None
    mend: str | None = None


@dataclass(frozen=True, slots=True)
class Discovery:
    """unused: accelerators of this machine that nothing here can use, each with the line that would change it."""

    devices: tuple[Found, ...]
    unused: tuple[tuple[Accelerator, str], ...]


def discover() -> Discovery:
    """All names that --device takes.

    Raises:
        DeviceUnavailable: ONNX Runtime is not sound.
    """
    ort, driver = import_onnxruntime(), nvidia()
    available = list(ort.get_available_providers())
    lack = cuda.lack(driver, available, partial(cuda.refusal, ort))
    found = [_cpu(ort), nvidia_found(driver, lack)]
    found += [built_in(name, available, sys.platform) for name in _SYSTEMS]
    found += [plugin_found(ort, plugin) for plugin in PLUGINS]
    return Discovery((*found, *_unknown_plugins()), tuple(unused(found, accelerators())))


def _cpu(ort: Any) -> Found:
    memory = psutil.virtual_memory()
    vendors = [each.device.vendor for each in ort.get_ep_devices() if each.ep_name == "CPUExecutionProvider"]
    return Found(
        device="cpu",
        kind="cpu",
        provider="CPUExecutionProvider",
        name=processor(),
        vendor=vendors[0] if vendors else None,
        memory_bytes=memory.total,
        free_bytes=memory.available,
        is_usable=True,
    )


def nvidia_found(driver: Nvidia | None, lack: cuda.Lack | None) -> Found:
    """NVIDIA's GPUs, by what the driver says of the first."""
    about: dict[str, Any] = {"device": "cuda", "kind": "gpu", "provider": cuda.PROVIDER, "vendor": "NVIDIA"}
    if driver is not None:
        about["driver"] = driver.driver
    for gpu in driver.gpus[:1] if driver else ():
        about |= {"name": gpu.name, "memory_bytes": gpu.memory_bytes, "free_bytes": gpu.free_bytes}
    if lack is not None:
        return Found(**about, why_not=lack.why_not, mend=lack.mend)
    return Found(**about, is_usable=True)


def built_in(name: str, available: list[str], platform: str) -> Found:
    """A provider that some builds of onnxruntime have."""
    here, system = _SYSTEMS[name]
    kind, provider = _KINDS.get(name, "gpu"), _BUILT_IN[name]
    if provider in available:
        return Found(device=name, kind=kind, provider=provider, is_usable=True)
    if platform != here:
        return Found(device=name, kind=kind, provider=provider, why_not=f"is for {system} alone")
    mend = "pip uninstall -y onnxruntime && pip install onnxruntime-directml" if name == "directml" else None
    return Found(device=name, kind=kind, provider=provider, why_not="this onnxruntime lacks it", mend=mend)


def plugin_found(ort: Any, plugin: Plugin) -> Found:
    """A provider that comes as a wheel of its own."""
    about: dict[str, Any] = {"device": plugin.name, "provider": plugin.provider}
    about["kind"] = _KINDS.get(plugin.name, "gpu")
    found = registered(ort, plugin)
    if found.devices:
        device = found.devices[0].device
        is_software = str(device.type).endswith("CPU")  # an emulator, or a software adapter
        name = "in software on the processor, for its text and not its speed" if is_software else None
        return Found(**about, name=name, vendor=device.vendor or None, is_usable=True)
    why_not, _, line = found.why_not.partition("; run: ")
    return Found(**about, why_not=why_not, mend=line or mend_of(plugin, why_not))


def _unknown_plugins() -> list[Found]:
    """Wheels that are named as plugins are, and that no device of edgespec stands for."""
    known = {plugin.package for plugin in PLUGINS}
    names = {(each.name or "").lower().replace("_", "-") for each in importlib.metadata.distributions()}
    return [
        Found(device=name, kind="unknown", provider=name, why_not="edgespec knows no way to use this plugin")
        for name in sorted(names)
        if name.startswith("onnxruntime-ep-") and not any(package.startswith(name) for package in known)
    ]


def unused(found: list[Found], present: list[Accelerator]) -> list[tuple[Accelerator, str]]:
    """Accelerators whose provider is not usable, with the line that installs it; none where nobody serves them."""
    usable = {each.device for each in found if each.is_usable}
    return [
        (each, _SERVING[each.kind, each.vendor][1])
        for each in present
        if (each.kind, each.vendor) in _SERVING and _SERVING[each.kind, each.vendor][0] not in usable
    ]
