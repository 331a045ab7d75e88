"""Which devices can run a model, by every name that --device takes, why the others cannot, and how to fix that."""

import importlib.metadata
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import psutil

from edgespec.memory.device_memory import Nvidia, read_nvidia_driver
from edgespec.runtimes.device_names import INSTALLS, KINDS
from edgespec.runtimes.devices import PROVIDERS, Device, find_devices, import_onnxruntime
from edgespec.runtimes.driver_check import check_driver
from edgespec.runtimes.hardware import Accelerator, accelerators
from edgespec.runtimes.plugins import PLUGINS, Missing
from edgespec.system.printable import printable
from edgespec.system.system_info import processor_name

_CHECKED = ("webgpu",)  # list every GPU of the machine, with a driver or without


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """A device by the name that device takes; one that cannot be used has a problem, and perhaps a fix."""

    device: str
    kind: Literal["cpu", "gpu", "npu", "unknown"]
    provider: str
    name: str | None = None
    vendor: str | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None
    driver: str | None = None
    is_usable: bool = False
    problem: str | None = None
    fix: str | None = None

    def __repr__(self) -> str:
        return f"<{self.line()}>"

    def line(self) -> str:
        """The device in a line for a person."""
        if not self.is_usable:
            advice = f". To fix it: {self.fix}" if self.fix else ""
            return f"{self.device}: not usable, {self.problem}{advice}"
        details = [self.name or self.vendor, f"driver {self.driver}" if self.driver else None]
        if self.memory_bytes is not None and self.free_bytes is not None:
            details.append(f"{self.free_bytes / 1e9:.1f} of {self.memory_bytes / 1e9:.1f} GB free")
        known = "".join(f", {each}" for each in details if each)
        return f"{self.device}: usable {self.kind}{known} ({self.provider})"


@dataclass(frozen=True, slots=True)
class Discovery:
    """unused: accelerators of this machine that nothing here can use, each with how to install its provider."""

    devices: tuple[DeviceReport, ...]
    unused: tuple[tuple[Accelerator, str], ...]

    def lines(self) -> list[str]:
        """One line per device, usable ones first, then one per accelerator that no installed provider can use."""
        ordered = sorted(self.devices, key=lambda device: not device.is_usable)
        unused = [f"unused {each.kind} of {each.vendor}: {advice}" for each, advice in self.unused]
        return [printable(line, keep="") for line in (*(device.line() for device in ordered), *unused)]

    def document(self) -> dict[str, Any]:
        """The document of `edgespec devices --json`."""
        devices = [asdict(device) for device in self.devices]
        for device in devices:  # the keys keep the names that they had first
            device["why_not"], device["mend"] = device.pop("problem"), device.pop("fix")
        return {"devices": devices, "unused": [{**asdict(each), "mend": fix} for each, fix in self.unused]}


def discover() -> Discovery:
    """Report on all names that --device takes, and on plugins that edgespec does not know.

    Raises DeviceUnavailable: ONNX Runtime is not installed properly.
    """
    cpu, driver = _cpu_facts(import_onnxruntime()), read_nvidia_driver()
    reports = []
    for provider in PROVIDERS:
        found = find_devices(provider)
        for each in (found,) if isinstance(found, Missing) else found:
            index = each.index if isinstance(each, Device) else 0
            facts = {"cpu": cpu, "cuda": nvidia_facts(driver, index)}.get(provider, {})
            report = describe(provider, each, **facts)
            reports.append(check_usable(report) if provider in _CHECKED else report)
    return Discovery((*reports, *_unknown_plugins()), tuple(find_unused(reports, accelerators())))


def devices() -> tuple[DeviceReport, ...]:
    """All devices that may be named: those of this machine, and why others cannot be used.

    Raises DeviceUnavailable: ONNX Runtime is not installed properly.
    """
    return discover().devices


def check_usable(report: DeviceReport) -> DeviceReport:
    """A report that says what is wrong with a device's driver, found out by letting the device compute."""
    found = check_driver(report.device) if report.is_usable else None
    if found is None:
        return report
    return replace(report, is_usable=False, problem=found.problem, fix=found.fix)


def describe(provider: str, found: Device | Missing, **facts: Any) -> DeviceReport:
    """The report on a device that was found, or on what keeps it from working."""
    about = {"device": provider, "kind": KINDS[provider][0], "provider": PROVIDERS[provider], **facts}
    if isinstance(found, Missing):
        return DeviceReport(**about, problem=found.problem, fix=found.fix)
    about |= {"device": found.name, "kind": found.kind}
    if found.handles:
        about["vendor"] = found.handles[0].device.vendor or None
        about["name"] = found.hardware if found.hardware != about["vendor"] else None
    if found.is_software:
        about["name"] = "software emulation, for testing only"
    return DeviceReport(**about, is_usable=True)


def _cpu_facts(ort: Any) -> dict[str, Any]:
    memory = psutil.virtual_memory()
    vendors = [each.device.vendor for each in ort.get_ep_devices() if each.ep_name == PROVIDERS["cpu"]]
    return {
        "name": processor_name(),
        "vendor": vendors[0] if vendors else None,
        "memory_bytes": memory.total,
        "free_bytes": memory.available,
    }


def nvidia_facts(driver: Nvidia | None, index: int = 0) -> dict[str, Any]:
    """Reads what NVIDIA's driver reports of itself and of a GPU."""
    facts: dict[str, Any] = {"vendor": "NVIDIA", "driver": driver.driver if driver else None}
    for gpu in driver.gpus[index : index + 1] if driver else ():
        facts |= {"name": gpu.name, "memory_bytes": gpu.memory_bytes, "free_bytes": gpu.free_bytes}
    return facts


def _unknown_plugins() -> list[DeviceReport]:
    """Wheels that are named like plugins and belong to no device of edgespec."""
    known = {plugin.package for plugin in PLUGINS}
    names = {(each.name or "").lower().replace("_", "-") for each in importlib.metadata.distributions()}
    return [
        DeviceReport(device=name, kind="unknown", provider=name, problem="edgespec does not support this plugin")
        for name in sorted(names)
        if name.startswith("onnxruntime-ep-") and not any(package.startswith(name) for package in known)
    ]


def find_unused(found: list[DeviceReport], present: list[Accelerator]) -> list[tuple[Accelerator, str]]:
    """Accelerators without a usable provider, each with how to install one if there is one."""
    usable = {each.device for each in found if each.is_usable}
    installs = ((each, INSTALLS[each.kind].get(each.vendor)) for each in present)
    return [(each, install[1]) for each, install in installs if install and install[0] not in usable]
