"""Passes of a static graph over memory that is bound to it once: its KV cache, its inputs and its outputs.

The cache stays where the device reads it. A pass writes its own keys and values into it, and into the mask what
has changed since the pass before, so that the bytes that a token moves do not grow with the context.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.manifest import Manifest
from edgespec.runtimes.attention_bias import HIDDEN, is_hidden
from edgespec.runtimes.devices import Device, find_device, import_onnxruntime
from edgespec.runtimes.session import load_graph, translate_memory_errors
from edgespec.types import Logits, Range, TokenIds

_log = logging.getLogger(__name__)
_TYPES: dict[str, npt.DTypeLike] = {
    "tensor(int32)": np.int32,
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(uint16)": np.uint16,
}
_Allocate = Callable[[Sequence[int], npt.DTypeLike], Any]  # an OrtValue of zeros that numpy can write into


def allocator(device: Device) -> _Allocate:
    """Allocates arrays that the device reads without a copy, where its provider offers such memory.

    Otherwise arrays lie in ordinary memory, from which the provider copies.
    """
    ort = import_onnxruntime()

    def allocate(shape: Sequence[int], dtype: npt.DTypeLike) -> Any:
        if place := _shared_memory(ort, device):
            try:
                value = ort.OrtValue.ortvalue_from_shape_and_type(shape, np.dtype(dtype).type, memory_info=place)
                value.numpy()[...] = 0
                return value
            except Exception as error:  # ONNX Runtime has no common base of its own
                _log.debug("'%s' gives no shared memory: %s", device.name, error)
        return ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, dtype))

    return allocate


def _shared_memory(ort: Any, device: Device) -> Any:
    """ONNX Runtime's description of memory that the CPU and the device both address; None where there is none."""
    if not device.handles:
        return None
    return device.handles[0].memory_info(ort.OrtDeviceMemoryType.HOST_ACCESSIBLE)


class StaticCache:
    """Keys and values by the name of their input, [num_kv_heads, context_length, head_dim].

    num_written: Bytes that were written so far.
    """

    def __init__(self, manifest: Manifest, allocate: _Allocate, dtype: npt.DTypeLike) -> None:
        kv = manifest.kv_cache
        shape = (kv.num_kv_heads, manifest.context_length, kv.head_dim)
        self._names = manifest.signature.caches(kv.num_layers)
        # Zeros and nothing else: where nothing is cached yet is masked, but a NaN there would show.
        self.values = {past: allocate(shape, dtype) for past, _ in self._names}
        self._arrays = {past: value.numpy() for past, value in self.values.items()}
        self.num_written = 0

    def write(self, outputs: dict[str, npt.NDArray[Any]], num_past: int) -> None:
        """Write the keys and values of a pass after num_past positions."""
        for past, present in self._names:
            new = outputs[present]
            self._arrays[past][:, num_past : num_past + new.shape[1]] = new
            self.num_written += new.nbytes


class Mask:
    """The mask of a pass, [num_tokens, capacity + num_tokens]: the cache's positions, then the pass's.

    num_written: Bytes that were written so far.
    """

    def __init__(self, array: npt.NDArray[Any], window: int | None) -> None:
        """Write all of the mask of a pass that begins at the first position."""
        self._array, self._window = array, window
        self._num_tokens, width = array.shape
        self._capacity = width - self._num_tokens
        self._low = self._high = 0  # num_past of the pass before; apart where a move was interrupted
        tokens = np.arange(self._num_tokens)
        array[:, : self._capacity] = HIDDEN
        array[:, self._capacity :] = np.where(is_hidden(tokens[:, None] - tokens, window), HIDDEN, 0)
        self.num_written = array.nbytes

    def move(self, num_past: int) -> None:
        """Show the first num_past positions of the cache, and of these what lies in the window."""
        low, high = min(self._low, num_past), max(self._high, num_past)
        self._low, self._high = low, high
        self._write(low, high, num_past)
        if self._window is not None:
            # A token at position p sees p − window + 1 and what follows; the last one of the pass the fewest.
            self._write(low - self._window + 1, min(low, high - self._window + self._num_tokens), num_past)
        self._low = self._high = num_past

    def _write(self, low: int, high: int, num_past: int) -> None:
        slots = np.arange(max(0, low), min(high, self._capacity))
        if not len(slots):
            return
        behind = num_past + np.arange(self._num_tokens)[:, None] - slots
        hidden = is_hidden(behind, self._window) | (slots >= num_past)
        self._array[:, slots[0] : slots[-1] + 1] = np.where(hidden, HIDDEN, 0)
        self.num_written += hidden.size * self._array.itemsize


