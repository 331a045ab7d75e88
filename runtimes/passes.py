"""Passes of one graph on ONNX Runtime: a session and its KV cache, bound to what each pass takes and gives.

Knows slots of the cache, not which tokens fill them.
"""

from collections.abc import Callable
from pathlib import Path
from threading import local
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from edgespec.cancel import Cancel
from edgespec.manifest import Manifest
from edgespec.runtimes.devices import Device, import_onnxruntime
from edgespec.runtimes.growing_cache import GrowingCache
from edgespec.runtimes.session import open_session, translated
from edgespec.runtimes.shared_cache import SharedCache
from edgespec.types import Logits, TokenIds

_HIDDEN = -30000.0  # which half floats hold


class Cache(Protocol):
    """Keys and values of the positions that were run, bound to a session for its next pass."""

    def prepare(self, num_past: int, num_new: int) -> None:
        """Bind for a pass of num_new tokens that keeps the first num_past positions."""
        ...

    def collect(self) -> None:
        """Take what the pass has made."""
        ...

    def pretend(self, num_positions: int) -> None:
        """Hold so many positions of zeros, written as real ones are: memory that never was reads too fast."""
        ...

    def clear(self) -> None:
        """Hold nothing, in no memory."""
        ...


_CACHES: dict[str, Callable[[Any, Manifest, Device], Cache]] = {
    "shared_buffer": SharedCache,
    "growing": GrowingCache,
}


class Places(NamedTuple):
    """Where the tokens in the last slots of the cache stand, those of the pass at the end.

    positions: [num_slots].
    sees: Which of these slots each sees, [num_slots, num_slots]; all see what comes before them.
    """

    positions: npt.NDArray[np.int64]
    sees: npt.NDArray[np.bool_]


