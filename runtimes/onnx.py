"""A decoder on ONNX Runtime: one session, one KV cache, one thread at a time.

The cache is a memo of the tokens that were run: a call keeps their longest common prefix and runs the rest.
"""

import logging
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any, Self, Unpack

import numpy as np
import numpy.typing as npt

from edgespec.decoding.decoder import (
    BEST,
    EVEN_WIDTHS,
    Cache,
    Can,
    Decoder,
    Forks,
    Pass,
    Room,
    Rows,
    reusable_prefix,
)
from edgespec.decoding.hidden_states import HiddenStates
from edgespec.decoding.pass_queue import Caller
from edgespec.errors import Cancelled, ContextOverflow, EdgeSpecError, MemoryExhausted, require_context
from edgespec.manifest import Manifest
from edgespec.runtimes.cuda_graph import is_as_plain
from edgespec.runtimes.device_checks import (
    DeviceCheck,
    DeviceChecks,
    find_sound_passes,
    is_argmax_sound,
    is_same_row,
    probe_tokens,
    report_slow_check,
    row_sample,
)
from edgespec.runtimes.device_rows import to_argmax
from edgespec.runtimes.devices import Device
from edgespec.runtimes.kv_caches import SharedCache
from edgespec.runtimes.pass_shapes import PaddedPass, PassShapes, choose_same_shapes, choose_shapes, same_cost
from edgespec.runtimes.passes import Passes
from edgespec.runtimes.recurrent_states import RecurrentStates
from edgespec.runtimes.row_proofs import next_pass, prefix_key
from edgespec.runtimes.session import SessionOptions, refuse_device, translate_memory_errors
from edgespec.system.cancel import Cancel
from edgespec.types import Logits, TokenIds

# Long prompts run in chunks, which bounds the workspace; a chunk this wide runs at the full rate.
_CHUNK_TOKENS = 256
# A prompt's chunk that finds no memory is halved down to this; where a narrower one fails, the scheduler gives up.
_LEAST_CHUNK_TOKENS = 16
_REPEATS = 4  # of a pass that is timed
_LONG_CACHE = 2048  # tokens
_RECORDING_PASSES = 4  # after so many the cache has grown, the pass was recorded, and it was replayed twice
_log = logging.getLogger(__name__)


