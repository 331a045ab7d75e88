"""The KV cache of a graph, in the form that the graph takes."""

from typing import Any, Protocol

from edgespec.errors import DeviceUnavailable
from edgespec.manifest import Manifest
from edgespec.runtimes.devices import Device
from edgespec.runtimes.growing_cache import GrowingCache
from edgespec.runtimes.shared_cache import SharedCache


class Cache(Protocol):
    """Keys and values of the positions that were run, bound to a session for its next pass."""

    def prepare(self, num_past: int, num_new: int) -> None:
        """Bind for a pass of num_new tokens that keeps the first num_past positions."""

    def collect(self) -> None:
        """Take over the keys and values that the pass has made."""

    def pretend(self, num_positions: int) -> None:
        """Hold zeros that are really written: memory that was never written reads too fast to be timed."""

    def clear(self) -> None:
        """Forget everything, and free the memory."""


def make_cache(session: Any, binding: Any, manifest: Manifest, device: Device) -> Cache:
    """An empty cache for passes of a session.

    Raises DeviceUnavailable: The cache's form is not for the device.
    """
    if manifest.kv_cache.form == "shared_buffer":
        return SharedCache(session, binding, manifest, device)
    if device.memory != "cpu":
        raise DeviceUnavailable(
            f"{manifest.name} has a KV cache that is copied each pass, which '{device.name}' does not run: export "
            "the model again from GGUF or safetensors with edgespec export, or use --device cpu",
            device=device.name,
        )
    return GrowingCache(binding, manifest, device)
