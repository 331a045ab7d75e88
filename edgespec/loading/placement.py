"""Which devices run a target and its drafters, and with how many threads."""

from dataclasses import dataclass

from edgespec.profiling.profile import Place, drafter_key
from edgespec.runtimes.devices import Device, driver_versions, machine_key, physical_cores


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The devices and threads that costs depend on.

    num_threads: Threads of the host; None for all physical cores.
    drafter_threads: Threads of a drafter; None for the target's number, less one where that is all cores and the
        target is on another device.
    deterministic: Rows of the target do not depend on how a text is cut into passes.
    exact: Where they do, near-ties of greedy decoding are decided as plain decoding decides them.
    """

    device: Device
    drafter_device: Device
    num_threads: int | None = None
    drafter_threads: int | None = None
    deterministic: bool = False
    exact: bool = False

    @property
    def machine(self) -> str:
        """What the cost of the target's passes depends on, apart from the model."""
        key = machine_key(self.device, self.num_threads, self.deterministic)
        return f"{key}, near-ties decided again" if self.decides_near_ties else key

    @property
    def decides_near_ties(self) -> bool:
        return self.exact and not self.deterministic

    @property
    def target_place(self) -> Place:
        return Place(self.device.name, self.num_threads or physical_cores())

    @property
    def drafter_place(self) -> Place:
        # A core starts the target's work on another device, and waits for it without rest.
        is_launching = self.device.name != "cpu" and self.device != self.drafter_device
        num_threads = self.drafter_threads or self.num_threads or max(1, physical_cores() - is_launching)
        return Place(self.drafter_device.name, num_threads, driver_versions(self.drafter_device))

    @property
    def shares_processor(self) -> bool:
        """Whether each of the two models works at the other's expense: on one device, without cores of its own."""
        target, drafter = self.target_place, self.drafter_place
        if self.device.name != "cpu" or self.drafter_device.name != "cpu":
            return self.device == self.drafter_device
        return target.num_threads + drafter.num_threads > physical_cores()

    def drafter_key(self, drafter: str) -> str:
        """The name in a profile of a drafter that runs here, by the name in its manifest."""
        return drafter_key(drafter, self.drafter_place)