class OnnxDecoder(Decoder, Cache, Forks):
    """The model of a folder, as a function from tokens to logits; MemoryExhausted where a pass does not fit.

    In deterministic mode a row is equal to the bit however tokens are cut into passes: on the CPU provider they
    keep to the rule in row_proofs.py, elsewhere to the widths in pass_shapes.py. It is proved on the machine.
    """

    num_fed = 0

    def __init__(
        self, folder: Path, manifest: Manifest, device: Device, **options: Unpack[SessionOptions]
    ) -> None:
        """Load the graph, and check that the device computes it; until then options' cancel ends it within a pass.

        Raises as open_session does, and DeviceUnavailable where a device computes wrongly.
        """
        self.vocab_size, self.context_length = manifest.vocab_size, manifest.context_length
        self._deterministic = options.get("deterministic", False)
        self._logits_name, self._best_name = manifest.signature.logits, manifest.signature.best
        layers = options.get("hidden_layers", ())
        checks = None if device.memory == "cpu" else DeviceChecks(folder, manifest, device)
        if (
            checks
            and device.records_passes
            and (known := checks.read())
            and known.replays[self._deterministic] is False
        ):
            _log.info("'%s' replays no passes (CUDA graphs), as an earlier check has found", device.name)
            device = replace(device, records_passes=False)
        self._passes = Passes(folder / manifest.graph, manifest, device, **options)
        self._hidden = HiddenStates(layers, self._passes.token_widths[0]) if layers else None
        self._held = np.zeros(0, np.int32)
        self._num_read = 0  # held tokens that passes of their own width have read (pass_shapes.py)
        self._lock = Lock()
        self._chunk_tokens = _CHUNK_TOKENS
        self._shapes: PassShapes | None = None  # where passes are padded to few widths
        # Where rows are the host's already numpy chooses: 15 µs a row of 151,936, the graph on the CPU 150.
        self._has_argmax = False
        self._is_on_host = device.memory == "cpu"
        self._find_key = partial(
            prefix_key, manifest, device, options.get("num_threads"), deterministic=self._deterministic
        )
        if checks:
            with self.cancelled_by(options.get("cancel") or Cancel()), report_slow_check(device.name):
                self._check(device, checks)
        if self._passes.graphs and not self._passes.graphs.width:  # whose session may not be sound any more
            del self._passes
            device = replace(device, records_passes=False)
            self._passes = Passes(folder / manifest.graph, manifest, device, **options)
            self._run_shapes()

    def share(self, max_callers: int, may_join: Room) -> None:
        self._passes.share(max_callers, may_join)

    def let_go(self, *, is_whole: bool) -> bool:
        return self._passes.let_go(is_whole=is_whole)

    def fork(self) -> Self:
        """A decoder over the same weights with an empty cache of its own, which keeps no hidden states."""
        fork = copy(self)
        fork._passes = self._passes.fork()
        fork._held, fork._num_read, fork.num_fed = np.zeros(0, np.int32), 0, 0
        fork._hidden = None
        fork._lock = Lock()
        return fork

    def serve(self, caller: Caller) -> None:
        self._passes.caller = caller

    @property
    def _host_cache(self) -> SharedCache | None:
        """The cache, if its buffers are the host's and have all that a text leaves: no recurrent states."""
        cache = self._passes.cache
        return cache if self._is_on_host and isinstance(cache, SharedCache) and not cache.states else None

    def copy_prefix(self, other: Self, tokens: TokenIds) -> bool:
        own, theirs = self._host_cache, other._host_cache
        if own is None or theirs is None or self._hidden:
            return False
        with self._lock, translate_memory_errors("making room for a text"):
            self._hold(tokens[:0])
            own.copy_from(theirs, len(tokens))
            self._hold(tokens)
        return True

    @property
    def prefix_key(self) -> str | None:
        return self._find_key() if self._host_cache and not self._hidden else None

    def read_prefix(self) -> tuple[TokenIds, npt.NDArray[Any]]:
        assert self._host_cache
        with self._lock:
            return self._held, self._host_cache.read(len(self._held))

    def fill_prefix(self, tokens: TokenIds, values: npt.NDArray[Any]) -> None:
        assert self._host_cache
        with self._lock, translate_memory_errors("making room for a text"):
            self._hold(tokens[:0])
            self._host_cache.fill(values)
            self._hold(tokens)

    @property
    def can_exchange(self) -> bool:
        return self._hidden is None  # which belong to the cache of this decoder

    def exchange(self, other: Self) -> None:
        assert self.can_exchange
        with self._lock, other._lock:
            self._passes.exchange(other._passes)
            self._held, other._held = other._held, self._held
            self._num_read, other._num_read = other._num_read, self._num_read

    @property
    def hidden_states(self) -> HiddenStates | None:
        return self._hidden

    @property
    def can(self) -> Can:
        if self._shapes:
            return self._shapes.can()._replace(best=self._has_argmax)
        return Can(best=self._has_argmax, widths=EVEN_WIDTHS if self._deterministic else ())

    @property
    def cache(self) -> Cache:
        return self

    @property
    def forks(self) -> Forks:
        return self

    def run(self, given: Pass) -> Rows:
        tokens, num_rows = given.tokens, given.num_rows
        if len(tokens) > self.context_length:
            raise ContextOverflow(len(tokens), self.context_length)
        assert 1 <= num_rows <= len(tokens)
        with self._lock, translate_memory_errors("running a pass"):
            self._begin()
            if self._states:
                self._states.num_text = len(given.text)
            return self._made(given, self._rows(tokens, num_rows, self._output(given), given.num_prompt))

    def _begin(self) -> None:
        self._passes.begin()
        self._passes.wants_token_rows = self._hidden is not None and self._hidden.is_wanted

    def interrupt(self) -> None:
        self._passes.interrupt()

    def cancelled_by(self, cancel: Cancel) -> AbstractContextManager[None]:
        return self._passes.cancelled_by(cancel)

    def pretend(self, tokens: TokenIds) -> None:
        require_context(len(tokens), self.context_length)
        with self._lock, translate_memory_errors("making room for a text"):
            self._hold(tokens[:0])
            self._passes.pretend(len(tokens))
            if self._hidden:
                self._hidden.pretend(tokens)
            self._held = tokens

    def imitate(self, tokens: TokenIds, num_run: int, seed: int) -> bool:
        if (cache := self._host_cache) is None:
            return False
        with self._lock, translate_memory_errors("making room for a text"):
            assert np.array_equal(self._held[:num_run], tokens[:num_run])
            self._hold(tokens[:num_run])
            cache.imitate(num_run, len(tokens), seed)
            if self._hidden:
                self._hidden.pretend(tokens)
            self._held = tokens
        return True

    def reserve(self, num_tokens: int) -> None:
        if cache := self._host_cache:
            with self._lock, translate_memory_errors("making room for a text"):
                num_held = len(self._held)
                cache.prepare(num_held, max(0, min(num_tokens, self.context_length) - num_held))

    def forget(self) -> None:
        with self._lock:
            self._hold(self._held[:0])
            self._passes.forget()
            if self._hidden:
                self._hidden.clear()

    @property
    def max_pass_tokens(self) -> int:
        """How many tokens a pass may run."""
        return self._chunk_tokens

    @property
    def _states(self) -> RecurrentStates | None:
        """The states of recurrent layers; None of a model that has none."""
        cache = self._passes.cache
        return cache.states if isinstance(cache, SharedCache) else None

    @property
    def held_tokens(self) -> TokenIds:
        return self._held

    def _hold(self, tokens: TokenIds) -> None:
        """Count tokens as those whose keys, values and hidden states fill the first slots."""
        self._held, self._num_read = tokens, min(self._num_read, len(tokens))
        if self._hidden:
            self._hidden.hold(tokens)

    def _store(self, slot: int, num_rows: int) -> None:
        """Keep hidden states of the first num_rows tokens of the last pass; they lie in slots from `slot` on."""
        if self._hidden:
            rows = [each[:num_rows] for each in self._passes.token_rows.values()]
            if not rows:
                self._hidden.skip(slot + num_rows)
                return
            self._hidden.write(slot, rows[0] if len(rows) == 1 else np.concatenate(rows, axis=1))

    def _output(self, given: Pass) -> str:
        """The name of the graph's output that a pass wants."""
        return self._best_name if given.wants is BEST and self._best_name else self._logits_name

    def _made(self, given: Pass, rows: Logits) -> Rows:
        """The rows of an output, as those of a pass."""
        is_whole = self._output(given) == self._logits_name
        return Rows(rows) if is_whole else Rows(best=to_argmax(rows, self.vocab_size))

    def _start(self, tokens: TokenIds, num_last: int, num_read: int) -> int:
        """How many tokens need not be run, of which num_read are to be read in passes of their own width."""
        start = reusable_prefix(self._held, tokens, num_last)
        has_read = min(self._num_read, start)
        return start if has_read == num_read else min(has_read, num_read)

    def _rows(self, tokens: TokenIds, num_last: int, output: str, num_prompt: int = 0) -> Logits:
        num_tokens, shapes = len(tokens), self._shapes
        num_read = shapes.num_read(num_prompt, num_tokens - num_last, self.context_length) if shapes else 0
        start = self._start(tokens, num_last, num_read)
        start = self._states.reachable(start) if self._states else start  # that a pass can go on after
        rows: list[Logits] = []
        chunk_tokens, room = self._chunk_tokens, self.context_length
        if num_tokens - start > chunk_tokens:
            self._hold(tokens[:start])
            self._passes.reserve(start, num_tokens)
        while start < num_tokens:
            most = min(chunk_tokens, self._passes.max_tokens or chunk_tokens)
            stop = min(start + most, num_tokens)
            padded = PaddedPass(start, stop)
            if shapes:
                padded = shapes.next_pass(start, num_tokens, num_last, room, most, num_read)
            elif self._deterministic:
                padded = next_pass(start, stop, self._passes.rule.borders, self.context_length)
            first, stop, num_padded, num_given = padded
            if first < start and self._states:
                first = self._states.reachable_evenly(first, stop + num_padded)
            self._hold(tokens[:start])
            wanted = max(0, stop - max(start, num_tokens - num_last))
            try:
                new, num_rows = tokens[first:stop], max(1, wanted)
                chunk = self._passes.run(
                    new, first, num_rows, output=output, num_padded=num_padded, num_given=num_given
                )
            except (MemoryError, MemoryExhausted):
                alike = (num_read if start >= num_read else 0) if num_read else -self.context_length
                if shapes and num_padded and stop < room and first - num_padded >= alike:
                    room = stop  # the tokens before run again in place of the padding
                    continue
                chunk_tokens = (stop - start) // 2
                is_least = shapes and (num_given > 1 or chunk_tokens < shapes.reads[0])
                if is_least or chunk_tokens < _LEAST_CHUNK_TOKENS:
                    raise
                continue
            self._store(first, stop - first)
            if start < num_read:
                self._num_read = stop
            self.num_fed += stop - start
            start, room = stop, self.context_length
            if wanted:
                rows.append(chunk if wanted == num_last else chunk.copy())
        self._hold(tokens)
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def _check(self, device: Device, checks: DeviceChecks) -> None:
        """Find out which passes the device computes correctly, or look up what an earlier check has found.

        Raises DeviceUnavailable: The device computes the model wrongly, or not at all.
        """
        with refuse_device(device):  # what a graph needs of an adapter shows only in its first pass
            first = self._fresh_rows(probe_tokens(self.vocab_size, 1), 0, 1)[0]
            found = checks.read()
            if found is None or not is_same_row(first, found.sample):
                found = self._compare_passes(device, row_sample(first), checks)
                checks.write(found)
        self._chunk_tokens, self._has_argmax = found.max_pass_tokens, found.has_argmax
        self._shapes = found.shapes[self._deterministic]
        self._run_shapes()
        if self._passes.graphs:
            mode = int(self._deterministic)
            while found.replays[mode] is None:
                self._passes.wait_for_openings()
                is_sound = self._shapes is not None and self._compare_replays(self._shapes)
                found = replace(
                    found, replays=(found.replays[0], is_sound) if mode else (is_sound, found.replays[1])
                )
                checks.write(found)
            if found.replays[mode] and self._shapes:
                self._record(self._shapes)
        self._hold(self._held[:0])
        self.num_fed = 0

    def _compare_passes(self, device: Device, sample: tuple[float, ...], checks: DeviceChecks) -> DeviceCheck:
        sound = find_sound_passes(
            self._fresh_rows, self.vocab_size, self.context_length, device.name, tolerance=checks.tolerance
        )
        if sound.max_width < _CHUNK_TOKENS and not sound.is_cut_short:
            _log.warning(
                "'%s' computes passes of more than %d tokens wrongly; longer ones are split",
                device.name,
                sound.max_width,
            )
        self._has_argmax = (
            self._best_name is not None
            and self._can_choose(device, sound.rows[:_LEAST_CHUNK_TOKENS])
            and checks.chooses_the_first()
        )
        seconds_of, widest = cache(self._seconds_of), min(sound.max_width, self.context_length // 2)
        fast = same = None
        if not device.is_software:
            fast, same = (
                choose_shapes(seconds_of, widest),
                choose_same_shapes(seconds_of, widest, self._reads_alike),
            )
        return DeviceCheck(
            max_pass_tokens=sound.max_width,
            num_compared=len(sound.rows),
            has_argmax=self._has_argmax,
            shapes=(fast, same),
            same_cost=same_cost(seconds_of, same, fast),
            sample=sample,
        )

    def _reads_alike(self, shapes: PassShapes) -> bool:
        """True if rows after a prompt have the same bits wherever the passes that read it begin."""
        tokens, self._shapes = probe_tokens(self.vocab_size, self.context_length), shapes
        num_rows = shapes.rows[0]
        num_prompt = len(tokens) - num_rows + 1
        found = []
        for cut in (0, num_prompt // 3, num_prompt // 2 + 1):
            self._hold(tokens[:0])
            if cut:
                self._rows(tokens[:cut], 1, self._logits_name, cut)
            found.append(self._rows(tokens, num_rows, self._logits_name, num_prompt).copy())
        return all(np.array_equal(rows, found[0]) for rows in found)

    def _run_shapes(self) -> None:
        """Run a pass of each width and number of rows, at the beginning and behind others."""
        for width, num_rows in self._shapes.all() if self._shapes else ():
            self._run_shape(width, num_rows, num_past=0)
            self._run_shape(width, num_rows, num_past=min(width, self.context_length - width))

    def _record(self, shapes: PassShapes) -> None:
        """Have passes of the narrowest width recorded, beginning with one of these."""
        width = shapes.rows[0]
        self._passes.begin()
        self._run_shape(width, width, num_past=0)
        self._passes.record(width)
        for _ in range(_RECORDING_PASSES):
            self._passes.begin()
            num_past = min(width, self.context_length - width)
            self._run_shape(width, width, num_past)
            # Sampling without a draft wants logits, of the first token alone.
            first = np.zeros(1, np.int32)
            self._passes.run(first, num_past, 1, num_padded=width - 1, num_given=width)

    def _compare_replays(self, shapes: PassShapes) -> bool | None:
        """True if replays give the rows of plain passes, at several lengths and after the cache has grown.

        In deterministic mode, to the bit, also in a cache of which most is empty: a recording knows the cache's
        length, and not that of the text. None where not all were made, as another model was being opened.
        """
        width, num_put_off = shapes.rows[0], self._passes.num_put_off
        tokens = probe_tokens(self.vocab_size, self.context_length)
        lengths = [num for num in (2 * width, 2 * width + 1, 5 * width, len(tokens)) if num <= len(tokens)]
        self._hold(tokens[:0])
        self._passes.record(0)
        expected = [self._rows(tokens[:length], width, self._logits_name).copy() for length in lengths]
        self._passes.forget()
        self._hold(tokens[:0])
        self._passes.record(width)
        for capacity in (0, min(_LONG_CACHE, self.context_length)) if self._deterministic else (0,):
            try:
                if capacity:
                    self._hold(tokens[:0])
                    self._passes.reserve(0, capacity)
                for length, rows in zip(lengths, expected, strict=True):
                    for _ in range(_RECORDING_PASSES):
                        self._passes.begin()
                        if not self._has_rows(tokens[:length], rows):
                            self._passes.stop_recording()
            except EdgeSpecError as error:
                if isinstance(error, Cancelled):
                    raise
                self._passes.stop_recording(str(error))
        if self._deterministic:
            self._passes.forget()
        is_whole = num_put_off == self._passes.num_put_off
        return self._passes.is_recording if is_whole or not self._passes.is_recording else None

    def _has_rows(self, tokens: TokenIds, expected: Logits) -> bool:
        """True if passes give the last rows of tokens, and choose the tokens that these say."""
        counts = len(expected), 1
        is_close = all(
            is_as_plain(self._rows(tokens, num, self._logits_name), expected[-num:], is_exact=self._deterministic)
            for num in counts
        )
        if not is_close or not self._has_argmax or not self._best_name:
            return is_close
        best = self._rows(tokens, len(expected), self._best_name)
        return is_argmax_sound(expected, to_argmax(best, self.vocab_size))

    def _seconds_of(self, width: int, num_rows: int) -> float:
        """The shortest of a few equal passes, in seconds, each after width tokens and with its kernels loaded."""
        self._run_shape(width, num_rows, num_past=0)
        taken_s = []
        for _ in range(_REPEATS):
            started_s = perf_counter()
            self._run_shape(width, num_rows, num_past=width)
            taken_s.append(perf_counter() - started_s)
        return min(taken_s)

    def _run_shape(self, width: int, num_rows: int, num_past: int) -> None:
        """Run a pass that means nothing after num_past slots, which the pass before has filled."""
        output = self._best_name if self._has_argmax and self._best_name else self._logits_name
        self._passes.run(np.zeros(width, np.int32), num_past, num_rows, output=output)

    def _fresh_rows(self, tokens: TokenIds, start: int, width: int) -> Logits:
        """Rows after all tokens but the first `start`, which the call before has run, in passes of a width."""
        self._hold(tokens[:start])
        self._chunk_tokens = width
        return self._rows(tokens, len(tokens) - start, self._logits_name).copy()

    def _can_choose(self, device: Device, rows: Logits) -> bool:
        """True if the device chooses the tokens of the rows of the first probe tokens."""
        assert self._best_name is not None
        tokens = probe_tokens(self.vocab_size, self.context_length)[: len(rows)]
        self._hold(tokens[:0])
        self._chunk_tokens = len(tokens)
        best = to_argmax(self._rows(tokens, len(tokens), self._best_name), self.vocab_size)
        if not is_argmax_sound(rows, best):
            _log.warning("'%s' chooses other tokens than its rows say; whole rows are copied from it", device.name)
            return False
        return True