class Passes:
    """A graph with its cache, run by one thread at a time."""

    def __init__(
        self,
        graph: Path,
        manifest: Manifest,
        device: Device,
        num_threads: int,
        *,
        shares_cores: bool = False,
        cancel: Cancel | None = None,
    ) -> None:
        """Load the graph.

        Raises:
            Cancelled: It was given up.
            ManifestError: The graph does not load, or is not the one that the manifest describes.
            MemoryExhausted: The weights do not fit.
        """
        self._manifest = manifest
        self._names = manifest.signature
        self._session = open_session(
            graph, manifest, device, num_threads, shares_cores=shares_cores, cancel=cancel
        )
        self._binding = self._session.io_binding()
        self.cache: Cache = _CACHES[manifest.kv_cache.form](self._binding, manifest, device)
        # What is bound beside the caches lives here until its run is over. It is bound anew for each pass, since
        # an interrupt between binding and noting it would leave the address of freed memory.
        self._ones = np.ones((1, 0), np.int64)
        self._input_ids = np.zeros((1, 0), np.int64)
        self._positions = np.zeros((1, 0), np.int64)
        self._num_logits = np.zeros(1, np.int64)
        self._biases: dict[str, npt.NDArray[np.float32]] = {}
        self._windows = _windows(self._session, manifest)
        self._outputs = {self._names.logits: manifest.vocab_size}  # how many numbers a row of each has
        if self._names.best:
            self._outputs[self._names.best] = 2
        self._types = {name: _element_type(self._session, name) for name in self._outputs}
        self._memory = device.memory
        self._own = local()
        self._new_options = import_onnxruntime().RunOptions
        self._options = self._new_options()  # of the runs that go on, or of the last

    def run(
        self,
        tokens: TokenIds,
        num_past: int,
        num_rows: int,
        places: Places | None = None,
        output: str | None = None,
    ) -> Logits:
        """Run tokens behind the first num_past slots; logits of the last num_rows, [num_rows, vocab_size].

        Args:
            output: Rows of another of the graph's outputs, [num_rows, …]; no other comes to the host.

        Raises:
            MemoryExhausted: The cache or the workspace does not fit.
        """
        self.cache.prepare(num_past, len(tokens))
        self._bind_tokens(tokens, num_past, places)
        num_given = num_rows if self._names.num_logits_to_keep else len(tokens)
        fetched = self._bind_outputs(output or self._names.logits, num_given)
        try:
            self._session.run_with_iobinding(self._binding, self._options)
        except Exception as error:  # ONNX Runtime has no common base of its own
            raise translated(error, "running a pass") from error
        self.cache.collect()
        rows: Logits = fetched[0, -num_rows:]
        return rows if rows.dtype == np.float32 else rows.astype(np.float32)

    def begin(self) -> None:
        """The runs from here on are not yet interrupted."""
        self._options = self._new_options()

    def interrupt(self) -> None:
        """From another thread: end the run that goes on and those that follow until begin(); they raise errors."""
        self._options.terminate = True

    def _bind_tokens(self, tokens: TokenIds, num_past: int, places: Places | None) -> None:
        total = num_past + len(tokens)
        self._input_ids = tokens[None].astype(np.int64)
        self._bind_input(self._names.input_ids, self._input_ids)
        if self._names.attention_mask:
            if total > self._ones.shape[1]:
                self._ones = np.ones((1, min(2 * total, self._manifest.context_length)), np.int64)
            self._bind_input(self._names.attention_mask, self._ones[:, :total])
        slots = np.arange(total)
        if places is not None:
            slots[-len(places.positions) :] = places.positions
        if self._names.position_ids:
            self._positions = slots[None, num_past:].copy()
            self._bind_input(self._names.position_ids, self._positions)
        for name, window in self._windows.items():
            self._biases[name] = _bias(slots, len(tokens), places, window)
            self._bind_input(name, self._biases[name])

    def _bind_outputs(self, fetched: str, num_rows: int) -> npt.NDArray[Any]:
        """The calling thread's own buffer, [1, num_rows, …]: another thread's call leaves it alone."""
        if self._names.num_logits_to_keep:
            self._num_logits = np.array([num_rows], np.int64)
            self._bind_input(self._names.num_logits_to_keep, self._num_logits)
        for name in self._outputs.keys() - {fetched}:  # left where it is made
            self._binding.bind_output(name, self._memory, 0)
        held: dict[str, npt.NDArray[Any]] = self._own.__dict__.setdefault("held", {})
        shape, kind = (1, num_rows, self._outputs[fetched]), self._types[fetched]
        if fetched not in held or held[fetched].shape != shape:
            held[fetched] = np.empty(shape, kind)
        self._binding.bind_output(fetched, "cpu", 0, kind, shape, held[fetched].ctypes.data)
        return held[fetched]

    def _bind_input(self, name: str, array: npt.NDArray[Any]) -> None:
        """Bind an array, which must live until the run is over: the binding keeps its address alone."""
        self._binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


def _bias(
    positions: npt.NDArray[np.int64], num_tokens: int, places: Places | None, window: int | None
) -> npt.NDArray[np.float32]:
    """What is added to the scores, [1, 1, num_tokens, total]: nothing, or so little that all is hidden.

    positions are those of all slots, [total].
    """
    behind = positions[-num_tokens:, None] - positions
    hidden = behind < 0 if window is None else (behind < 0) | (behind >= window)
    if places is not None:
        hidden[:, -len(places.positions) :] |= ~places.sees[-num_tokens:]
    return np.where(hidden, np.float32(_HIDDEN), np.float32(0))[None, None]


def _windows(session: Any, manifest: Manifest) -> dict[str, int | None]:
    """How far back each attention bias that the graph takes lets a token see."""
    taken = {value.name for value in session.get_inputs()}
    names = manifest.signature
    reach = ((names.attention_bias, None), (names.local_attention_bias, manifest.sliding_window))
    return {name: window for name, window in reach if name is not None and name in taken}


def _element_type(session: Any, name: str) -> type[np.floating[Any]]:
    kind = next(value.type for value in session.get_outputs() if value.name == name)
    return np.float16 if kind == "tensor(float16)" else np.float32
