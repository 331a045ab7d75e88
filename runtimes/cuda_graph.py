"""Passes of one width that CUDA records once and replays, so that the host starts one graph and not 400 kernels.

A recording keeps what the host gave, and the addresses that its kernels read and write. So a recorded pass has
arrays of its own on the device, which are written in place: tokens, and a mask of the cache's whole length with
zeros behind the text. Its workspace is free for others behind it. A recording is therefore made anew once its
session has taken memory for a cache, and nothing else is done on a GPU of the process while it is made. The arrays
of another recording may lie there: each is written before a replay of its own and read at its end. While another
model is being opened, which may take seconds, none is made and passes run plain.

ONNX Runtime keeps recordings, and handles of cuBLAS, for each thread that runs a pass, until the session is closed
(docs/log/devices.md). So one thread runs all passes of a session that records.
"""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numpy as np

from edgespec.manifest import Signature
from edgespec.runtimes import cuda
from edgespec.runtimes.device_checks import are_close, is_argmax_sound
from edgespec.runtimes.device_rows import END_ROW, FIRST_ROW, to_argmax
from edgespec.runtimes.devices import Device
from edgespec.runtimes.kv_caches import SharedCache
from edgespec.runtimes.session import new_run_options
from edgespec.types import Array, Logits, TokenIds

Made = TypeVar("Made")
Outputs = Mapping[str, Array]
_MOST = 200  # recordings of a session, none of which is freed before it closes
_IN_LAST_BITS = ", at least in their last bits, which count in deterministic mode"
_log = logging.getLogger(__name__)


class CudaGraphs:
    """State that passes of one session share, those of all forks: their thread, and how many it recorded.

    width: Of the passes that are recorded; 0 where none are.
    num_put_off: How often a pass ran plain since another model was being opened.
    is_exact: Replays have to give the bits of plain passes, as deterministic mode needs.
    """

    def __init__(self, session: Any, device: Device, *, is_exact: bool = False) -> None:
        self.session, self.device, self.is_exact = session, device, is_exact
        self.width = 0
        self.age = 0  # counts how often a cache took memory of the session or gave it back
        self.num_recorded = self.num_put_off = 0
        self._pool = ThreadPoolExecutor(1, "edgespec cuda")  # its thread ends with it

    def run(self, act: Callable[[], Made]) -> Made:
        """Do something in the thread of the session; it is over when this returns, also by an interrupt."""
        doing = self._pool.submit(act)
        try:
            return doing.result()
        except BaseException:
            wait([doing])
            raise

    def stop(self, why: str = "") -> None:
        """Record no more, and say so where passes were recorded; why: by default replays gave other rows."""
        if not self.width:
            return
        self.width = 0
        why = why or "a replay gave other rows than a plain pass" + _IN_LAST_BITS * self.is_exact
        _log.warning(
            "'%s' does not replay passes (CUDA graphs), which are slower without: %s", self.device.name, why
        )


def is_as_plain(rows: Logits, expected: Logits, *, is_exact: bool) -> bool:
    """True if rows of a replay are those of a plain pass."""
    return np.array_equal(rows, expected) if is_exact else are_close(rows, expected)


def find_graphs(session: Any, device: Device, *, is_exact: bool) -> CudaGraphs | None:
    """The state that passes on an NVIDIA GPU share; None for a session that was not opened for recording."""
    options = session.get_provider_options()[cuda.PROVIDER]
    return CudaGraphs(session, device, is_exact=is_exact) if options.get(cuda.GRAPHS) == "1" else None


