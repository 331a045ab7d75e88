"""A decoder on ONNX Runtime: one session, one KV cache, one thread at a time.

The cache is a memo of the tokens that were run: a call keeps their longest common prefix and runs the rest.
"""

import hashlib
import logging
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Self, Unpack

import numpy as np

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
from edgespec.errors import MemoryExhausted, require_context
from edgespec.manifest import Manifest
from edgespec.runtimes.device_checks import DeviceChecks, report_slow_check
from edgespec.runtimes.device_rows import to_argmax
from edgespec.runtimes.device_trial import DeviceTrial
from edgespec.runtimes.devices import Device, kernels_key
from edgespec.runtimes.kv_caches import SharedCache
from edgespec.runtimes.pass_shapes import RULE_VERSION, PaddedPass, PassShapes
from edgespec.runtimes.passes import Passes
from edgespec.runtimes.recurrent_states import RecurrentStates
from edgespec.runtimes.session import SessionOptions, refuse_device, translate_memory_errors
from edgespec.system.cancel import Cancel
from edgespec.types import Array, Logits, TokenIds

# Long prompts run in chunks, which bounds the workspace; a chunk this wide runs at the full rate.
_CHUNK_TOKENS = 256
# A prompt's chunk that finds no memory is halved down to this; where a narrower one fails, the scheduler gives up.
_LEAST_CHUNK_TOKENS = 16
_log = logging.getLogger(__name__)


