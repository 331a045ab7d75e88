"""Runs the passes of several texts as one, each over a cache of its own."""

import logging
import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from threading import Thread, current_thread
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.decoding.decoder import Room
from edgespec.errors import EdgeSpecError, MemoryExhausted
from edgespec.manifest import Manifest
from edgespec.memory.free_memory import return_freed
from edgespec.runtimes import joined_graph
from edgespec.runtimes.device_checks import are_close, probe_tokens
from edgespec.runtimes.devices import Device, import_onnxruntime
from edgespec.runtimes.joined_graph import join_graph, part_name
from edgespec.runtimes.kv_caches import bind_rows
from edgespec.runtimes.passes import Part, Passes, PassRows
from edgespec.runtimes.session import (
    HIDDEN_STATES,
    SessionOptions,
    load_graph,
    new_run_options,
    translate_errors,
    translate_memory_errors,
)
from edgespec.system.cancel import Cancel
from edgespec.types import Array

_log = logging.getLogger(__name__)
_FEW_PARTS = 4  # of the first session; the next one has twice as many


class JoinedSession:
    """A session of a joined graph, run by one thread at a time."""

    def __init__(self, session: Any, manifest: Manifest, num_parts: int, *, is_exact: bool) -> None:
        """Bind nothing yet; is_exact: rows are those of a pass alone, to the bit (pass_shapes.py)."""
        self._session, self._manifest, self.num_parts = session, manifest, num_parts
        kv, ort = manifest.kv_cache, import_onnxruntime()
        self._is_exact = is_exact
        self._binding = session.io_binding()
        self._options = new_run_options()
        self._caches = manifest.cache_names
        names = [value.name for value in session.get_outputs()]
        self._token_outputs = [name for name in names if name.startswith(HIDDEN_STATES)]
        shapes = [heads for heads in kv.heads.values() for _ in ("key", "value")]
        # Of one slot, for parts of the graph that no text has.
        self._unread = [
            ort.OrtValue.ortvalue_from_numpy(np.zeros((1, num, 1, size), kv.dtype), "cpu") for num, size in shapes
        ]
        self._convolutions = kv.convolutions
        self._unread_rows: dict[str, Any] = {}
        if rows := kv.convolutions:
            none = np.zeros((1, 1, rows.num_before + 1, rows.width), kv.dtype)
            self._unread_rows = {
                past: ort.OrtValue.ortvalue_from_numpy(none.copy(), "cpu") for past, _ in rows.names
            }
        self._buffers: list[Sequence[Any]] = [()] * num_parts  # that each part is bound to
        # The binding knows addresses: arrays live as long as they are bound, and a pass writes into them.
        self._bound: dict[str, Array] = {}
        self._num_slots, self._last_slots = np.ones(num_parts, np.int32), np.zeros(num_parts, np.int32)
        for number in range(num_parts):
            self._bind(part_name(joined_graph.NUM_SLOTS, number), self._num_slots[number : number + 1])
            self._bind(part_name(joined_graph.LAST_SLOT, number), self._last_slots[number : number + 1])

    def run(self, parts: Sequence[Part]) -> list[PassRows | Exception]:
        """The rows of each part; an error for one whose cache cannot grow.

        Raises EdgeSpecError: The pass has failed, for all parts.
        """
        refused: dict[int, Exception] = {}
        for i, part in enumerate(parts):
            try:
                with translate_memory_errors("making room for a pass"):
                    part.cache.prepare(part.num_past, len(part.tokens) + part.num_padded)
            except MemoryExhausted as error:
                refused[i] = error
        able = [part for i, part in enumerate(parts) if i not in refused]
        rows = iter(self._run(able) if able else [])
        return [refused[i] if i in refused else next(rows) for i in range(len(parts))]

    def _run(self, parts: Sequence[Part]) -> list[PassRows]:
        ends = [*accumulate(len(part.tokens) for part in parts)]
        tokens = self._even(np.concatenate([part.tokens for part in parts]).astype(np.int64))
        self._bind_rows(parts, self._bind_caches(parts), ends, len(tokens))
        logit_rows = [
            row for part, end in zip(parts, ends, strict=True) for row in range(end - part.num_rows, end)
        ]
        logit_numbers = self._even(np.array(logit_rows, np.int64))
        self._bind(joined_graph.LOGIT_ROWS, logit_numbers)
        names = self._manifest.signature
        self._bind(names.input_ids, tokens[None])
        logits = self._bind_output(names.logits, len(logit_numbers), self._manifest.vocab_size)
        widths = {name: width for part in parts for name, width in part.token_widths.items()}
        for name in self._token_outputs:  # the binding still has the buffer of the pass before
            self._binding.bind_output(name, "cpu")
        token_rows = {name: self._bind_output(name, len(tokens), width) for name, width in widths.items()}
        with translate_errors("running a pass of several texts"):
            self._session.run_with_iobinding(self._binding, self._options)
        last_rows = accumulate(part.num_rows for part in parts)
        return [
            PassRows(
                logits[last - part.num_rows : last],
                {name: token_rows[name][end - len(part.tokens) : end] for name in part.token_widths},
            )
            for part, end, last in zip(parts, ends, last_rows, strict=True)
        ]

    def _even(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Numbers of rows or tokens with a zero behind them where rows to the bit need an even number of rows."""
        return np.append(numbers, 0) if self._is_exact and len(numbers) % 2 else numbers

    def _bind_caches(self, parts: Sequence[Part]) -> list[int]:
        """Bind each part's cache to the part of the graph that has it already, or else to any; returns which."""
        buffers = [part.cache.buffers for part in parts]
        held = {id(each): number for number, each in enumerate(self._buffers)}
        numbers = [held.get(id(each)) for each in buffers]
        free = [number for number in range(self.num_parts) if number not in numbers]
        found = [number if number is not None else free.pop(0) for number in numbers]
        for number in range(self.num_parts):
            self._bind_buffers(number, buffers[found.index(number)] if number in found else self._unread)
        return found

    def unbind(self) -> None:
        """Hold no cache."""
        for number in range(self.num_parts):
            self._bind_buffers(number, self._unread)

    def _bind_buffers(self, number: int, buffers: Sequence[Any]) -> None:
        if self._buffers[number] is buffers:
            return
        self._buffers[number] = ()  # until all are bound
        for (past, present), value in zip(self._caches, buffers, strict=True):
            self._binding.bind_ortvalue_input(part_name(past, number), value)
            self._binding.bind_ortvalue_output(part_name(present, number), value)
        self._buffers[number] = buffers

    def _bind_rows(
        self, parts: Sequence[Part], numbers: Sequence[int], ends: Sequence[int], num_tokens: int
    ) -> None:
        """Tell the graph which rows each part of it attends with, and where each row comes to lie by that."""
        used = dict(zip(numbers, zip(parts, ends, strict=True), strict=True))
        attending, sizes, order = list[int](), list[int](), [0] * num_tokens
        convolved, num_before = [0] * num_tokens, self._convolutions.num_before if self._convolutions else 0
        for number in range(self.num_parts):
            num_past, rows = 0, [0]
            if number in used:
                part, stop = used[number]
                start, num_past = stop - len(part.tokens), part.num_past
                rows = [*range(start, stop), *[stop - 1] * part.num_padded]
                order[start:stop] = range(len(attending), len(attending) + stop - start)
                first = len(attending) + number * num_before
                convolved[start:stop] = range(first, first + stop - start)
            if self._convolutions:
                held = used[number][0].cache.rows if number in used else self._unread_rows
                bind_rows(self._binding, self._convolutions, held, num_past, len(rows), f".{number}")
            attending += rows
            sizes.append(len(rows))
            self._num_slots[number] = num_past + len(rows)
        np.subtract(self._num_slots, 1, out=self._last_slots)
        self._bind(joined_graph.ATTENDING, np.array(attending, np.int64))
        self._bind(joined_graph.SIZES, np.array(sizes, np.int64))
        self._bind(joined_graph.ORDER, np.array(order, np.int64))
        if self._convolutions:
            self._bind(joined_graph.CONVOLVED_ORDER, np.array(convolved, np.int64))

    def _bind(self, name: str, array: Array) -> None:
        # An interrupt between these lines leaves the address of freed memory, which the next pass binds anew.
        self._bound[name] = array
        self._binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def _bind_output(self, name: str, num_rows: int, width: int) -> npt.NDArray[np.float32]:
        """Returns a new array, which the pass fills: each text reads its rows when it comes to it."""
        array = np.empty((1, num_rows, width), np.float32)
        self._binding.bind_output(name, "cpu", 0, np.float32, array.shape, array.ctypes.data)
        rows: npt.NDArray[np.float32] = array[0]
        return rows


class JoinedPasses:
    """A joined session that is opened, in a thread of its own, once several texts ask for passes.

    Parts without a text cost a row of attention each. So the first session has few, and where more texts come one
    of more parts takes its place. Until a session is open, and where there is no memory for it or it does not do
    what it should, passes take turns. A program that ends meanwhile ends the opening first: Python stops daemon
    threads within ONNX Runtime by an abort.
    """

    def __init__(
        self, most_parts: int, open_session: Callable[[int, Cancel], JoinedSession], may_open: Room
    ) -> None:
        """Open nothing yet.

        Args:
            open_session: Opens a session of so many parts and checks it, until it is cancelled; raises
                EdgeSpecError where it is not to be used.
            may_open: Whether there is memory for it.
        """
        self._most_parts = most_parts
        self._open_session: Callable[[int, Cancel], JoinedSession] | None = open_session  # None: no further one
        self._may_open = may_open
        self._session: JoinedSession | None = None
        self._thread: Thread | None = None

    @property
    def max_parts(self) -> int:
        """How many passes can run as one now."""
        return 0 if self._session is None else self._session.num_parts

    def is_ready(self, num_texts: int) -> bool:
        """True if passes can run as one; a session for so many texts is opened if there is none."""
        is_opening = self._thread is not None and self._thread.is_alive()
        if self.max_parts < min(num_texts, self._most_parts) and self._open_session is not None and not is_opening:
            num_parts = _FEW_PARTS
            while num_parts < num_texts:
                num_parts *= 2
            cancel = Cancel()
            arguments = self._open_session, min(num_parts, self._most_parts), cancel
            thread = Thread(target=self._open, args=arguments, name="edgespec joining", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                self._open_session = None
                self._say(f"no thread can be started ({error})")
            else:
                self._thread = thread
                weakref.finalize(self, _end_opening, thread, cancel)
        return self._session is not None

    def wait(self) -> bool:
        """Wait until it is known whether passes of as many texts as there may be can be joined."""
        for _ in range(2):  # a session of fewer parts may be being opened
            self.is_ready(self._most_parts)
            if self._thread is not None:
                self._thread.join()
        return self._session is not None

    def run(self, parts: Sequence[Part]) -> Sequence[PassRows | Exception]:
        assert self._session is not None
        return self._session.run(parts)

    def let_go(self, *, is_whole: bool) -> bool:
        if self._session is None:
            return False
        if is_whole:
            self._session = self._open_session = None
            self._say("memory was short")
        else:
            self._session.unbind()
        return True

    def _open(self, open_session: Callable[[int, Cancel], JoinedSession], num_parts: int, cancel: Cancel) -> None:
        may_grow = False
        try:
            with self._may_open() as has_room:
                if has_room:
                    self._session = open_session(num_parts, cancel)
                    return_freed()  # what the one before had
            may_grow = has_room and num_parts < self._most_parts
            if not has_room:
                self._say("there is no memory for passes of several answers")
        except (EdgeSpecError, OSError) as error:  # its files are gone, or too many are open
            self._say(str(error))
        finally:
            if not may_grow:
                self._open_session = None

    def _say(self, reason: str) -> None:
        outcome = f"at most {self.max_parts} answers share a pass" if self.max_parts else "answers take turns"
        _log.info("%s: %s", outcome, reason)


def _end_opening(thread: Thread, cancel: Cancel) -> None:
    cancel.set()
    if thread is not current_thread():
        thread.join()


# Two texts by the numbers of their tokens: the first goes on with a token where the second begins.
_COMPARED = (6, 8)


def open_joined(
    graph: Path,
    manifest: Manifest,
    device: Device,
    options: SessionOptions,
    alone: Passes,
    num_parts: int,
    cancel: Cancel,
) -> JoinedSession:
    """A session for passes of several texts, whose rows were compared with those of passes alone.

    Raises EdgeSpecError: It was cancelled, the graph cannot be taken apart, the session does not fit, or its rows
    are wrong.
    """
    own: SessionOptions = {**options, "cancel": cancel}
    with translate_memory_errors("making room for passes of several texts"):
        content = join_graph(graph, manifest.signature, manifest.kv_cache, num_parts)
        session = load_graph(graph, device, content, **own)
        is_exact = options.get("deterministic", False)
        joined = JoinedSession(session, manifest, num_parts, is_exact=is_exact)
        _compare(joined, alone, manifest, is_exact=is_exact)
    return joined


def _compare(joined: JoinedSession, alone: Passes, manifest: Manifest, *, is_exact: bool) -> None:
    """Raises EdgeSpecError: A pass of two texts gives other rows than a pass of each."""
    tokens = probe_tokens(manifest.vocab_size, manifest.context_length)
    if len(tokens) < sum(_COMPARED) + 2:
        raise EdgeSpecError("the context is too short to compare passes of several texts")
    first, second, num_padded = tokens[: _COMPARED[0] + 1], tokens[-_COMPARED[1] :], int(is_exact)
    caches = [alone.fork(), alone.fork()]
    alone.run(first[:-1], 0, 2)
    wanted = alone.run(first[-1:], len(first) - 1, 1, num_padded=num_padded).copy(), alone.run(second, 0, 2).copy()
    caches[0].run(first[:-1], 0, 2)
    parts = [caches[0].part(first[-1:], len(first) - 1, 1, num_padded), caches[1].part(second, 0, 2)]
    for made, rows in zip(joined.run([part for part in parts if part]), wanted, strict=True):
        if isinstance(made, Exception):
            raise made
        is_right = np.array_equal(made.logits, rows) if is_exact else are_close(made.logits, rows)
        if not is_right:
            raise EdgeSpecError("passes of several answers give other logits than passes of one")
