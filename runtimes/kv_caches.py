"""The KV caches of graphs, in the forms that graphs take.

A graph of edgespec's own takes one buffer for each layer's keys and one for its values, longer than what fills it.
It is bound as past and as present, and the total length says how much of it counts: a rewind costs nothing.

A layer with a short convolution has a row for each token, in a buffer like that of a head's keys, behind rows of
zeros that stand before a text. A pass reads the last few rows before it, and writes its own behind them: both are
bound as views of the buffer. It is the host's, also beside a GPU, which copies the few rows of a pass.

A graph traced from PyTorch copies past into present each pass, which is longer by the pass. A rewind shortens
every head then, which leaves gaps that the graph cannot skip, so it is a copy as well.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgespec.errors import DeviceUnavailable, MemoryExhausted
from edgespec.manifest import Manifest
from edgespec.manifest.caches import Convolutions
from edgespec.memory.estimate import next_capacity
from edgespec.runtimes.cuda import PROVIDER
from edgespec.runtimes.devices import Device
from edgespec.runtimes.memory_errors import is_memory_error
from edgespec.runtimes.recurrent_states import RecurrentStates
from edgespec.runtimes.session import translate_error
from edgespec.types import Array

_SPARE = 64  # positions more than are needed, where there is no memory to double them


class SharedCache:
    """Buffers that grow by doubling, kept bound to one session's inputs and outputs."""

    def __init__(self, ort: Any, session: Any, binding: Any, manifest: Manifest, device: Device) -> None:
        self._ort = ort
        self._session = session
        self._binding = binding
        self._device = device
        self._kv = manifest.kv_cache
        self._names = manifest.cache_names
        self._context_length = manifest.context_length
        self._rows = self._kv.convolutions
        # How many rows of zeros stand before a text in a buffer, by its name.
        self._num_before = {past: self._rows.num_before for past, _ in self._rows.names} if self._rows else {}
        self.states = RecurrentStates(binding, self._kv) if self._kv.recurrence else None
        self._buffers: dict[str, Any] = {}  # name of the past -> the OrtValue bound as past and as present
        self._listed: Sequence[Any] = ()  # the same, once they were asked for
        self._capacity = 0
        self.has_freed = False  # buffers were let go that a device's arena still holds
        self.before_change: Callable[[], None] = lambda: None  # called before other buffers are taken, or none

    def has_room(self, num_positions: int) -> bool:
        """True if there is nothing to prepare for a pass that ends there."""
        return num_positions <= self._capacity and not self.states and not self._rows

    def prepare(self, num_past: int, num_new: int) -> None:
        """Make room for num_new positions after the first num_past, which are kept.

        Raises MemoryExhausted: The buffers do not fit. They hold what they held, and some may be longer.
        """
        if num_past + num_new > self._capacity:
            self._make_room(num_past + num_new, num_past)
        if self.states:
            self.states.bind(num_past, num_new)
        if self._rows:
            bind_rows(self._binding, self._rows, self._buffers, num_past, num_new)

    @property
    def rows(self) -> Mapping[str, Any]:
        """The OrtValues of the rows of layers with a short convolution, by the name of their past."""
        return {past: self._buffers[past] for past in self._num_before}

    def _make_room(self, needed: int, num_past: int) -> None:
        doubled = next_capacity(self._capacity, needed, self._context_length)
        least = min(needed + _SPARE, self._context_length)
        for capacity in (doubled, least) if self._can_copy else (self._context_length,):
            try:
                self._grow(capacity, num_past)
                return
            except Exception as error:  # ONNX Runtime has no common base of its own
                if not is_memory_error(error):
                    raise translate_error(error, "making room for the KV cache") from error
                refused = error
        raise MemoryExhausted(f"no memory for a context of {capacity} tokens; use a shorter one") from refused

    @property
    def _can_copy(self) -> bool:
        """True if what buffers hold can be copied to longer ones: through numpy, where the build of ONNX Runtime
        that has the device's provider copies. Where it cannot, buffers are made once."""
        return self._device.memory == "cpu" or self._device.provider == PROVIDER

    def collect(self) -> None:
        """Keep recurrent states; keys and values the graph has written into the buffers themselves."""
        if self.states:
            self.states.collect()

    def pretend(self, num_positions: int) -> None:
        """Hold zeros, which are written only in the CPU's memory: another device's is all there from the start."""
        if num_positions > self._capacity:
            self.clear()
            self.prepare(0, num_positions)
        for held in self._held() if self._device.memory == "cpu" else ():
            held[:, :, :num_positions] = 0
        if self.states:
            self.states.pretend(num_positions)

    def _held(self, buffers: Mapping[str, Any] | None = None) -> list[Array]:
        """Views of all buffers by position, [1, heads, positions, numbers], without the rows before a text.

        buffers: To view; they must be held as long as their views are read.
        """
        held = self._buffers if buffers is None else buffers
        return [buffer.numpy()[:, :, self._num_before.get(past, 0) :] for past, buffer in held.items()]

    def imitate(self, num_run: int, num_positions: int, seed: int) -> None:
        """Fill the slots after the first num_run up to num_positions with their values, mixed and scaled.

        The buffers must be the CPU's.
        """
        self.prepare(num_run, num_positions - num_run)
        rng = np.random.default_rng(seed)
        for held in self._held():
            picked = rng.integers(0, num_run, num_positions - num_run)
            scales = rng.uniform(0.7, 1.3, (len(picked), 1)).astype(held.dtype)
            held[:, :, num_run:num_positions] = held[:, :, picked] * scales

    def clear(self) -> None:
        self.before_change()
        self._capacity = 0
        self.has_freed = bool(self._buffers)
        self._binding.clear_binding_inputs()
        self._binding.clear_binding_outputs()
        self._buffers.clear()
        self._listed = ()
        if self.states:
            self.states.clear()

    @property
    def buffers(self) -> Sequence[Any]:
        """The OrtValues that are bound as past and as present, in the order of the signature's caches.

        The same list as long as they are the same.
        """
        if not self._listed:
            self._listed = [self._buffers[past] for past, _ in self._names]
        return self._listed

    def copy_from(self, other: "SharedCache", num_positions: int) -> bool:
        """Hold the first num_positions of another cache; the buffers must be the CPU's.

        The other one may grow or be cleared meanwhile. Returns False if it had been cleared.

        Raises MemoryExhausted: The buffers do not fit.
        """
        self.prepare(0, num_positions)
        kept = dict(other._buffers)  # which views do not keep
        views = other._held(kept)
        if kept.keys() != self._buffers.keys() or any(each.shape[2] < num_positions for each in views):
            return False
        for own, theirs in zip(self._held(), views, strict=True):
            own[:, :, :num_positions] = theirs[:, :, :num_positions]
        return True

    def read(self, num_positions: int) -> Array:
        """The content of the CPU's buffers for num_positions, [1, 1, num_positions, numbers_per_token]."""
        if not num_positions:  # else they are there, also after a growth that failed
            self.prepare(0, 1)
        parts = [held[0, :, :num_positions].swapaxes(0, 1) for held in self._held()]
        return np.concatenate(
            [each.reshape(num_positions, each.shape[1] * each.shape[2]) for each in parts], axis=1
        )[None, None]

    def fill(self, values: Array) -> None:
        """Hold what read has given; raises as copy_from does."""
        num_positions = values.shape[2]
        self.prepare(0, num_positions)
        start = 0
        for held in self._held():
            part = values[0, 0, :, start : start + held.shape[1] * held.shape[3]]
            held[0, :, :num_positions] = part.reshape(num_positions, held.shape[1], -1).swapaxes(0, 1)
            start += part.shape[1]

    def move(self, slots: Sequence[int], start: int) -> None:
        """Copy slots, in rising order, to start and after it; the buffers must be the CPU's."""
        for held in self._held():
            held[:, :, start : start + len(slots)] = held[:, :, slots]

    def _grow(self, capacity: int, num_past: int) -> None:
        """Grow layer by layer, keys and values together, so that what is left after a MemoryError can be run."""
        self.before_change()
        self._capacity = 0  # until all is done, whatever comes between
        self._listed = ()
        for past, _ in self._rows.names if self._rows else ():
            assert self._rows
            length = self._rows.num_before + capacity
            if past not in self._buffers or self._buffers[past].shape()[2] < length:
                self._buffers[past] = self._allocate(past, (1, 1, length, self._rows.width), num_past, "cpu")
        pairs = zip(self._names[::2], self._names[1::2], strict=True)
        for number, layer in zip(self._kv.attention_layers, pairs, strict=True):
            held = [self._buffers.get(past) for past, _ in layer]
            lengths = [int(buffer.shape()[2]) if buffer is not None else 0 for buffer in held]
            if lengths[0] == lengths[1] >= capacity:
                continue
            num_heads, head_dim = self._kv.heads[number]
            grown = [self._allocate(past, (1, num_heads, capacity, head_dim), num_past) for past, _ in layer]
            self.has_freed |= layer[0][0] in self._buffers
            for (past, present), value in zip(layer, grown, strict=True):
                self._buffers[past] = value
                self._binding.bind_ortvalue_input(past, value)
                self._binding.bind_ortvalue_output(present, value)
        self._capacity = capacity

    def _allocate(self, past: str, shape: tuple[int, ...], num_past: int, memory: str = "") -> Any:
        memory = memory or self._device.memory
        value = None
        if memory != "cpu":
            value = self._session.create_ortvalue_from_shape_and_type(
                shape, np.dtype(self._kv.dtype).type, memory, self._device.memory_index
            )
            if not self._can_copy:
                return value
        # Zeros after what is held: attention may multiply what it masks, and memory of a device may hold NaN. They
        # are written: np.zeros takes no memory before it is used, and would count as free until then.
        buffer, num_kept = np.empty(shape, self._kv.dtype), num_past and num_past + self._num_before.get(past, 0)
        buffer[:, :, num_kept:] = 0
        if num_kept:
            buffer[:, :, :num_kept] = self._buffers[past].numpy()[:, :, :num_kept]
        if value is None:
            return self._ort.OrtValue.ortvalue_from_numpy(buffer, memory)
        value.update_inplace(buffer)
        return value


