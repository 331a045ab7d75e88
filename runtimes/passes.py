"""Passes of one graph on ONNX Runtime: a session and its KV cache. Knows slots of the cache, not their tokens."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from functools import partial
from pathlib import Path
from threading import local
from typing import NamedTuple, TypeVar, Unpack

import numpy as np

from edgespec.decoding.decoder import Room
from edgespec.decoding.pass_queue import MAX_SHARED_ROWS, Caller, PassQueue
from edgespec.errors import Cancelled
from edgespec.manifest import Manifest
from edgespec.runtimes import cuda
from edgespec.runtimes.attention_bias import TreeLayout, attention_bias
from edgespec.runtimes.cuda_graph import RecordedPass, find_graphs
from edgespec.runtimes.device_rows import END_ROW, FIRST_ROW
from edgespec.runtimes.devices import Device, import_onnxruntime
from edgespec.runtimes.kv_caches import BoundCache, SharedCache, make_cache
from edgespec.runtimes.pass_shapes import NO_RULE, row_rule
from edgespec.runtimes.session import (
    HIDDEN_STATES,
    SessionOptions,
    ends_with,
    new_run_options,
    open_session,
    translate_errors,
    translate_memory_errors,
)
from edgespec.system.cancel import Cancel
from edgespec.system.context_managers import contextmanager
from edgespec.system.system_info import read_l2_bytes
from edgespec.types import Array, Logits, TokenIds

_HALF = "tensor(float16)"
_NUM_LOGITS = "num_logits"  # the name of a dimension of outputs: tokens that get logits, and not all
Made = TypeVar("Made")


class Part(NamedTuple):
    """A pass of one text: tokens after the first num_past slots of its cache, the last num_rows with logits.

    num_padded: Tokens behind them that mean nothing, which a pass of its own would run to be of even width.
    token_widths: Outputs with a row for each token that the text wants, and how many numbers a row has.
    """

    cache: SharedCache
    tokens: TokenIds
    num_past: int
    num_rows: int
    num_padded: int
    token_widths: Mapping[str, int]


class PassRows(NamedTuple):
    """The rows that a pass gives a text.

    logits: [num_rows, vocab_size].
    token_rows: By output, [num_tokens, width].
    """

    logits: Logits
    token_rows: Mapping[str, Logits]


class Passes:
    """A graph with its cache, run by one thread at a time."""

    def __init__(
        self,
        graph: Path,
        manifest: Manifest,
        device: Device,
        token_outputs: Sequence[str] = (),
        **options: Unpack[SessionOptions],
    ) -> None:
        """Load the graph; raises as open_session does.

        Args:
            token_outputs: Outputs with a row for each token of a pass, [1, num_tokens, width], float32, which each
                pass copies to the host; those of options' hidden_layers by default.
        """
        self._manifest, self._device = manifest, device
        self._names = manifest.signature
        self.rule = NO_RULE
        if options.get("deterministic") and device.memory == "cpu":
            self.rule = row_rule(manifest.kv_cache.head_dims, read_l2_bytes())
            options = {**options, "has_flash_attention": self.rule.has_flash_attention}
        self._session, taken, given = open_session(graph, manifest, device, **options)
        biases = ((self._names.attention_bias, None), (self._names.local_attention_bias, manifest.sliding_window))
        # How many tokens back a token sees, None for all, by the attention biases that the graph takes.
        self._windows = {name: window for name, window in biases if name and name in taken}
        self._chooses_rows = FIRST_ROW in taken
        self._outputs = {self._names.logits: manifest.vocab_size}  # how many numbers a row of each has
        if self._names.best:
            self._outputs[self._names.best] = 2
        self._types = {name: np.float16 if given[name].type == _HALF else np.float32 for name in self._outputs}
        token_outputs = token_outputs or [f"{HIDDEN_STATES}{layer}" for layer in options.get("hidden_layers", ())]
        self._token_widths = {name: int(given[name].shape[2]) for name in token_outputs}
        self._of_rows = {name for name in token_outputs if given[name].shape[1] == _NUM_LOGITS}
        self._memory = device.memory, device.memory_index
        self._has_arena = device.provider == cuda.PROVIDER
        self._passing = cuda.GATE if self._has_arena else nullcontext()
        self._ort = import_onnxruntime()
        self._is_exact = options.get("deterministic", False)
        self.graphs = find_graphs(self._session, device, is_exact=self._is_exact) if self._has_arena else None
        self._opened_as = graph, manifest, device, options
        self.queue: PassQueue[Part, PassRows] | None = None  # of all forks, once there are any
        self._start()

    def _start(self) -> None:
        """Hold nothing, and nothing of another fork."""
        self._binding = self._session.io_binding()
        self.cache: BoundCache = make_cache(self._ort, self._session, self._binding, self._manifest, self._device)
        self._recorded: tuple[RecordedPass, ...] = ()  # with all rows, and with the first one alone
        if self.graphs:
            outputs = {name: (width, self._types[name]) for name, width in self._outputs.items()}
            outputs |= {name: (width, np.float32) for name, width in self._token_widths.items()}
            assert isinstance(self.cache, SharedCache)
            record = partial(RecordedPass, self.graphs, self._names, outputs)
            self._recorded = record(is_single=False), record(is_single=True)
            self.cache.before_change = partial(_drop, self._recorded)
        # Inputs other than the caches live here until their run is over, for the binding knows only addresses.
        self._bound: dict[str, Array] = {}
        self._ones = np.ones((1, 0), np.int64)
        self.token_rows: Mapping[str, Logits] = {}  # of the last pass, by output, [num_tokens, width]
        self.wants_token_rows = True  # otherwise passes leave them where they are made
        self._own = local()
        self._options = new_run_options()  # for the runs that go on, or the last one
        self._shrinks = False  # whether these give memory back
        self._cancel = Cancel()
        self.caller = Caller()  # for whom passes are run

    def fork(self) -> "Passes":
        """Passes of the graph over a cache of their own, without token outputs."""
        fork = copy(self)
        fork._token_widths = {}
        fork._start()
        return fork

    def exchange(self, other: "Passes") -> None:
        """Exchange caches with a fork, each with the binding that it is bound to."""
        self.cache, other.cache = other.cache, self.cache
        self._binding, other._binding = other._binding, self._binding
        self._bound, other._bound = other._bound, self._bound
        self._recorded, other._recorded = other._recorded, self._recorded

    def share(self, max_callers: int, may_join: Room) -> None:
        """Let passes of this and of its forks take turns, or run as one where the graph can be taken apart.

        Args:
            max_callers: How many forks run passes at once.
            may_join: Keeps memory for another session.
        """
        if self.queue is not None:
            return
        can_join = self._device.memory == "cpu" and isinstance(self.cache, SharedCache) and max_callers > 1
        can_join &= self._manifest.kv_cache.recurrence is None  # whose states differ between texts
        if not can_join:
            self.queue = PassQueue(None)
            return
        from edgespec.runtimes.joined import JoinedPasses, open_joined  # 10 ms, for several answers at once

        # A pass of its own compares what both sessions give; it must not hold these, nor be queued.
        open_session = partial(open_joined, *self._opened_as, self.fork())
        self.queue = PassQueue(JoinedPasses(max_callers, open_session, may_join))

    @property
    def max_tokens(self) -> int | None:
        """How many tokens a pass may run as long as others wait for theirs; None where none do."""
        return MAX_SHARED_ROWS if self.queue is not None and self.queue.is_shared(self.caller) else None

    def run(
        self,
        tokens: TokenIds,
        num_past: int,
        num_rows: int,
        layout: TreeLayout | None = None,
        output: str | None = None,
        inputs: Mapping[str, Array] | None = None,
        num_padded: int = 0,
        num_given: int = 0,
    ) -> Logits:
        """Run tokens after the first num_past slots; returns logits of the last num_rows, [num_rows, vocab_size].

        Args:
            num_padded: Run so many tokens more that mean nothing; the slots behind tokens hold garbage then.
            num_given: Have the graph give at least so many rows, those of the padding among them.
            output: Return rows of another of the graph's outputs, [num_rows, …]; no other is copied to the host
                but the token outputs.
            inputs: More inputs of the graph, by name, [1, num_tokens, width].

        Raises:
            Cancelled: The loading in which passes are tried was cancelled.
            MemoryExhausted: The cache or the workspace does not fit.
        """
        self._cancel.require_unset()  # begin() may have forgotten the interrupt
        output, num_given = output or self._names.logits, num_given or num_rows + num_padded
        asked = _Run(tokens, num_past, num_rows, layout, output, inputs, num_padded, num_given)
        alone = partial(self._within, partial(self._run_alone, asked))
        if self.queue is None:
            made = alone()
        else:
            is_plain = layout is None and inputs is None and output == self._names.logits
            part = self.part(tokens, num_past, num_rows, num_padded) if is_plain else None
            # A pass of several texts goes on when one of them ends, and a prompt takes many passes.
            self._require_uninterrupted()
            made = self.queue.run(self.caller, len(tokens), alone, part)
            self._require_uninterrupted()
        self.token_rows = made.token_rows
        return made.logits

    def part(self, tokens: TokenIds, num_past: int, num_rows: int, num_padded: int = 0) -> Part | None:
        """The pass as one of several that run as one; None where it cannot be."""
        if not isinstance(self.cache, SharedCache):
            return None
        return Part(self.cache, tokens, num_past, num_rows, num_padded, self._wanted_widths)

    @property
    def is_recording(self) -> bool:
        return self.graphs is not None and self.graphs.width > 0

    def wait_for_openings(self) -> None:
        """Wait until no other model is being opened on a GPU of NVIDIA's, beside which no pass is recorded.

        Raises Cancelled: The loading in which passes are tried was cancelled.
        """
        cuda.GATE.wait_for_openings(self._cancel)

    def _within(self, act: Callable[[], Made]) -> Made:
        """Do something in the thread that runs the session's passes."""
        return self.graphs.run(act) if self.graphs else act()

    def _change_cache(self, act: Callable[[], None]) -> None:
        """Take memory for the cache, or give it back."""

        def change() -> None:
            with self._passing:
                act()

        self._within(change)

    def _run_alone(self, asked: "_Run") -> PassRows:
        if not self.cache.has_room(asked.num_past + asked.width):
            with translate_memory_errors("making room for a pass"), self._passing:
                self.cache.prepare(asked.num_past, asked.width)
        gives_all = self.graphs and asked.width == self.graphs.width == asked.num_given
        is_chain = asked.layout is None and not asked.inputs
        if self._recorded and gives_all and asked.num_past and is_chain and not self._shrinks:
            made = self._run_recorded(asked)
            if made:
                return made
        return self._run_plain(asked)

    def _run_recorded(self, asked: "_Run") -> PassRows | None:
        """None where the pass has to run plain: memory is to be given back first, or recording failed."""
        assert isinstance(self.cache, SharedCache)
        if self.cache.has_freed:
            return None
        self._require_uninterrupted()
        num_tokens = len(asked.tokens)
        all_logits = asked._replace(num_rows=num_tokens, output=self._names.logits)
        with translate_errors("running a pass"):
            padded, fetched = _pad(asked.tokens, asked.num_padded), (asked.output, *self._wanted_widths)
            is_single = num_tokens == 1 and asked.output == self._names.logits
            found = self._recorded[is_single].run(
                self.cache,
                padded,
                asked.num_past,
                fetched,
                lambda: self._run_plain(all_logits).logits,
                self.caller.on_begin,
            )
        if found is None:
            return None
        rows = found[asked.output][num_tokens - asked.num_rows : num_tokens]
        states = {name: found[name][:num_tokens] for name in self._wanted_widths}
        return PassRows(rows.astype(np.float32, copy=False), states)

    def _run_plain(self, asked: "_Run") -> PassRows:
        tokens, num_past, num_rows, layout, output, inputs, num_padded, num_given = asked
        num_tokens, num_run = len(tokens), asked.width
        if self._is_exact and num_given < num_run:
            num_given += num_given % 2  # a single row of logits has a kernel of its own
        if not self._names.num_logits_to_keep:
            num_given = num_run
        with translate_memory_errors("making room for a pass"):
            padded_layout = layout and layout.padded(num_padded)
            self._bind_tokens(_pad(tokens, num_padded), num_past, padded_layout)
            for name, array in (inputs or {}).items():
                self._bind_input(name, _pad(array[0], num_padded)[None])
            wanted = self._wanted_widths
            nums = {name: num_given if name in self._of_rows else num_run for name in wanted}
            token_rows = {name: self._bind_new(name, nums[name], width) for name, width in wanted.items()}
            for name in self._token_widths.keys() - wanted.keys():
                self._binding.bind_output(name, *self._memory)
            stop = max(num_rows, num_given - num_padded)
            fetched = self._bind_outputs(output, num_given, stop - num_rows, stop)
        if self.graphs and self._shrinks:
            self.graphs.age += 1
        with translate_errors("running a pass"), self._passing:
            self.caller.on_begin()
            self._session.run_with_iobinding(self._binding, self._options)
        self.cache.collect()
        # The buffer is that of the thread, which another caller may share.
        rows: Logits = fetched.astype(np.float32, copy=self.graphs is not None)
        kept = {name: slice(stop - num_rows, stop) for name in self._of_rows}
        states = {name: made[kept.get(name, slice(num_tokens))] for name, made in token_rows.items()}
        return PassRows(rows, states)

    @contextmanager
    def cancelled_by(self, cancel: Cancel) -> Iterator[None]:
        """Within the block run passes only until `cancel` is set; raises Cancelled then."""
        self._cancel = cancel
        try:
            with ends_with(cancel, self.interrupt):
                yield
        finally:
            self._cancel = Cancel()

    def begin(self) -> None:
        """Forget an interrupt of earlier runs."""
        options = new_run_options()
        self._shrinks = False
        if self._has_arena and isinstance(self.cache, SharedCache) and self.cache.has_freed:
            # At the end of the next pass the arena gives back what nobody uses.
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", f"gpu:{self._memory[1]}")
            self.cache.has_freed = False
            self._shrinks = True
        self._options = options

    def reserve(self, num_past: int, num_tokens: int) -> None:
        """Make room for a text of num_tokens at once, where growing chunk by chunk copies what a device holds.

        The first num_past positions are kept.

        Raises MemoryExhausted: The cache does not fit.
        """
        if self._has_arena:
            self._change_cache(partial(self.cache.prepare, num_past, num_tokens - num_past))

    def let_go(self, *, is_whole: bool) -> bool:
        return self.queue is not None and self.queue.let_go(is_whole=is_whole)

    def pretend(self, num_positions: int) -> None:
        """Hold zeros, as the cache's own does."""
        self._change_cache(partial(self.cache.pretend, num_positions))

    def forget(self) -> None:
        """Hold nothing, and free the cache's memory."""
        self._change_cache(self.cache.clear)

    def interrupt(self) -> None:
        """From another thread: end this run and the next ones until begin(); they raise errors.

        A pass that has others in it goes on, for theirs.
        """
        self._options.terminate = True
        if self.queue is not None:
            self.queue.drop(self.caller)

    def _require_uninterrupted(self) -> None:
        if self._options.terminate:
            raise Cancelled("the pass was cancelled")

    def _bind_tokens(self, tokens: TokenIds, num_past: int, layout: TreeLayout | None) -> None:
        total = num_past + len(tokens)
        self._bind_input(self._names.input_ids, tokens[None].astype(np.int64))
        if self._names.attention_mask:
            if total > self._ones.shape[1]:
                self._ones = np.ones((1, min(2 * total, self._manifest.context_length)), np.int64)
            self._bind_input(self._names.attention_mask, self._ones[:, :total])
        if not (self._names.position_ids or self._windows):
            return
        slots = np.arange(total)
        if layout is not None:
            slots[-len(layout.positions) :] = layout.positions
        if self._names.position_ids:
            self._bind_input(self._names.position_ids, slots[None, num_past:])
        for name, window in self._windows.items():
            self._bind_input(name, attention_bias(slots, len(tokens), layout, window))

    def _bind_outputs(self, fetched: str, num_given: int, first: int, end: int) -> Array:
        """Have the graph give num_given rows; returns a buffer for those from the first to the end, [num_rows, …].

        It is the calling thread's, so that other threads do not overwrite it.
        """
        if self._names.num_logits_to_keep:
            self._bind_input(self._names.num_logits_to_keep, np.array([num_given], np.int64))
        if self._chooses_rows:
            self._bind_input(FIRST_ROW, np.array([first], np.int64))
            self._bind_input(END_ROW, np.array([end], np.int64))
            num_given, first, end = end - first, 0, end - first
        for name in self._outputs.keys() - {fetched}:  # stays where it is made
            self._binding.bind_output(name, *self._memory)
        held: dict[str, Array] = self._own.__dict__.setdefault("held", {})
        shape, kind = (1, num_given, self._outputs[fetched]), self._types[fetched]
        if fetched not in held or held[fetched].shape != shape:
            held[fetched] = np.empty(shape, kind)
        self._binding.bind_output(fetched, "cpu", 0, kind, shape, held[fetched].ctypes.data)
        return held[fetched][0, first:end]

    def _bind_new(self, name: str, num_rows: int, width: int) -> Logits:
        """Returns a new array for an output, [1, num_rows, width], which the pass fills."""
        array = np.empty((num_rows, width), np.float32)
        self._binding.bind_output(name, "cpu", 0, np.float32, (1, num_rows, width), array.ctypes.data)
        return array

    @property
    def _wanted_widths(self) -> Mapping[str, int]:
        return self._token_widths if self.wants_token_rows else {}

    @property
    def token_widths(self) -> Sequence[int]:
        """How many numbers a row of each token output has."""
        return [*self._token_widths.values()]

    def _bind_input(self, name: str, array: Array) -> None:
        # Bound again for each pass: an interrupt between these lines leaves the address of freed memory.
        self._bound[name] = array
        self._binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


class _Run(NamedTuple):
    """One run of the graph, as Passes.run is asked for it."""

    tokens: TokenIds
    num_past: int
    num_rows: int
    layout: TreeLayout | None
    output: str
    inputs: Mapping[str, Array] | None
    num_padded: int
    num_given: int

    @property
    def width(self) -> int:
        """How many tokens it runs, those of the padding among them."""
        return len(self.tokens) + self.num_padded


def _drop(recorded: Sequence[RecordedPass]) -> None:
    for each in recorded:
        each.drop()


def _pad(rows: Array, num_padded: int) -> Array:
    """Rows with num_padded of zeros behind them."""
    return np.concatenate([rows, np.zeros((num_padded, *rows.shape[1:]), rows.dtype)]) if num_padded else rows
