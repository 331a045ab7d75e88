"""The KV cache as graphs traced from PyTorch have it: past goes in, and present comes out longer by one pass.

The graph copies past into present each pass. A rewind shortens every head, which leaves gaps that the graph
cannot skip, so it is a copy as well.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.cache import grown_capacity
from edgespec.errors import MemoryExhausted
from edgespec.manifest import Manifest
from edgespec.runtimes.devices import Device, import_onnxruntime


@dataclass(frozen=True, slots=True)
class _Buffers:
    """For each past a buffer that holds it and a spare one; length counts the positions held."""

    pasts: list[npt.NDArray[Any]]
    spares: list[npt.NDArray[Any]]
    length: int
    capacity: int


class GrowingCache:
    """Two buffers for each past: one holds it while the graph writes present into the other.

    What they hold changes in one assignment, so that an interrupt at any moment leaves it whole.
    """

    def __init__(self, binding: Any, manifest: Manifest, device: Device) -> None:
        self._ort = import_onnxruntime()
        self._binding = binding
        self._device = device
        self._kv = manifest.kv_cache
        self._names = manifest.signature.caches(self._kv.num_layers)
        self._context_length = manifest.context_length
        self._held = _Buffers(self._empty(0), self._empty(0), 0, 0)
        self._next_length = 0

    def prepare(self, num_past: int, num_new: int) -> None:
        """Bind the first num_past positions as past, and room for num_new more as present.

        Raises:
            MemoryExhausted: The buffers do not fit.
        """
        assert num_past <= self._held.length
        if num_past + num_new > self._held.capacity:
            self._held = self._grown(num_past + num_new)
        if num_past < self._held.length:
            self._held = self._cut(num_past)
        self._next_length = num_past + num_new
        for i, (past, present) in enumerate(self._names):
            self._binding.bind_ortvalue_input(past, self._value(self._held.pasts[i], num_past))
            self._binding.bind_ortvalue_output(present, self._value(self._held.spares[i], self._next_length))

    def collect(self) -> None:
        """After a pass: its present is the next one's past."""
        held = self._held
        self._held = _Buffers(held.spares, held.pasts, self._next_length, held.capacity)

    def pretend(self, num_positions: int) -> None:
        """Hold zeros, written."""
        self.clear()
        grown = self._grown(num_positions)
        for buffer in grown.pasts:
            buffer[...] = 0
        self._held = _Buffers(grown.pasts, grown.spares, num_positions, grown.capacity)

    def clear(self) -> None:
        """Hold nothing, in no memory."""
        self._binding.clear_binding_inputs()
        self._binding.clear_binding_outputs()
        self._held = _Buffers(self._empty(0), self._empty(0), 0, 0)

    def _grown(self, needed: int) -> _Buffers:
        held = self._held
        capacity = grown_capacity(held.capacity, needed, self._context_length)
        try:
            pasts, spares = self._empty(capacity), self._empty(capacity)
        except MemoryError:
            raise MemoryExhausted(f"no memory for a context of {capacity} tokens; use a shorter one") from None
        self._copy(held.length, pasts)
        return _Buffers(pasts, spares, held.length, capacity)

    def _cut(self, length: int) -> _Buffers:
        held = self._held
        self._copy(length, held.spares)
        return _Buffers(held.spares, held.pasts, length, held.capacity)

    def _copy(self, length: int, to: list[npt.NDArray[Any]]) -> None:
        for old, new in zip(self._held.pasts, to, strict=True):
            self._shaped(new, length)[...] = self._shaped(old, self._held.length)[:, :, :length]

    def _empty(self, capacity: int) -> list[npt.NDArray[Any]]:
        size = capacity * self._kv.num_kv_heads * self._kv.head_dim
        return [np.empty(size, self._kv.dtype) for _ in self._names]

    def _shaped(self, buffer: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
        """The front of a buffer as [1, num_kv_heads, length, head_dim]."""
        heads, head_dim = self._kv.num_kv_heads, self._kv.head_dim
        return buffer[: heads * length * head_dim].reshape(1, heads, length, head_dim)

    def _value(self, buffer: npt.NDArray[Any], length: int) -> Any:
        return self._ort.OrtValue.ortvalue_from_numpy(self._shaped(buffer, length), self._device.name)