def bind_rows(
    binding: Any, rows: Convolutions, buffers: Mapping[str, Any], num_past: int, num_new: int, ending: str = ""
) -> None:
    """Bind the rows before num_past as those that a pass reads, and those of num_new tokens as what it writes.

    Args:
        buffers: By the name of their past. What is bound are views of them, on the CPU.
        ending: What the graph's names end with.
    """
    for past, present in rows.names:
        value = buffers[past].numpy()
        read, written = num_past, num_past + rows.num_before
        shapes = (1, rows.num_before, rows.width), (1, num_new, rows.width)
        address, row_bytes, kind = value.ctypes.data, value.strides[2], value.dtype.type
        binding.bind_input(past + ending, "cpu", 0, kind, shapes[0], address + read * row_bytes)
        binding.bind_output(present + ending, "cpu", 0, kind, shapes[1], address + written * row_bytes)


@dataclass(frozen=True, slots=True)
class _Buffers:
    """A buffer for each past and a spare one; length counts the positions held."""

    pasts: list[Array]
    spares: list[Array]
    length: int
    capacity: int


class GrowingCache:
    """Two buffers for each past: one holds it while the graph writes present into the other.

    Both change in one assignment, so that an interrupt at any moment leaves the cache whole.
    """

    def __init__(self, ort: Any, binding: Any, manifest: Manifest, device: Device) -> None:
        self._ort = ort
        self._binding = binding
        self._device = device
        self._kv = manifest.kv_cache
        self._names = manifest.cache_names
        self._context_length = manifest.context_length
        self._held = _Buffers(self._allocate(0), self._allocate(0), 0, 0)
        self._next_length = 0

    def has_room(self, num_positions: int) -> bool:
        """False: what is bound differs from pass to pass."""
        return False

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
        """Hold zeros that are really written: memory that was never written reads too fast to be timed."""
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

    def _copy(self, length: int, to: list[Array]) -> None:
        for old, new in zip(self._held.pasts, to, strict=True):
            self._view(new, length)[...] = self._view(old, self._held.length)[:, :, :length]

    def _allocate(self, capacity: int) -> list[Array]:
        size = capacity * self._kv.num_kv_heads * self._kv.head_dim
        return [np.empty(size, self._kv.dtype) for _ in self._names]

    def _view(self, buffer: Array, length: int) -> Array:
        """The front of a buffer as [1, num_kv_heads, length, head_dim]."""
        heads, head_dim = self._kv.num_kv_heads, self._kv.head_dim
        return buffer[: heads * length * head_dim].reshape(1, heads, length, head_dim)

    def _value(self, buffer: Array, length: int) -> Any:
        return self._ort.OrtValue.ortvalue_from_numpy(self._view(buffer, length), self._device.name)


BoundCache = SharedCache | GrowingCache
"""Keys and values of the positions that were run, bound to a session for its next pass."""


def make_cache(ort: Any, session: Any, binding: Any, manifest: Manifest, device: Device) -> BoundCache:
    """An empty cache for passes of a session of the module onnxruntime.

    Raises DeviceUnavailable: The cache's form is not for the device.
    """
    if manifest.kv_cache.form == "shared_buffer":
        return SharedCache(ort, session, binding, manifest, device)
    if device.memory != "cpu":
        raise DeviceUnavailable(
            f"{manifest.name} has a KV cache that is copied each pass, which '{device.name}' does not run: export "
            "the model again from GGUF or safetensors with edgespec export, or use --device cpu",
            device=device.name,
        )
    return GrowingCache(ort, binding, manifest, device)
