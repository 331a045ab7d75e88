"""Execution providers that come as wheels of their own: found, made known to ONNX Runtime, and their devices.

Such a wheel has a module with get_library_path() and get_ep_name(), by ONNX Runtime's convention for plugin
libraries.
"""

import importlib
import importlib.util
import platform
from typing import Any, NamedTuple

_ERROR = 3  # of ONNX Runtime's severities
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
    """On a processor that has no such NPU beside it the emulator has to be told which one to be."""
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


# What a library that does not load lacks, and who brings it.
_LIBRARIES = {
    "libvulkan": "install the Vulkan loader (Debian: apt install libvulkan1) and your GPU's Vulkan driver",
    "libcud": 'pip install "edgespec[cuda]"',
    "libcublas": 'pip install "edgespec[cuda]"',
    "GLIBC": "the system's C library is too old for this wheel; use a newer system or an older wheel",
}
_NO_DEVICE = {
    "webgpu": "install a driver with Vulkan, Direct3D 12 or Metal for your GPU",
    "openvino": "it serves Intel's CPUs, GPUs and NPUs; with one of these install Intel's driver for it",
    "qnn": "it serves Qualcomm's NPUs; with one of these install its driver",
    "tensorrt-rtx": "it serves NVIDIA's RTX GPUs; with one of these install its driver",
}


class Registered(NamedTuple):
    """A plugin's devices, and why there are none."""

    plugin: Plugin
    devices: tuple[Any, ...]  # OrtEpDevice
    why_not: str = ""


def registered(ort: Any, plugin: Plugin) -> Registered:
    """Make a plugin known to ONNX Runtime, if it is installed; it stays so until the process ends."""
    if importlib.util.find_spec(plugin.module) is None:
        return Registered(plugin, (), f"{plugin.package} is not installed; run: pip install {plugin.package}")
    if found := _devices(ort, plugin):
        return Registered(plugin, found)
    try:
        module = importlib.import_module(plugin.module)
        ort.set_default_logger_severity(_ERROR)  # what a library says while it loads is no user's affair
        ort.register_execution_provider_library(plugin.provider, module.get_library_path())
    except Exception as error:  # ONNX Runtime has no common base of its own
        if "already registered" not in str(error):  # by another thread, or in vain
            return Registered(plugin, (), f"{plugin.package} does not load: {error}")
    found = _devices(ort, plugin)
    return Registered(plugin, found, "" if found else f"{plugin.package} finds no device that it can use")


def mend_of(plugin: Plugin, why_not: str) -> str:
    """What helps where a library does not load, or finds nothing."""
    lacking = (line for word, line in _LIBRARIES.items() if word in why_not)
    if "finds no device" in why_not:
        return _NO_DEVICE.get(plugin.name, "install the driver of its device")
    return next(lacking, f"pip install --force-reinstall {plugin.package}")


def _devices(ort: Any, plugin: Plugin) -> tuple[Any, ...]:
    """Of the kind that accelerates most: OpenVINO lists the NPU, the GPU and the CPU of one machine."""
    found = [device for device in ort.get_ep_devices() if device.ep_name == plugin.provider]
    kinds = [str(each.device.type).rpartition(".")[2] for each in found]
    best = min(kinds, key=_BY_SPEED.index, default="")
    return tuple(each for each, kind in zip(found, kinds, strict=True) if kind == best)
