"""Which device runs a model, and whether ONNX Runtime is installed in a state that can serve it.

The only module that imports onnxruntime.
"""

import importlib
import importlib.metadata
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from edgespec.errors import DeviceUnavailable

# Distributions that all install the module onnxruntime, one over the other.
_FLAVOURS = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-directml",
    "onnxruntime-openvino",
    "onnxruntime-training",
    "ort-nightly",
)
_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
_EXTRAS = {"cpu": "cpu", "cuda": "cuda"}


@dataclass(frozen=True, slots=True)
class Device:
    """An execution provider and the name that users give it.

    memory: what ONNX Runtime calls the place of its arrays. handles: the OrtEpDevices of a plugin.
    """

    name: str
    provider: str
    memory: str = "cpu"
    handles: tuple[Any, ...] = ()
    options: tuple[tuple[str, str], ...] = ()


def import_onnxruntime() -> Any:
    """The module onnxruntime.

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
    """The device of a name; auto is the CPU, the only one that today's exports are made for.

    Raises:
        DeviceUnavailable: An unknown name, or a provider that this onnxruntime does not have.
    """
    name = "cpu" if name == "auto" else name
    if name not in _PROVIDERS:
        raise DeviceUnavailable(f"unknown device '{name}'; known are auto, {', '.join(_PROVIDERS)}")
    available = import_onnxruntime().get_available_providers()
    if _PROVIDERS[name] not in available:
        raise DeviceUnavailable(
            f"device '{name}' needs {_PROVIDERS[name]}, this onnxruntime has {', '.join(available)}; "
            f'run: pip uninstall -y onnxruntime && pip install "edgespec[{_EXTRAS[name]}]"'
        )
    if name != "cpu":
        raise DeviceUnavailable(
            f"device '{name}' is present, but model folders are exported for cpu in this version; use --device cpu"
        )
    return Device(name, _PROVIDERS[name])


def physical_cores() -> int:
    return psutil.cpu_count(logical=False) or psutil.cpu_count() or 1


def machine_key(device: Device, num_threads: int | None, deterministic: bool) -> str:
    """What the cost of a pass depends on, beside the model."""
    parts = (
        device.provider,
        f"{num_threads or physical_cores()} threads of {os.cpu_count()}",
        "padded" if deterministic else "as they are",
        f"onnxruntime {import_onnxruntime().__version__}",
        _processor(),
        *_driver(device),
    )
    return ", ".join(parts)


def _driver(device: Device) -> list[str]:
    """Of an accelerator, where the system tells it."""
    if device.name == "cpu":
        return []
    try:
        return [_NVIDIA_DRIVER.read_text(encoding="utf-8", errors="replace").splitlines()[0].strip()]
    except (OSError, IndexError):
        return []


def _processor() -> str:
    """Model name of the processor; Linux tells it in a file alone."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
