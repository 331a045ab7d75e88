"""What is free of an accelerator's own memory, as its driver tells it.

NVIDIA's by `nvml`, AMD's from the files of amdgpu. Reads figures and decides nothing; was run on the fakes of its
tests alone, and on no GPU.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from edgespec.errors import UnknownMemory
from edgespec.headroom import HOST, Headroom, Room, Rooms
from edgespec.nvml import Nvml, NvmlError

SYSFS = Path("/sys/class/drm")
# An APU's own share of the host's memory is smaller by default, and it takes more of the host's as it needs it.
_LEAST_OWN_BYTES = 4 << 30


@dataclass(frozen=True)
class Drivers:
    """Where figures are read: NVIDIA's driver, the files of the kernel, what the user has set."""

    nvml: Callable[[], Nvml] = Nvml
    sysfs: Path = SYSFS
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)


DRIVERS = Drivers()


class Places:
    """Whose memory the arrays of devices lie in, and what is free of each such place.

    kinds: What ONNX Runtime calls the memory of the devices: cpu, cuda, …
    host: What is free of the host.
    report: Takes a line for each place whose free memory nobody tells, or tells no more; it is not checked.
    """

    def __init__(
        self, kinds: Iterable[str], host: Headroom, report: Callable[[str], None], drivers: Drivers = DRIVERS
    ) -> None:
        self._report = report
        self._places: dict[str, str] = {}
        self._rooms = {HOST: host}
        for kind in dict.fromkeys(kinds):
            with self._unchecked(kind):
                room = _own_room(kind, drivers)
                self._places[kind] = kind if room else HOST
                if room:
                    self._rooms[kind] = room

    def of(self, kind: str) -> str:
        """The place of a kind of memory."""
        return self._places.get(kind, kind)

    def __call__(self) -> Rooms:
        rooms: dict[str, Room] = {}
        for place, room in list(self._rooms.items()):
            with self._unchecked(place):
                rooms[place] = room()
        return rooms

    @contextmanager
    def _unchecked(self, place: str) -> Iterator[None]:
        try:
            yield
        except UnknownMemory as error:
            self._rooms.pop(place, None)
            self._report(f"what is free on {place} is not checked: {error}")


def _own_room(kind: str, drivers: Drivers) -> Headroom | None:
    """Of a device with memory of its own; None for what lies in the host's, as far as any driver tells.

    Raises:
        UnknownMemory: It has memory of its own, and nothing tells what is free of it.
    """
    if kind == "cpu":
        return None
    if kind == "cuda":
        return nvidia(drivers.nvml, drivers.environment.get("CUDA_VISIBLE_DEVICES", ""))
    rooms = amd(drivers.sysfs)
    with suppress(UnknownMemory):
        rooms.append(nvidia(drivers.nvml, ""))
    # Which of several it is nobody tells; what does not fit the roomiest fits none.
    return (lambda: max((room() for room in rooms), key=lambda room: room.free_bytes)) if rooms else None


def nvidia(driver: Callable[[], Nvml], visible: str) -> Headroom:
    """Of CUDA's first device.

    Args:
        visible: CUDA_VISIBLE_DEVICES: indices or UUIDs, the first of which is CUDA's first. NVML counts in the
            order of the bus, as CUDA does among equal GPUs, or with CUDA_DEVICE_ORDER=PCI_BUS_ID.

    Raises:
        UnknownMemory: There is no driver, or no such device.
    """
    first = visible.split(",")[0].strip() or "0"
    with _told():
        nvml = driver()  # never closed: what it holds ends with the process
        device = nvml.device(int(first) if first.isdecimal() else first)
        bound = f"the memory of {nvml.name(device)}"

    def room() -> Room:
        with _told():
            return Room(int(nvml.memory(device).free), bound)

    room()  # some devices have a name and no figures
    return room


@contextmanager
def _told() -> Iterator[None]:
    """Raises UnknownMemory: NVML failed."""
    try:
        yield
    except NvmlError as error:
        raise UnknownMemory(f"NVIDIA's driver does not tell it ({error})") from None


def amd(sysfs: Path) -> list[Headroom]:
    """Of each GPU of the driver amdgpu that has memory of its own."""
    rooms = []
    for path in sorted(sysfs.glob("card*/device/mem_info_vram_total")):
        with suppress(OSError, ValueError):
            if int(path.read_text()) >= _LEAST_OWN_BYTES:
                rooms.append(_amd_room(path.parent))
    return rooms


def _amd_room(device: Path) -> Headroom:
    def room() -> Room:
        try:
            total, used = (int((device / f"mem_info_vram_{each}").read_text()) for each in ("total", "used"))
        except (OSError, ValueError) as error:
            raise UnknownMemory(f"{device} does not tell it ({error})") from None
        return Room(max(0, total - used), f"the memory of {device.parent.name}")

    return room
