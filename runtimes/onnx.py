"""A decoder on ONNX Runtime: one session, one KV cache, one thread at a time.

The cache is a memo of the tokens it was fed. Each call keeps their longest common prefix and feeds the
rest, so a wrong guess is undone by the next call and needs no message of its own.
"""

from collections.abc import Callable
from pathlib import Path
from threading import Lock, local
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from edgespec.cache import reusable_prefix
from edgespec.errors import ContextOverflow
from edgespec.manifest import Manifest
from edgespec.runtimes.devices import Device, physical_cores
from edgespec.runtimes.growing_cache import GrowingCache
from edgespec.runtimes.session import open_session, translated
from edgespec.runtimes.shared_cache import SharedCache
from edgespec.types import Logits, TokenIds

# Long prompts go in chunks, which bounds the workspace; a chunk this wide runs at the full rate.
_CHUNK_TOKENS = 256


class _Cache(Protocol):
    """Keys and values of the positions that were run, bound to a session for its next pass."""

    def prepare(self, num_past: int, num_new: int) -> None:
        """Bind for a pass of num_new tokens that keeps the first num_past positions."""
        ...

    def collect(self) -> None:
        """Take what the pass has made."""
        ...


_CACHES: dict[str, Callable[[Any, Manifest, Device], _Cache]] = {
    "shared_buffer": SharedCache,
    "growing": GrowingCache,
}


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
    ) -> None:
        """Load the graph.

        Raises:
            ManifestError: The graph does not load, or is not the one that the manifest describes.
            MemoryExhausted: The weights do not fit.
        """
        self._manifest = manifest
        self._names = manifest.signature
        self._deterministic = deterministic
        self._session = open_session(
            folder / manifest.graph,
            manifest,
            device,
            num_threads or physical_cores(),
            shares_cores=shares_cores,
        )
        self._binding = self._session.io_binding()
        self._cache: _Cache = _CACHES[manifest.kv_cache.form](self._binding, manifest, device)
        self._held = np.zeros(0, np.int32)
        # What is bound beside the caches lives here until its run is over. It is bound anew for each pass, since
        # an interrupt between binding and noting it would leave the address of freed memory.
        self._ones = np.ones((1, 0), np.int64)
        self._input_ids = np.zeros((1, 0), np.int64)
        self._positions = np.zeros((1, 0), np.int64)
        self._num_logits = np.zeros(1, np.int64)
        self._logits_type = _element_type(self._session, self._names.logits)
        self._own = local()
        self._num_fed = 0
        self._lock = Lock()

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
        num_tokens = len(tokens)
        if num_tokens > self.context_length:
            raise ContextOverflow(num_tokens, self.context_length)
        assert 1 <= num_last <= num_tokens
        with self._lock:
            return self._logits(tokens, num_last)

    def _logits(self, tokens: TokenIds, num_last: int) -> Logits:
        num_tokens = len(tokens)
        start = reusable_prefix(self._held, tokens, num_last)
        self._num_fed += num_tokens - start
        rows: list[Logits] = []
        while start < num_tokens:
            stop = min(start + _CHUNK_TOKENS, num_tokens)
            self._held = tokens[:start]
            wanted = max(0, stop - max(start, num_tokens - num_last))
            chunk = self._rows(tokens, start, stop, max(1, wanted))
            start = stop
            if wanted == num_last:
                rows.append(chunk)
            elif wanted:
                rows.append(chunk.copy())
        self._held = tokens
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def _rows(self, tokens: TokenIds, start: int, stop: int, num_rows: int) -> Logits:
        """One pass over tokens[start:stop], padded where determinism asks for it."""
        if not self._deterministic or (stop - start) % 2 == 0:
            return self._run(tokens[start:stop], start, num_rows)
        if stop < self.context_length:
            return self._run(np.append(tokens[start:stop], np.int32(0)), start, num_rows + 1)[:num_rows]
        # At the very end of the context there is no room behind: feed the token before once more.
        before = max(start - 1, 0)
        return self._run(tokens[before:stop], before, num_rows)

    def _run(self, tokens: TokenIds, num_past: int, num_rows: int) -> Logits:
        self._cache.prepare(num_past, len(tokens))
        self._bind_tokens(tokens, num_past)
        logits = self._bind_logits(num_rows if self._names.num_logits_to_keep else len(tokens))
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # ONNX Runtime has no common base of its own
            raise translated(error, "a pass") from error
        self._cache.collect()
        rows: Logits = logits[0, -num_rows:]
        return rows if rows.dtype == np.float32 else rows.astype(np.float32)

    def _bind_tokens(self, tokens: TokenIds, num_past: int) -> None:
        total = num_past + len(tokens)
        self._input_ids = tokens[None].astype(np.int64)
        self._bind_input(self._names.input_ids, self._input_ids)
        if self._names.attention_mask:
            if total > self._ones.shape[1]:
                self._ones = np.ones((1, min(2 * total, self.context_length)), np.int64)
            self._bind_input(self._names.attention_mask, self._ones[:, :total])
        if self._names.position_ids:
            self._positions = np.arange(num_past, total, dtype=np.int64)[None]
            self._bind_input(self._names.position_ids, self._positions)

    def _bind_logits(self, num_rows: int) -> npt.NDArray[Any]:
        """The calling thread's own buffer, [1, num_rows, vocab_size]: another thread's call leaves it alone."""
        logits: npt.NDArray[Any] | None = getattr(self._own, "logits", None)
        if logits is None or logits.shape[1] != num_rows:
            logits = self._own.logits = np.empty((1, num_rows, self.vocab_size), self._logits_type)
        self._binding.bind_output(
            self._names.logits, "cpu", 0, self._logits_type, logits.shape, logits.ctypes.data
        )
        if self._names.num_logits_to_keep:
            self._num_logits = np.array([num_rows], np.int64)
            self._bind_input(self._names.num_logits_to_keep, self._num_logits)
        return logits

    def _bind_input(self, name: str, array: npt.NDArray[np.int64]) -> None:
        """Bind an array, which must live until the run is over: the binding keeps its address alone."""
        self._binding.bind_input(name, "cpu", 0, np.int64, array.shape, array.ctypes.data)


def _element_type(session: Any, name: str) -> type[np.floating[Any]]:
    kind = next(value.type for value in session.get_outputs() if value.name == name)
    return np.float16 if kind == "tensor(float16)" else np.float32
