"""Devices, the names that users give them, and what a name alone says of one, which need not be in this machine.

A name is a provider (`cuda`), one of several devices of it (`cuda:1`), a kind of device of a provider that has
several kinds (`openvino:npu`, `openvino:gpu:1`), or a kind alone (`gpu`, `npu`).
"""

import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal, cast

from edgespec.errors import DeviceUnavailable, UsageError
from edgespec.system.tables import read_table

Kind = Literal["cpu", "gpu", "npu"]

_TABLE = read_table(__file__, "devices.toml")
DEVICES: dict[str, dict[str, Any]] = _TABLE["devices"]
KINDS: dict[str, tuple[Kind, ...]] = {name: each["kinds"] for name, each in DEVICES.items()}
BY_KIND: dict[str, tuple[str, ...]] = _TABLE["by_kind"]
LIBRARIES: dict[str, str] = _TABLE["libraries"]
INSTALLS: dict[str, dict[str, tuple[str, str]]] = _TABLE["installs"]
_NAME = re.compile(r"([a-z-]+)(?::(cpu|gpu|npu))?(?::([0-9]{1,3}))?")


@dataclass(frozen=True, slots=True)
class DeviceName:
    """provider: None for a kind alone. kind: None where the provider has several, and the name says none."""

    provider: str | None
    kind: Kind | None
    index: int


def parse_device_name(name: str) -> DeviceName:
    """Parse a name; auto is the CPU. Raises UsageError: It is no name of a device."""
    name = "cpu" if name.lower() == "auto" else name.lower()
    if name in BY_KIND:
        return DeviceName(None, cast(Kind, name), 0)
    match = _NAME.fullmatch(name)
    provider, kind, index = match.groups() if match else (name.partition(":")[0], None, None)
    if provider not in KINDS:
        near = get_close_matches(name, ["auto", *device_names()], n=1)
        guess = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"unknown device '{name}'; {guess}the devices are auto, {', '.join(device_names())}")
    kinds = KINDS[provider]
    if match is None or (kind is not None and kind not in kinds):
        first = f"{provider}:{kinds[0]}" if len(kinds) > 1 else provider
        example = first if provider == "cpu" else f"{first} or {first}:1"
        raise UsageError(f"unknown device '{name}'; wanted a name such as {example}")
    return DeviceName(provider, cast(Kind, kind or kinds[0]) if kind or len(kinds) == 1 else None, int(index or 0))


def format_device_name(provider: str, kind: Kind, index: int) -> str:
    """The name that edgespec devices prints: the first device of its kind has no index."""
    parts = [provider, *([kind] if len(KINDS[provider]) > 1 else []), *([str(index)] if index else [])]
    return ":".join(parts)


def device_names() -> list[str]:
    """Names of first devices and of kinds, whether or not this machine has them."""
    named = [
        format_device_name(provider, kind, 0)
        for provider, kinds in KINDS.items()
        for kind in kinds
        if len(kinds) == 1 or kind != "cpu"
    ]
    return [*named, *BY_KIND]


def form_of(name: str) -> Kind:
    """The form of a model folder that suits a device, known by its name alone.

    Raises:
        DeviceUnavailable: It does not say of which kind the device is.
        UsageError: It is no name of a device.
    """
    parsed = parse_device_name(name)
    if parsed.kind is None:
        choices = " or ".join(f"{parsed.provider}:{kind}" for kind in ("gpu", "npu"))
        raise DeviceUnavailable(f"the device '{name}' may be a GPU or an NPU; name one: {choices}")
    return form_for(parsed.provider, parsed.kind)


def form_for(provider: str | None, kind: Kind) -> Kind:
    """The form that suits a kind of device; OpenVINO's plugin 1.8 has no kernel for the gpu form's attention."""
    return "npu" if provider == "openvino" else kind


@dataclass(frozen=True, slots=True)
class Device:
    """An execution provider on one piece of hardware, and the name that users give it.

    name: as edgespec devices prints it: cpu, cuda, cuda:1, openvino:npu. memory: what ONNX Runtime calls the place
    of its arrays; memory_index: which of several. handles: the OrtEpDevice of a plugin. options: for the provider;
    entries: for the session. records_passes: passes may be recorded and
    replayed. host_threads: enough where the host has next to nothing to do. kind: an emulator's is that of what it
    emulates. index: among the devices of its provider and kind. hardware: its name or its maker,
    where known.
    """

    name: str
    provider: str
    memory: str = "cpu"
    handles: tuple[Any, ...] = field(default=(), hash=False)
    options: tuple[tuple[str, str], ...] = ()
    entries: tuple[tuple[str, str], ...] = ()
    records_passes: bool = False
    host_threads: int | None = None
    kind: Kind = "cpu"
    index: int = 0
    memory_index: int = 0
    hardware: str | None = None

    @property
    def is_software(self) -> bool:
        """True if it is an emulator or a software adapter, which is slower than the CPU."""
        return bool(self.handles) and str(self.handles[0].device.type).endswith("CPU")

    @property
    def form(self) -> Kind:
        """The form of a model folder that suits it."""
        return form_for(self.name.partition(":")[0], self.kind)

    @property
    def place(self) -> str:
        """The memory that its arrays lie in, apart from that of other devices: cpu, cuda, cuda:1."""
        return f"{self.memory}:{self.memory_index}" if self.memory_index else self.memory
