"""Where a target and its drafters run, and how: what their costs depend on."""

from dataclasses import dataclass

from edgespec.profile import Place, beside
from edgespec.runtimes.devices import Device, drivers_of, find_device, machine_key, physical_cores


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Devices and threads.

    num_threads: Of the host; all physical cores where None.
    drafter_threads: Of a drafter; as many as the target has where None, less one where it would have all and the
        target is on another device.
    deterministic: No pass of the target is of one token.
    """

    device: Device
    drafter_device: Device
    num_threads: int | None = None
    drafter_threads: int | None = None
    deterministic: bool = False

    @classmethod
    def named(
        cls,
        device: str,
        drafter_device: str,
        num_threads: int | None,
        drafter_threads: int | None = None,
        *,
        deterministic: bool = False,
    ) -> "Setting":
        """Raises DeviceUnavailable: No execution provider for one of the devices."""
        return cls(
            device=find_device(device),
            drafter_device=find_device(drafter_device),
            num_threads=num_threads,
            drafter_threads=drafter_threads,
            deterministic=deterministic,
        )

    @property
    def machine(self) -> str:
        """What the cost of the target's passes depends on, beside the model."""
        return machine_key(self.device, self.num_threads, self.deterministic)

    @property
    def target_place(self) -> Place:
        return Place(self.device.name, self.num_threads or physical_cores())

    @property
    def drafter_place(self) -> Place:
        num_threads = self.drafter_threads or self.num_threads or max(1, physical_cores() - self._launching)
        return Place(self.drafter_device.name, num_threads, drivers_of(self.drafter_device))

    @property
    def _launching(self) -> int:
        """Cores that start the target's work on another device, and wait for it without rest."""
        return int(self.device.name != "cpu" and self.device != self.drafter_device)

    def lane(self, drafter: str) -> str:
        """What a profile calls a drafter that runs here, by the name of its manifest."""
        return beside(drafter, self.drafter_place)
