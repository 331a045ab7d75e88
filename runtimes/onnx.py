"""A decoder on ONNX Runtime: one session, one KV cache, one thread at a time.

The cache is a memo of the tokens it was fed. Each call keeps their longest common prefix and feeds the
rest, so a wrong guess is undone by the next call and needs no message of its own.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

import numpy as np

from edgespec.cache import reusable_prefix
from edgespec.cancel import Cancel
from edgespec.errors import ContextOverflow, DeviceUnavailable, EdgeSpecError, MemoryExhausted
from edgespec.manifest import Manifest
from edgespec.runtimes.devices import Device, physical_cores
from edgespec.runtimes.passes import Passes, Places
from edgespec.runtimes.session import not_run, telling_of_memory
from edgespec.runtimes.shared_cache import SharedCache
from edgespec.runtimes.soundness import chooses_soundly, probe, widest_sound
from edgespec.types import Likeliest, Logits, TokenIds, append

# Long prompts go in chunks, which bounds the workspace; a chunk this wide runs at the full rate.
_CHUNK_TOKENS = 256
# A prompt's pass that is refused memory is halved down to this; narrower ones are for the scheduler to give up.
_LEAST_CHUNK_TOKENS = 16
_log = logging.getLogger(__name__)


class OnnxDecoder:
    """The model of a folder, as a function from tokens to logits.

    In deterministic mode a row is the same to the bit however tokens are cut into passes. On the CPU
    provider that holds except where a kernel is left with a single row: in a pass of one token, in the last
    row of an odd number where weights are in blocks of 64 or 128, and at the end of a long pass, which
    attention cuts into tiles of an even number of rows. So a pass of an odd width is padded with one token,
    whose cache entry the next pass overwrites.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        device: Device,
        *,
        num_threads: int | None = None,
        deterministic: bool = False,
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
        self._deterministic = deterministic
        self._logits_name, self._best_name = manifest.signature.logits, manifest.signature.best
        self._passes = Passes(
            folder / manifest.graph,
            manifest,
            device,
            num_threads or physical_cores(),
            shares_cores=shares_cores,
            cancel=cancel,
        )
        self._held = np.zeros(0, np.int32)
        self._num_fed = 0
        self._lock = Lock()
        self._chunk_tokens = _CHUNK_TOKENS
        # Where rows are the host's already numpy chooses: 15 µs a row of 151,936, the graph on the CPU 150.
        self._has_argmax = False
        if device.memory != "cpu":
            self._chunk_tokens = self._sound_chunk(device)
            self._has_argmax = self._chooses_soundly(device)

    @property
    def vocab_size(self) -> int:
        return self._manifest.vocab_size

    @property
    def context_length(self) -> int:
        return self._manifest.context_length

    @property
    def num_fed(self) -> int:
        return self._num_fed

    def logits(self, tokens: TokenIds, num_last: int) -> Logits:
        """Logits that follow each of the last num_last tokens, [num_last, vocab_size].

        Raises:
            ContextOverflow: tokens are more than context_length.
            MemoryExhausted: The cache or the workspace does not fit.
        """
        return self._asked(tokens, num_last, self._logits_name)

    @property
    def has_argmax(self) -> bool:
        """The graph chooses, and where it runs that spares a way."""
        return self._has_argmax

    def argmax(self, tokens: TokenIds, num_last: int) -> Likeliest:
        """As ArgmaxDecoder has it, of a graph that chooses."""
        assert self._best_name is not None
        return self._likeliest(self._asked(tokens, num_last, self._best_name))

    def interrupt(self) -> None:
        """End the pass that another thread runs: it raises an error, and the cache holds what it held before."""
        self._passes.interrupt()

    def pretend(self, tokens: TokenIds) -> None:
        """Hold tokens that were never run; see PretendingDecoder."""
        if len(tokens) > self.context_length:
            raise ContextOverflow(len(tokens), self.context_length)
        with self._lock, telling_of_memory("making room for a text"):
            self._held = tokens[:0]
            self._passes.cache.pretend(len(tokens))
            self._held = tokens

    def forget(self) -> None:
        """Hold nothing, in no memory."""
        with self._lock:
            self._held = self._held[:0]
            self._passes.cache.clear()

    @property
    def held(self) -> TokenIds:
        """The tokens whose keys and values fill the first slots of the cache, [num_held]."""
        return self._held

    def tree_rows(self, tokens: TokenIds, nodes: TokenIds, places: Places, num_held: int = 0) -> Logits:
        """Logits behind the last of tokens and behind each of nodes, [num_nodes + 1, vocab_size].

        The nodes are left in the slots behind tokens, which are held. Where the first num_held of them lie there
        already, only the others are run, [num_nodes - num_held, vocab_size].

        Args:
            tokens: The committed tokens, [num_tokens].
            nodes: What is run behind them, [num_nodes].
            places: Of the last of tokens and of the nodes.
        """
        with self._lock, telling_of_memory("running a tree"):
            self._passes.begin()
            before = tokens[:-1]
            if num_held:
                self._held = tokens
                rows = self._passes.run(nodes[num_held:], len(tokens) + num_held, len(nodes) - num_held, places)
                self._num_fed -= num_held
            elif len(before) == 0:  # ONNX Runtime's CPU provider looks at positions behind a past alone
                first = self._rows(tokens, 1, self._logits_name).copy()
                rows = np.concatenate([first, self._passes.run(nodes, 1, len(nodes), places)])
            else:
                if reusable_prefix(self._held, tokens, 1) < len(before):
                    self._rows(before, 1, self._logits_name)
                self._held = before
                rows = self._passes.run(append(tokens[-1:], nodes), len(before), len(nodes) + 1, places)
                self._num_fed += 1
            self._num_fed += len(nodes)
            self._held = tokens
            return rows

    def adopt(self, tokens: TokenIds, slots: Sequence[int]) -> None:
        """Hold tokens behind those held: their keys and values lie in slots, in rising order."""
        with self._lock, telling_of_memory("moving a branch"):
            assert isinstance(self._passes.cache, SharedCache)
            self._passes.cache.move(slots, len(self._held))
            self._held = append(self._held, tokens)

    def _asked(self, tokens: TokenIds, num_last: int, output: str) -> Logits:
        num_tokens = len(tokens)
        if num_tokens > self.context_length:
            raise ContextOverflow(num_tokens, self.context_length)
        assert 1 <= num_last <= num_tokens
        with self._lock, telling_of_memory("running a pass"):
            self._passes.begin()
            return self._rows(tokens, num_last, output)

    def _likeliest(self, best: Logits) -> Likeliest:
        ids, sums = best.T
        is_sound = np.isfinite(sums) & (ids >= 0) & (ids < self.vocab_size)
        return Likeliest(np.where(is_sound, ids, 0).astype(np.int64), is_sound)

    def _rows(self, tokens: TokenIds, num_last: int, output: str) -> Logits:
        num_tokens = len(tokens)
        start = reusable_prefix(self._held, tokens, num_last)
        rows: list[Logits] = []
        chunk_tokens = self._chunk_tokens
        while start < num_tokens:
            stop = min(start + chunk_tokens, num_tokens)
            self._held = tokens[:start]
            wanted = max(0, stop - max(start, num_tokens - num_last))
            try:
                chunk = self._passed(tokens, start, stop, max(1, wanted), output)
            except (MemoryError, MemoryExhausted):
                chunk_tokens = (stop - start) // 2
                if chunk_tokens < _LEAST_CHUNK_TOKENS:
                    raise
                continue
            self._num_fed += stop - start
            start = stop
            if wanted == num_last:
                rows.append(chunk)
            elif wanted:
                rows.append(chunk.copy())
        self._held = tokens
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def _sound_chunk(self, device: Device) -> int:
        """Raises DeviceUnavailable: It computes the model wrongly, or not at all."""

        def rows_of(tokens: TokenIds, width: int) -> Logits:
            self._held, self._chunk_tokens = tokens[:0], width
            return self._rows(tokens, len(tokens), self._logits_name).copy()

        try:
            width = widest_sound(rows_of, self.vocab_size, self.context_length, device.name)
        except (DeviceUnavailable, MemoryExhausted):
            raise
        except EdgeSpecError as error:  # what a graph wants of an adapter shows in its first pass alone
            raise not_run(error, device) from error
        self._held, self._num_fed = self._held[:0], 0
        if width < _CHUNK_TOKENS:
            _log.warning(
                "'%s' computes passes of more than %d tokens wrongly; they are cut into such", device.name, width
            )
        return width

    def _chooses_soundly(self, device: Device) -> bool:
        """Whether the graph can choose, and does there what its rows say."""
        if self._best_name is None:
            return False
        tokens = probe(self.vocab_size, self.context_length)[:_LEAST_CHUNK_TOKENS]
        rows = self._rows(tokens, len(tokens), self._logits_name)
        found = self._likeliest(self._rows(tokens, len(tokens), self._best_name))
        self._held, self._num_fed = self._held[:0], 0
        is_sound = chooses_soundly(rows, found)
        if not is_sound:
            _log.warning("'%s' chooses other tokens than its rows say; whole rows come from it", device.name)
        return is_sound

    def _passed(self, tokens: TokenIds, start: int, stop: int, num_rows: int, output: str) -> Logits:
        """One pass over tokens[start:stop], padded where determinism asks for it."""
        if not self._deterministic or (stop - start) % 2 == 0:
            return self._passes.run(tokens[start:stop], start, num_rows, output=output)
        if stop < self.context_length:
            padded = np.append(tokens[start:stop], np.int32(0))
            return self._passes.run(padded, start, num_rows + 1, output=output)[:num_rows]
        # At the very end of the context there is no room behind: feed the token before once more.
        before = max(start - 1, 0)
        return self._passes.run(tokens[before:stop], before, num_rows, output=output)