class StaticPass:
    """A session of a static graph whose inputs and outputs are bound once."""

    def __init__(self, session: Any, manifest: Manifest, cache: StaticCache, allocate: _Allocate) -> None:
        self._session, self._cache = session, cache
        self._binding = session.io_binding()
        self._values: list[Any] = []  # the binding knows only addresses
        inputs = {}
        for value in session.get_inputs():
            held = cache.values.get(value.name) or allocate(value.shape, _TYPES[value.type])
            self._binding.bind_ortvalue_input(value.name, held)
            self._values.append(held)
            if value.name not in cache.values:
                inputs[value.name] = held.numpy()
        self._tokens, self._positions = inputs.pop("input_ids"), inputs.pop("position_ids")
        windows = {"local_attention_mask": manifest.sliding_window}
        self._masks = [Mask(array, windows.get(name)) for name, array in inputs.items()]
        self.outputs: dict[str, npt.NDArray[Any]] = {}  # of the last pass, by name
        for value in session.get_outputs():
            held = allocate(value.shape, _TYPES[value.type])
            self._binding.bind_ortvalue_output(value.name, held)
            self._values.append(held)
            self.outputs[value.name] = held.numpy()

    @property
    def num_written(self) -> int:
        """Bytes that the host has written into inputs so far, apart from the cache."""
        return sum(mask.num_written for mask in self._masks)

    def run(self, tokens: TokenIds, num_past: int, options: Any) -> Logits:
        """Logits of tokens after num_past positions of the cache, which holds theirs too afterwards.

        The rows, [num_tokens, vocab_size], are overwritten by the next pass.
        """
        self._tokens[:] = tokens
        self._positions[:] = np.arange(num_past, num_past + len(tokens))
        for mask in self._masks:
            mask.move(num_past)
        self._session.run_with_iobinding(self._binding, options)
        self._cache.write(self.outputs, num_past)
        return self.outputs["logits"]


_LOW, _HIGH = ".low", ".high"


def observe_ranges(graph: Path, manifest: Manifest, texts: Iterable[TokenIds]) -> dict[str, Range]:
    """Run a graph on the CPU, in passes of prefill_tokens; the rest of a text is left out.

    Args:
        graph: Takes and gives floats, and NAME.low and NAME.high of each value to observe.
        texts: Each begins at the first position.

    Raises MemoryExhausted: The weights or the workspace do not fit.
    """
    device, width = find_device("cpu"), manifest.prefill_tokens
    session, allocate = load_graph(graph, device), allocator(device)
    names = [value.name.removesuffix(_LOW) for value in session.get_outputs() if value.name.endswith(_LOW)]
    found: dict[str, list[Range]] = {name: [] for name in names}
    with translate_memory_errors("measuring ranges"):
        each = StaticPass(session, manifest, StaticCache(manifest, allocate, np.float32), allocate)
        for tokens in texts:
            for start in range(0, len(tokens) - width + 1, width):
                each.run(tokens[start : start + width], start, None)
                for name, ranges in found.items():
                    ranges.append(Range(float(each.outputs[name + _LOW]), float(each.outputs[name + _HIGH])))
    return {name: Range(min(r.low for r in ranges), max(r.high for r in ranges)) for name, ranges in found.items()}
