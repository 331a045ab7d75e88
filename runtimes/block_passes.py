"""Passes of a head that drafts a block: its main graph with the cache of the tokens before the block."""

from pathlib import Path
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from edgespec.decoding.hidden_states import States
from edgespec.manifest import Manifest
from edgespec.runtimes.devices import Device, import_onnxruntime
from edgespec.runtimes.head_graph import HeadGraph
from edgespec.runtimes.session import SessionOptions, translate_error, translate_memory_errors
from edgespec.runtimes.shared_cache import SharedCache
from edgespec.types import Logits, TokenIds

_INPUTS = ("input_ids", "hidden", "attention_mask", "num_logits_to_keep")


class BlockPasses:
    """The main graph with its cache, run by one thread at a time."""

    def __init__(self, graph: Path, manifest: Manifest, device: Device, **options: Unpack[SessionOptions]) -> None:
        """Load the graph; raises as open_session does."""
        found = HeadGraph(graph, device, **options)
        caches = manifest.signature.caches(manifest.kv_cache.num_layers)
        found.require({*_INPUTS, *(past for past, _ in caches)}, {"logits", "state", *(new for _, new in caches)})
        self._session = found.session
        self.num_block = int(found.inputs["input_ids"][1])
        self.num_drafted, self._state_size = map(int, found.outputs["state"][1:])
        self._num_columns = int(found.outputs["logits"][2])
        self._binding = self._session.io_binding()
        self.cache = SharedCache(self._session, self._binding, manifest, device)
        self._bound: dict[str, npt.NDArray[Any]] = {}  # lives until its run is over: the binding knows addresses
        self._new_options = import_onnxruntime().RunOptions
        self._options = self._new_options()

    def run(self, block: TokenIds, num_past: int, hidden: States, num_logits: int) -> tuple[Logits, States]:
        """Run a block after the first num_past tokens of the cache and those of hidden, [num_new, state_size].

        Returns logits of the first num_logits tokens of the draft, and states of all.

        Raises MemoryExhausted: The cache or the workspace does not fit.
        """
        total = num_past + len(hidden)
        logits = np.empty((1, num_logits, self._num_columns), np.float32)
        states = np.empty((1, self.num_drafted, self._state_size), np.float32)
        with translate_memory_errors("making room for a pass"):
            self.cache.prepare(num_past, len(hidden))
            self._bind(
                input_ids=block[None].astype(np.int64),
                hidden=np.ascontiguousarray(hidden[None]),
                attention_mask=np.ones((1, total), np.int64),
                num_logits_to_keep=np.array([num_logits], np.int64),
            )
            for name, array in (("logits", logits), ("state", states)):
                self._binding.bind_output(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
        try:
            self._session.run_with_iobinding(self._binding, self._options)
        except Exception as error:  # ONNX Runtime has no common base of its own
            raise translate_error(error, "running a pass") from error
        return logits[0], states[0]

    def begin(self) -> None:
        """Forget an interrupt of earlier runs."""
        self._options = self._new_options()

    def interrupt(self) -> None:
        """From another thread: end this run and the next ones until begin(); they raise errors."""
        self._options.terminate = True

    def _bind(self, **arrays: npt.NDArray[Any]) -> None:
        for name, array in arrays.items():
            self._bound[name] = array
            self._binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
