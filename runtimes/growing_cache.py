"""The KV cache as graphs traced from PyTorch have it: past goes in, and present comes out longer by one pass.

The graph copies past into present each pass. A rewind shortens every head, which leaves gaps that the graph
cannot skip, so it is a copy as well.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.cache import grown_capacity
from edgespec.errors import MemoryExhausted
from edgespec.manifest import Manifest
from edgespec.runtimes.devices import Device, import_onnxruntime

_FIRST_CAPACITY = 512


class GrowingCache:
    """Two buffers for each past: one holds it while the graph writes present into the other."""

    def __init__(self, binding: Any, manifest: Manifest, device: Device) -> None:
        self._ort = import_onnxruntime()
        self._binding = binding
        self._device = device
        self._kv = manifest.kv_cache
        self._names = manifest.signature.caches(self._kv.num_layers)
        self._context_length = manifest.context_length
        self._pasts = self._buffers(0)
        self._presents = self._buffers(0)
        self._capacity = 0
        self._length = 0  # positions in the pasts
        self._new_length = 0  # and in the presents

    def prepare(self, num_past: int, num_new: int) -> None:
        """Bind the first num_past positions as past, and room for num_new more as present.

        Raises:
            MemoryExhausted: The buffers do not fit.
        """
        assert num_past <= self._length
        if num_past + num_new > self._capacity:
            self._grow(num_past + num_new)
        if num_past < self._length:
            self._copy(num_past, self._presents)
            self._pasts, self._presents = self._presents, self._pasts
            self._length = num_past
        self._new_length = num_past + num_new
        for i, (past, present) in enumerate(self._names):
            self._binding.bind_ortvalue_input(past, self._value(self._pasts[i], num_past))
            self._binding.bind_ortvalue_output(present, self._value(self._presents[i], self._new_length))

    def collect(self) -> None:
        """After a pass: its present is the next one's past."""
        self._pasts, self._presents = self._presents, self._pasts
        self._length = self._new_length

    def _grow(self, needed: int) -> None:
        capacity = grown_capacity(max(self._capacity, _FIRST_CAPACITY), needed, self._context_length)
        try:
            pasts, presents = self._buffers(capacity), self._buffers(capacity)
        except MemoryError:
            raise MemoryExhausted(f"no memory for a context of {capacity} tokens; use a shorter one") from None
        self._copy(self._length, pasts)
        self._pasts, self._presents, self._capacity = pasts, presents, capacity

    def _buffers(self, capacity: int) -> list[npt.NDArray[Any]]:
        size = capacity * self._kv.num_kv_heads * self._kv.head_dim
        return [np.empty(size, self._kv.dtype) for _ in self._names]

    def _copy(self, length: int, to: list[npt.NDArray[Any]]) -> None:
        for old, new in zip(self._pasts, to, strict=True):
            self._shaped(new, length)[...] = self._shaped(old, self._length)[:, :, :length]

    def _shaped(self, buffer: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
        """The front of a buffer as [1, num_kv_heads, length, head_dim]."""
        heads, head_dim = self._kv.num_kv_heads, self._kv.head_dim
        return buffer[: heads * length * head_dim].reshape(1, heads, length, head_dim)

    def _value(self, buffer: npt.NDArray[Any], length: int) -> Any:
        return self._ort.OrtValue.ortvalue_from_numpy(self._shaped(buffer, length), self._device.name)
