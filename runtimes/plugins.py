"""Execution providers that come as wheels: found, registered with ONNX Runtime, and their devices.

By ONNX Runtime's convention such a wheel has a module with get_library_path() and get_ep_name().
"""

import importlib
import importlib.util
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from edgespec.errors import DeviceUnavailable
from edgespec.runtimes.device_names import DEVICES, KINDS, LIBRARIES, Device, Kind, format_device_name


@dataclass(frozen=True, slots=True)
class Missing:
    """fix: a command, or what to install; None where nothing helps on this machine."""

    problem: str
    fix: str | None = None

    def as_error(self, device: str, option: str = "--device") -> DeviceUnavailable:
        """The error for a user who named the device with an option."""
        fix = f". To fix that: {self.fix}" if self.fix else f"; use {option} cpu"
        return DeviceUnavailable(f"device '{device}': {self.problem}{fix}", device=device)


_ERROR = 3  # a severity of ONNX Runtime
_BY_SPEED: tuple[Kind, ...] = ("npu", "gpu", "cpu")
_Options = tuple[tuple[str, str], ...]


class Plugin(NamedTuple):
    """name: what users call its device. memory: what ONNX Runtime calls the place of its arrays.

    driver: How to get what its devices need.
    """

    name: str
    module: str
    provider: str
    package: str
    driver: str
    memory: str
    options: _Options


# The further options of a device that is imitated on such a processor.
_EMULATOR = "emulator" if platform.machine() in ("x86_64", "AMD64") else ""
PLUGINS = tuple(
    Plugin(
        name=name,
        provider=each["provider"],
        memory=each.get("memory", "cpu"),
        options=(*each.get("options", {}).items(), *each.get(_EMULATOR, {}).items()),
        **each["plugin"],
    )
    for name, each in DEVICES.items()
    if "plugin" in each
)


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
            fix = library_fix(str(error)) or f"pip install --force-reinstall {plugin.package}"
            return Missing(f"{plugin.package} does not load: {error}", fix)
    return _devices(ort, plugin) or Missing(f"{plugin.package} finds no device that it can use", plugin.driver)


def library_fix(error: str) -> str | None:
    """The command that installs the library that a message misses."""
    return next((fix for word, fix in LIBRARIES.items() if word in error), None)


def driver_fix(name: str) -> str | None:
    """The way to install a driver for a device, by its name."""
    return next((plugin.driver for plugin in PLUGINS if plugin.name == name.partition(":")[0]), None)


def _devices(ort: Any, plugin: Plugin) -> tuple[Any, ...]:
    return tuple(device for device in ort.get_ep_devices() if device.ep_name == plugin.provider)


def list_devices(plugin: Plugin, handles: Sequence[Any]) -> list[Device]:
    """The devices of a plugin by kind and in a fixed order, as far as it lets one be chosen.

    Hardware that is no device of the plugin's kind (the processor, for a software adapter) counts where there is
    no other.
    """
    if plugin.name == "webgpu":
        return _by_power(plugin, handles)
    by_kind = {kind: [each for each in handles if _hardware_kind(each) == kind] for kind in _BY_SPEED}
    found = [kind for kind in _BY_SPEED if by_kind[kind]]
    kinds = KINDS[plugin.name]
    is_emulated = len(kinds) == 1 and found[0] == "cpu"
    if len(kinds) == 1:  # all that the plugin lists are its own, real or emulated
        chosen = {kinds[0]: by_kind[found[0]]}
    else:
        chosen = {kind: by_kind[kind] for kind in ([kind for kind in found if kind != "cpu"] or found)}
    return [
        _device(plugin, kind, i, each, kind_options(plugin.name, kind, is_emulated=is_emulated))
        for kind, listed in chosen.items()
        for i, each in enumerate(_in_order(listed))
    ]


def _device(plugin: Plugin, kind: Kind, index: int, handle: Any, options: _Options = ()) -> Device:
    """A device from an OrtEpDevice, one of several of its kind, with options beside those of the plugin."""
    return Device(
        format_device_name(plugin.name, kind, index),
        plugin.provider,
        plugin.memory,
        (handle,),
        (*plugin.options, *options),
        kind=kind,
        index=index,
        memory_index=index if plugin.memory == "cuda" else 0,
        # Its name, where the system tells ONNX Runtime; its maker otherwise.
        hardware=_facts(handle).get("Description") or getattr(handle.device, "vendor", None) or None,
    )


def _by_power(plugin: Plugin, handles: Sequence[Any]) -> list[Device]:
    """One or two GPUs: WebGPU takes no handle, but a fast adapter or a frugal one, for the life of the process."""
    gpus = _in_order([each for each in handles if _hardware_kind(each) == "gpu"])
    discrete = [each for each in gpus if _facts(each).get("Discrete") == "1"]
    integrated = [each for each in gpus if each not in discrete]
    if not (discrete and integrated):
        return [_device(plugin, "gpu", 0, each) for each in (gpus or list(handles))[:1]]
    frugal = (("powerPreference", "low-power"),)
    return [_device(plugin, "gpu", 0, discrete[0]), _device(plugin, "gpu", 1, integrated[0], frugal)]


def _in_order(handles: Sequence[Any]) -> list[Any]:
    """ONNX Runtime lists hardware in no fixed order; OpenVINO's names (GPU.0, GPU.1) or the bus give one."""

    def place(handle: Any) -> tuple[str, str]:
        named = dict(getattr(handle, "ep_metadata", {})).get("ov_device", "")
        facts = _facts(handle)
        return named, facts.get("pci_bus_id") or facts.get("LUID") or facts.get("card_idx") or ""

    return sorted(handles, key=place)


def _facts(handle: Any) -> dict[str, str]:
    return dict(getattr(handle.device, "metadata", {}))


def _hardware_kind(handle: Any) -> str:
    return str(handle.device.type).rpartition(".")[2].lower()


# With it the provider offers memory that CPU and NPU share. It needs the driver's library of the CPU.
QNN_SHARED_MEMORY = ("enable_htp_shared_memory_allocator", "1")


def kind_options(plugin: str, kind: Kind, *, is_emulated: bool) -> _Options:
    """Options for one device of a plugin, beside those that the plugin always gets.

    is_emulated: The device is imitated by the processor: no clocks to raise, no memory to share.
    """
    if plugin == "qnn" and not is_emulated:
        return (*DEVICES["qnn"]["hardware"].items(), QNN_SHARED_MEMORY)
    if plugin == "openvino":  # the only option that its plugin reads; others are ignored with a warning
        return (("load_config", json.dumps({kind.upper(): {"PERFORMANCE_HINT": "LATENCY"}})),)
    return ()
