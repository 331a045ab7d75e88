"""A decoder of fixed shapes: one token a pass, or a block of a prompt, and the cache outside of the graph.

Its inputs, its outputs and the KV cache are bound to a session once. The cache stays where the device reads it. A
pass writes its own keys and values into it, and into the mask what has changed since the pass before, so that the
bytes that a token moves do not grow with the context.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from edgespec.decoding.decoder import Cache, Decoder, Pass, Rows, reusable_prefix
from edgespec.errors import ManifestError, require_context
from edgespec.manifest import Manifest
from edgespec.runtimes.attention_bias import HIDDEN, is_hidden
from edgespec.runtimes.compiled_graphs import load_graphs
from edgespec.runtimes.devices import Device, find_device, import_onnxruntime
from edgespec.runtimes.node_placement import read_node_placement, require_placement
from edgespec.runtimes.session import (
    SessionOptions,
    ends_with,
    load_graph,
    new_run_options,
    refuse_device,
    require_same,
    translate_errors,
    translate_memory_errors,
)
from edgespec.system.cancel import Cancel
from edgespec.types import Array, Logits, Range, TokenIds


class StaticDecoder(Decoder, Cache):
    """The model of a folder in its static form, as a function from tokens to logits; raises as OnnxDecoder does.

    The cache is a memo: a rewind is a mask that shows less of it. In deterministic mode every pass runs one token,
    so that a row is equal to the bit however tokens came.
    """

    num_fed = 0

    def __init__(
        self, folder: Path, manifest: Manifest, device: Device, **options: Unpack[SessionOptions]
    ) -> None:
        """Load the graphs; raises as open_session does."""
        self.vocab_size, self.context_length = manifest.vocab_size, manifest.context_length
        graphs = {1: manifest.graph}
        if manifest.prefill_graph and not options.get("deterministic"):
            graphs[manifest.prefill_tokens] = manifest.prefill_graph
        sessions = load_graphs(folder, manifest, list(graphs.values()), device, **options)
        self._sessions = dict(zip(graphs, sessions, strict=True))
        for width, session in self._sessions.items():
            _require_static(folder / graphs[width], manifest, device, session)
        allocate = allocator(device)  # once a session is open: some providers offer shared memory only then
        with translate_memory_errors("allocating the KV cache"):
            self._cache = StaticCache(manifest, allocate, manifest.kv_cache.dtype)
            self._passes = {
                width: StaticPass(session, manifest, self._cache, allocate)
                for width, session in self._sessions.items()
            }
        self._held = np.zeros(0, np.int32)
        self._lock = Lock()
        self._options = new_run_options()  # for the passes that run, or the last ones
        if device.name != "cpu":
            cancel = options.get("cancel") or Cancel()
            # Whether a device runs a graph that it loads shows only in a pass.
            with ends_with(cancel, self.interrupt), refuse_device(device):
                self._pass(np.zeros(1, np.int32), 0)  # what it leaves in the cache is masked

    @property
    def cache(self) -> Cache:
        return self

    def run(self, given: Pass) -> Rows:
        tokens, num_last = given.tokens, given.num_rows
        require_context(len(tokens), self.context_length)
        assert 1 <= num_last <= len(tokens)
        with self._lock, translate_memory_errors("running a pass"):
            self._options = new_run_options()
            return Rows(self._logits(tokens, num_last))

    def interrupt(self) -> None:
        self._options.terminate = True

    def pretend(self, tokens: TokenIds) -> None:
        require_context(len(tokens), self.context_length)
        with self._lock:
            self._held = tokens

    def forget(self) -> None:
        """Hold no tokens; the cache is of a fixed size."""
        with self._lock:
            self._held = self._held[:0]

    def _logits(self, tokens: TokenIds, num_last: int) -> Logits:
        start, first = reusable_prefix(self._held, tokens, num_last), len(tokens) - num_last
        rows = np.empty((num_last, self.vocab_size), np.float32)
        while start < len(tokens):
            width = max(width for width in self._sessions if width <= len(tokens) - start)
            self._held = tokens[:start]
            found = self._pass(tokens[start : start + width], start)
            self.num_fed += width
            start += width
            wanted = min(width, max(0, start - first))
            rows[start - wanted - first : start - first] = found[width - wanted :]
        self._held = tokens
        return rows

    def _pass(self, tokens: TokenIds, num_past: int) -> Logits:
        with translate_errors("running a pass"):
            return self._passes[len(tokens)].run(tokens, num_past, self._options)


def _require_static(graph: Path, manifest: Manifest, device: Device, session: Any) -> None:
    """Raises as open_session does."""
    require_placement(read_node_placement(session), device, str(graph))
    shapes, kv = {value.name: tuple(value.shape) for value in session.get_inputs()}, manifest.kv_cache
    if not {"input_ids", "position_ids"} < set(shapes):
        raise ManifestError(
            f"{graph} takes {', '.join(sorted(shapes)[:4])}, which is not a static form; export it again"
        )
    wanted = (kv.num_kv_heads, manifest.context_length, kv.head_dim)
    pasts = {past for past, _ in manifest.cache_names}
    found = {name: shape for name, shape in shapes.items() if "past" in name}
    made = {value.name for value in session.get_outputs()}
    outputs = [name for _, name in manifest.signature.roles(kv.num_layers)[1]]
    require_same(
        graph,
        [
            *(f"{name} is missing, wanted {wanted}" for name in sorted(pasts - found.keys())),
            *(f"{name} is not expected" for name in sorted(found.keys() - pasts)),
            *(f"{name} is {shape}, wanted {wanted}" for name, shape in found.items() if shape != wanted),
            *(f"its output {name} is missing" for name in outputs if name not in made),
        ],
    )


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
        if device.handles and (place := device.handles[0].memory_info(ort.OrtDeviceMemoryType.HOST_ACCESSIBLE)):
            try:
                value = ort.OrtValue.ortvalue_from_shape_and_type(shape, np.dtype(dtype).type, memory_info=place)
                value.numpy()[...] = 0
                return value
            except Exception as error:  # ONNX Runtime has no common base of its own
                _log.debug("'%s' gives no shared memory: %s", device.name, error)
        return ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, dtype))

    return allocate


class StaticCache:
    """Keys and values by the name of their input, [num_kv_heads, context_length, head_dim]."""

    def __init__(self, manifest: Manifest, allocate: _Allocate, dtype: npt.DTypeLike) -> None:
        kv = manifest.kv_cache
        shape = (kv.num_kv_heads, manifest.context_length, kv.head_dim)
        self._names = manifest.cache_names
        # Zeros and nothing else: where nothing is cached yet is masked, but a NaN there would show.
        self.values = {past: allocate(shape, dtype) for past, _ in self._names}
        self._arrays = {past: value.numpy() for past, value in self.values.items()}

    def write(self, outputs: dict[str, Array], num_past: int) -> None:
        """Write the keys and values of a pass after num_past positions."""
        for past, present in self._names:
            new = outputs[present]
            self._arrays[past][:, num_past : num_past + new.shape[1]] = new


class Mask:
    """The mask of a pass, [num_tokens, capacity + num_tokens]: the cache's positions, then the pass's."""

    def __init__(self, array: Array, window: int | None) -> None:
        """Write all of the mask of a pass that begins at the first position."""
        self._array, self._window = array, window
        self._num_tokens, width = array.shape
        self._capacity = width - self._num_tokens
        self._low = self._high = 0  # num_past of the pass before; apart where a move was interrupted
        tokens = np.arange(self._num_tokens)
        array[:, : self._capacity] = HIDDEN
        array[:, self._capacity :] = np.where(is_hidden(tokens[:, None] - tokens, window), HIDDEN, 0)

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
        self.outputs: dict[str, Array] = {}  # of the last pass, by name
        for value in session.get_outputs():
            held = allocate(value.shape, _TYPES[value.type])
            self._binding.bind_ortvalue_output(value.name, held)
            self._values.append(held)
            self.outputs[value.name] = held.numpy()

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
