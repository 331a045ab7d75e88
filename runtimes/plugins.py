"""Execution providers that come as wheels: found, registered with ONNX Runtime, and their devices.

By ONNX Runtime's convention such a wheel has a module with get_library_path() and get_ep_name().
"""

import importlib
import importlib.util
import platform
from typing import Any, NamedTuple

from edgespec.runtimes.missing import Missing

_ERROR = 3  # a severity of ONNX Runtime
_BY_SPEED = ("NPU", "GPU", "CPU")


class Plugin(NamedTuple):
    """name: what users call its device. memory: what ONNX Runtime calls the place of its arrays."""

    name: str
    module: str
    provider: str
    package: str
    memory: str = "cpu"
    options: tuple[tuple[str, str], ...] = ()


def _qnn_options(processor: str) -> tuple[tuple[str, str], ...]:
    """On a processor without such an NPU the emulator needs to know which one to imitate."""
    emulated = (("htp_arch", "75"), ("soc_model", "69")) if processor in ("x86_64", "AMD64") else ()
    # By default the CPU turns floats that go in and out into levels, whose cache is the most of them.
    return ("backend_type", "htp"), ("offload_graph_io_quantization", "0"), *emulated


PLUGINS = (
    Plugin("webgpu", "onnxruntime_ep_webgpu", "WebGpuExecutionProvider", "onnxruntime-ep-webgpu", "webgpu"),
    Plugin("openvino", "onnxruntime_ep_openvino", "OpenVINOExecutionProvider", "onnxruntime-ep-openvino"),
    Plugin(
        "qnn",
        "onnxruntime_qnn",
        "QNNExecutionProvider",
        "onnxruntime-qnn",
        options=_qnn_options(platform.machine()),
    ),
    Plugin(
        "tensorrt-rtx",
        "onnxruntime_ep_nv_tensorrt_rtx",
        "NvTensorRTRTXExecutionProvider",
        "onnxruntime-ep-nv-tensorrt-rtx-cu13",
        "cuda",
    ),
)


# What brings a library whose name ONNX Runtime's message has.
_LIBRARIES = {
    "libvulkan": "install the Vulkan loader (Debian: apt install libvulkan1) and your GPU's Vulkan driver",
    "libcud": 'pip install "edgespec[cuda]"',
    "libcublas": 'pip install "edgespec[cuda]"',
    "GLIBC": "the system's C library is too old for this wheel; use a newer system or an older wheel",
}
_DRIVERS = {
    "webgpu": "install a driver with Vulkan, Direct3D 12 or Metal for your GPU",
    "openvino": "if this machine has an Intel CPU, GPU or NPU, install Intel's driver for it",
    "qnn": "if this machine has a Qualcomm NPU, install its driver",
    "tensorrt-rtx": "if this machine has an NVIDIA RTX GPU, install its driver",
}


def register_plugin(ort: Any, plugin: Plugin) -> tuple[Any, ...] | Missing:
    """Register a plugin for the life of the process; returns its OrtEpDevices, or what keeps it from working."""
    if importlib.util.find_spec(plugin.module) is None:
        return Missing(f"{plugin.package} is not installed", f"pip install {plugin.package}")
    if found := _devices(ort, plugin):
        return found
    try:
        module = importlib.import_module(plugin.module)
        ort.set_default_logger_severity(_ERROR)  # what a library logs while it loads does not concern users
        ort.register_execution_provider_library(plugin.provider, module.get_library_path())
    except Exception as error:  # ONNX Runtime has no common base of its own
        if "already registered" not in str(error):  # by another thread, or in vain
            return Missing(f"{plugin.package} does not load: {error}", how_to_load(plugin, str(error)))
    return _devices(ort, plugin) or Missing(
        f"{plugin.package} finds no device that it can use", _DRIVERS[plugin.name]
    )


def how_to_load(plugin: Plugin, error: str) -> str:
    """What to do about a library that does not load."""
    return library_fix(error) or f"pip install --force-reinstall {plugin.package}"


def library_fix(error: str) -> str | None:
    """What installs the library that a message misses."""
    return next((fix for word, fix in _LIBRARIES.items() if word in error), None)


def driver_fix(name: str) -> str | None:
    """What installs a driver for the devices of a plugin."""
    return _DRIVERS.get(name)


def _devices(ort: Any, plugin: Plugin) -> tuple[Any, ...]:
    """The devices of the fastest kind: OpenVINO lists the NPU, the GPU and the CPU of one machine."""
    found = [device for device in ort.get_ep_devices() if device.ep_name == plugin.provider]
    kinds = [str(each.device.type).rpartition(".")[2] for each in found]
    best = min(kinds, key=_BY_SPEED.index, default="")
    return tuple(each for each, kind in zip(found, kinds, strict=True) if kind == best)
