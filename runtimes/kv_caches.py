"""The KV caches of graphs, in the forms that graphs take.

A graph traced from PyTorch copies past into present each pass, which is longer by the pass. A rewind shortens
every head then, which leaves gaps that the graph cannot skip, so it is a copy as well.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edgespec.errors import DeviceUnavailable, MemoryExhausted
from edgespec.manifest import Manifest
from edgespec.memory.estimate import next_capacity
from edgespec.runtimes.devices import Device, import_onnxruntime
from edgespec.runtimes.shared_cache import SharedCache


@dataclass(frozen=True, slots=True)
class _Buffers:
    """A buffer for each past and a spare one; length counts the positions held."""

    pasts: list[npt.NDArray[Any]]
    spares: list[npt.NDArray[Any]]
    length: int
    capacity: int


class GrowingCache:
    """Two buffers for each past: one holds it while the graph writes present into the other.

    Both change in one assignment, so that an interrupt at any moment leaves the cache whole.
    """

    def __init__(self, binding: Any, manifest: Manifest, device: Device) -> None:
        self._ort = import_onnxruntime()
        self._binding = binding
        self._device = device
        self._kv = manifest.kv_cache
        self._names = manifest.signature.caches(self._kv.num_layers)
        self._context_length = manifest.context_length
        self._held = _Buffers(self._allocate(0), self._allocate(0), 0, 0)
        self._next_length = 0

    def prepare(self, num_past: int, num_new: int) -> None:
        """Bind the first num_past positions as past, and room for num_new more as present.

        Raises MemoryExhausted: The buffers do not fit.
        """
        assert num_past <= self._held.length
        if num_past + num_new > self._held.capacity:
            self._held = self._grow(num_past + num_new)
        if num_past < self._held.length:
            self._copy(num_past, self._held.spares)
            self._held = _Buffers(self._held.spares, self._held.pasts, num_past, self._held.capacity)
        self._next_length = num_past + num_new
        for i, (past, present) in enumerate(self._names):
            self._binding.bind_ortvalue_input(past, self._value(self._held.pasts[i], num_past))
            self._binding.bind_ortvalue_output(present, self._value(self._held.spares[i], self._next_length))

    def collect(self) -> None:
        """Make the present of a pass the past of the next one."""
        held = self._held
        self._held = _Buffers(held.spares, held.pasts, self._next_length, held.capacity)

    def pretend(self, num_positions: int) -> None:
        self.clear()
        grown = self._grow(num_positions)
        for buffer in grown.pasts:
            buffer[...] = 0
        self._held = _Buffers(grown.pasts, grown.spares, num_positions, grown.capacity)

    def clear(self) -> None:
        self._binding.clear_binding_inputs()
        self._binding.clear_binding_outputs()
        self._held = _Buffers(self._allocate(0), self._allocate(0), 0, 0)

    def _grow(self, needed: int) -> _Buffers:
        held = self._held
        capacity = next_capacity(held.capacity, needed, self._context_length)
        try:
            pasts, spares = self._allocate(capacity), self._allocate(capacity)
        except MemoryError:
            raise MemoryExhausted(f"no memory for a context of {capacity} tokens; use a shorter one") from None
        self._copy(held.length, pasts)
        return _Buffers(pasts, spares, held.length, capacity)

    def _copy(self, length: int, to: list[npt.NDArray[Any]]) -> None:
        for old, new in zip(self._held.pasts, to, strict=True):
            self._view(new, length)[...] = self._view(old, self._held.length)[:, :, :length]

    def _allocate(self, capacity: int) -> list[npt.NDArray[Any]]:
        size = capacity * self._kv.num_kv_heads * self._kv.head_dim
        return [np.empty(size, self._kv.dtype) for _ in self._names]

    def _view(self, buffer: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
        """The front of a buffer as [1, num_kv_heads, length, head_dim]."""
        heads, head_dim = self._kv.num_kv_heads, self._kv.head_dim
        return buffer[: heads * length * head_dim].reshape(1, heads, length, head_dim)

    def _value(self, buffer: npt.NDArray[Any], length: int) -> Any:
        return self._ort.OrtValue.ortvalue_from_numpy(self._view(buffer, length), self._device.name)


class BoundCache(Protocol):
    """Keys and values of the positions that were run, bound to a session for its next pass."""

    def prepare(self, num_past: int, num_new: int) -> None:
        """Bind for a pass of num_new tokens that keeps the first num_past positions."""

    def collect(self) -> None:
        """Take over the keys and values that the pass has made."""

    def pretend(self, num_positions: int) -> None:
        """Hold zeros that are really written: memory that was never written reads too fast to be timed."""

    def clear(self) -> None:
        """Forget everything, and free the memory."""


def make_cache(session: Any, binding: Any, manifest: Manifest, device: Device) -> BoundCache:
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