class OnnxDecoder(Decoder, Cache, Forks):
    """The model of a folder, as a function from tokens to logits; MemoryExhausted where a pass does not fit.

    In deterministic mode a row is equal to the bit however tokens are cut into passes: on the CPU provider they
    keep to a rule, elsewhere to few widths (pass_shapes.py). It is proved on the machine.
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
        known = checks.read() if checks and device.records_passes else None
        if known and known.replays[self._deterministic] is False:
            _log.info("'%s' replays no passes (CUDA graphs), as an earlier check has found", device.name)
            device = replace(device, records_passes=False)
        self._passes = Passes(folder / manifest.graph, manifest, device, **options)
        self._hidden = HiddenStates(layers, self._passes.token_widths[0]) if layers else None
        self._held = np.zeros(0, np.int32)
        self._num_read = 0  # held tokens that passes of their own width have read (pass_shapes.py)
        self._lock = Lock()
        self.chunk_tokens = _CHUNK_TOKENS
        self.shapes: PassShapes | None = None  # where passes are padded to few widths
        # Where rows are the host's already numpy chooses: 15 µs a row of 151,936, the graph on the CPU 150.
        self.has_argmax = False
        self._is_on_host = device.memory == "cpu"
        self._find_key = partial(
            _prefix_key, manifest, device, options.get("num_threads"), deterministic=self._deterministic
        )
        cancel = options.get("cancel") or Cancel()
        if checks:
            with self.cancelled_by(cancel), report_slow_check(device.name):
                self._check(device, checks)
        # A session whose recording failed may not be sound any more.
        if checks and self._passes.graphs and not self._passes.graphs.width:
            del self._passes
            device = replace(device, records_passes=False)
            self._passes = Passes(folder / manifest.graph, manifest, device, **options)
            with self.cancelled_by(cancel), refuse_device(device):
                DeviceTrial(self, self._passes, device, checks, is_exact=self._deterministic).run_shapes()

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
            self.hold(tokens[:0])
            if has_copied := own.copy_from(theirs, len(tokens)):
                self.hold(tokens)
        return has_copied

    @property
    def prefix_key(self) -> str | None:
        return self._find_key() if self._host_cache and not self._hidden else None

    def read_prefix(self) -> tuple[TokenIds, Array]:
        assert self._host_cache
        with self._lock:
            return self._held, self._host_cache.read(len(self._held))

    def fill_prefix(self, tokens: TokenIds, values: Array) -> None:
        assert self._host_cache
        with self._lock, translate_memory_errors("making room for a text"):
            self.hold(tokens[:0])
            self._host_cache.fill(values)
            self.hold(tokens)

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
        if self.shapes:
            return self.shapes.can()._replace(best=self.has_argmax)
        return Can(best=self.has_argmax, widths=EVEN_WIDTHS if self._deterministic else ())

    @property
    def cache(self) -> Cache:
        return self

    @property
    def forks(self) -> Forks:
        return self

    def run(self, given: Pass) -> Rows:
        tokens, num_rows = given.tokens, given.num_rows
        require_context(len(tokens), self.context_length)
        assert 1 <= num_rows <= len(tokens)
        with self._lock, translate_memory_errors("running a pass"):
            self._begin()
            if self._states:
                self._states.num_text = len(given.text)
            return self._made(given, self.rows(tokens, num_rows, self._output(given), given.num_prompt))

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
            self.hold(tokens[:0])
            self._passes.pretend(len(tokens))
            if self._hidden:
                self._hidden.pretend(tokens)
            self._held = tokens

    def imitate(self, tokens: TokenIds, num_run: int, seed: int) -> bool:
        if (cache := self._host_cache) is None:
            return False
        with self._lock, translate_memory_errors("making room for a text"):
            assert np.array_equal(self._held[:num_run], tokens[:num_run])
            self.hold(tokens[:num_run])
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
            self.hold(self._held[:0])
            self._passes.forget()
            if self._hidden:
                self._hidden.clear()

    @property
    def _states(self) -> RecurrentStates | None:
        cache = self._passes.cache
        return cache.states if isinstance(cache, SharedCache) else None

    @property
    def held_tokens(self) -> TokenIds:
        return self._held

    def hold(self, tokens: TokenIds) -> None:
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

    def rows(self, tokens: TokenIds, num_last: int, output: str, num_prompt: int = 0) -> Logits:
        num_tokens, shapes = len(tokens), self.shapes
        num_read = shapes.num_read(num_prompt, num_tokens - num_last, self.context_length) if shapes else 0
        start = reusable_prefix(self._held, tokens, num_last)
        if (has_read := min(self._num_read, start)) != num_read:  # what was read otherwise is read again
            start = min(has_read, num_read)
        start = self._states.reachable(start) if self._states else start  # that a pass can go on after
        num_text = self._states.num_text if self._states else 0
        next_row = num_tokens - num_last
        rows: list[Logits] = []
        chunk_tokens, room = self.chunk_tokens, self.context_length
        if num_tokens - start > chunk_tokens:
            self.hold(tokens[:start])
            self._passes.reserve(start, num_tokens)
        while start < num_tokens:
            if self._states:  # a pass that failed may have begun further back, and let later ones go
                start = self._states.reachable(start)
            most = min(chunk_tokens, self._passes.max_tokens or chunk_tokens)
            stop = min(start + most, num_tokens)
            padded = PaddedPass(start, stop)
            if shapes:
                padded = shapes.next_pass(start, num_tokens, num_last, room, most, num_read)
            elif self._deterministic:
                padded = self._passes.rule.next_pass(start, stop, self.context_length)
            first, stop, num_padded, num_given = padded
            if first < start and self._states:
                first = self._states.reachable_evenly(first, stop + num_padded)
            if self._states:  # padding within a text must not go into a state
                self._states.num_text = min(num_text, stop) if num_padded else num_text
            self.hold(tokens[:start])
            wanted = max(0, stop - next_row)
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
                next_row = stop
        self.hold(tokens)
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def _check(self, device: Device, checks: DeviceChecks) -> None:
        """Find out which passes the device computes correctly, or look up what an earlier check has found.

        Raises DeviceUnavailable: The device computes the model wrongly, or not at all.
        """
        DeviceTrial(self, self._passes, device, checks, is_exact=self._deterministic).run()
        self.hold(self._held[:0])
        self.num_fed = 0


def _prefix_key(
    manifest: Manifest, device: Device, num_threads: int | None = None, *, deterministic: bool = False
) -> str | None:
    """Equal for sessions that make the same keys and values of a text; None where nothing tells the weights."""
    if not manifest.files:
        return None
    files = sorted((name, record.sha256) for name, record in manifest.files.items())
    model = hashlib.sha256(repr(files).encode()).hexdigest()
    mode = "deterministic" if deterministic else "fastest"
    return f"{model[:32]}, {mode}, version {RULE_VERSION}, {kernels_key(manifest, device, num_threads)}, by token"