class RecordedPass:
    """The recorded pass over one cache."""

    def __init__(
        self, graphs: CudaGraphs, names: Signature, outputs: Mapping[str, tuple[int, Any]], *, is_single: bool
    ) -> None:
        """Record nothing yet.

        Args:
            outputs: Those to give, with the width of a row and its type.
            is_single: Give logits of the first token alone: those of all take eight times as long to copy.
        """
        self._graphs, self._names, self._wanted = graphs, names, outputs
        self._is_single = is_single
        self._id, self._age = -1, -1
        self._binding: Any = None
        self._arrays: dict[str, Any] = {}  # on the device, by the name that they are bound to
        self._held: list[Array] = []  # in the host's memory, whose addresses the binding knows

    def drop(self) -> None:
        """Let go of the cache, which is about to take other memory; all recordings of the session are too old."""
        self._graphs.age += 1
        self._binding, self._age = None, -1
        self._arrays.clear()
        self._held.clear()

    def run(
        self,
        cache: SharedCache,
        tokens: TokenIds,
        num_past: int,
        fetched: Collection[str],
        plain: Callable[[], Logits],
        on_begin: Callable[[], None],
    ) -> Outputs | None:
        """Run tokens, of which the last may mean nothing, after the first num_past slots of the cache.

        A new recording is compared with a plain pass. Returns rows of outputs, [width, …], or the first row of
        logits alone; None where passes are no longer recorded, or not while another model is being opened.

        Args:
            fetched: The outputs that are copied to the host.
            plain: Runs the same in a pass that is not recorded; returns the logits of tokens that mean something.
            on_begin: Is called as a replay begins.

        Raises what ONNX Runtime raises of a replay, and what plain raises.
        """
        if self._age == self._graphs.age:
            with cuda.GATE:
                return self._replay(tokens, num_past, fetched, on_begin)
        if self._graphs.num_recorded >= _MOST:
            self._graphs.stop(f"{_MOST} were recorded, as many as a session may hold")
            return None
        try:
            with cuda.GATE.recording() as is_alone:
                if not is_alone:
                    self._graphs.num_put_off += 1
                    return None
                outputs = self._record(cache, tokens, num_past)
        except Exception as error:  # ONNX Runtime has no common base of its own
            self._graphs.stop(f"recording one failed ({' '.join(str(error).split())[-200:]})")
            return None
        expected = plain()  # the last to write into the cache
        if self._agrees(outputs, expected):
            return outputs
        self._graphs.stop()
        return None

    def _agrees(self, outputs: Outputs, expected: Logits) -> bool:
        rows = outputs[self._names.logits][: len(expected)].astype(np.float32)
        if not is_as_plain(rows, expected, is_exact=self._graphs.is_exact):
            return False
        if self._names.best is None:
            return True
        best = to_argmax(outputs[self._names.best][: len(expected)], expected.shape[1])
        return is_argmax_sound(expected, best)

    def _record(self, cache: SharedCache, tokens: TokenIds, num_past: int) -> Outputs:
        if self._binding is None:
            self._binding = self._bind(cache.buffers)
        self._graphs.num_recorded += 1
        self._id = self._graphs.num_recorded
        outputs = self._replay(tokens, num_past, self._wanted)
        self._age = self._graphs.age
        return outputs

    def _replay(
        self,
        tokens: TokenIds,
        num_past: int,
        fetched: Collection[str],
        on_begin: Callable[[], None] = lambda: None,
    ) -> Outputs:
        mask = np.zeros(self._arrays[self._mask].shape(), np.int64)
        mask[:, : num_past + len(tokens)] = 1
        self._arrays[self._mask].update_inplace(mask)
        self._arrays[self._names.input_ids].update_inplace(tokens[None].astype(np.int64))
        options = new_run_options(self._id)
        on_begin()
        self._graphs.session.run_with_iobinding(self._binding, options)
        self._binding.synchronize_outputs()
        return {name: self._arrays[name].numpy()[0] for name in fetched}

    @property
    def _mask(self) -> str:
        assert self._names.attention_mask
        return self._names.attention_mask

    def _bind(self, buffers: Sequence[Any]) -> Any:
        width, names = self._graphs.width, self._names
        num_rows = 1 if self._is_single else width
        binding = self._graphs.session.io_binding()
        for (past, present), buffer in zip(names.caches(range(len(buffers) // 2)), buffers, strict=True):
            binding.bind_ortvalue_input(past, buffer)
            binding.bind_ortvalue_output(present, buffer)
        length = min(buffer.shape()[2] for buffer in buffers)  # some are longer where memory was refused
        for name, shape in ((names.input_ids, (1, width)), (self._mask, (1, length))):
            self._arrays[name] = self._take(shape, np.int64)
            binding.bind_ortvalue_input(name, self._arrays[name])
        for name, (row_width, kind) in self._wanted.items():
            is_row = name in (names.logits, names.best)
            self._arrays[name] = self._take((1, num_rows if is_row else width, row_width), kind)
            binding.bind_ortvalue_output(name, self._arrays[name])
        assert names.num_logits_to_keep
        for name, number in ((names.num_logits_to_keep, width), (FIRST_ROW, 0), (END_ROW, num_rows)):
            held = np.array([number], np.int64)
            self._held.append(held)
            binding.bind_input(name, "cpu", 0, np.int64, held.shape, held.ctypes.data)
        return binding

    def _take(self, shape: Sequence[int], kind: Any) -> Any:
        device = self._graphs.device
        make = self._graphs.session.create_ortvalue_from_shape_and_type
        return make(shape, kind, device.memory, device.memory_index)
