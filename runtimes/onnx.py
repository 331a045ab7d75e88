"""A decoder on ONNX Runtime: one session, one KV cache, one thread at a time.

The cache is a memo of the tokens it was fed. Each call keeps their longest common prefix and feeds the
rest, so a wrong guess is undone by the next call and needs no message of its own.
"""

from pathlib import Path
from threading import Lock, local
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.cache import grown_capacity, reusable_prefix
from edgespec.errors import ContextOverflow, EdgeSpecError, ManifestError, MemoryExhausted
from edgespec.manifest import Manifest
from edgespec.runtimes.devices import Device, import_onnxruntime, physical_cores
from edgespec.types import Logits, TokenIds

# Long prompts go in chunks, which bounds the workspace; a chunk this wide runs at the full rate.
_CHUNK_TOKENS = 256
_FIRST_CAPACITY = 512


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
    ) -> None:
        """Load the graph.

        Raises:
            ManifestError: The graph does not load, or is not the one that the manifest describes.
            MemoryExhausted: The weights do not fit.
        """
        self._ort = import_onnxruntime()
        self._device = device
        self._manifest = manifest
        self._deterministic = deterministic
        self._session = self._load(folder / manifest.graph, num_threads or physical_cores())
        self._binding = self._session.io_binding()
        self._caches: dict[str, Any] = {}  # "0.key" -> the OrtValue bound as past and as present
        self._held = np.zeros(0, np.int32)
        # What is bound beside the caches; rebinding and fresh pages cost 0.2 ms of a 4 ms pass.
        self._ones = np.zeros((1, 0), np.int64)
        self._input_ids = np.zeros((1, 0), np.int64)
        self._num_logits = np.zeros(1, np.int64)
        self._bound_logits = np.zeros((1, 0, 0), np.float32)
        self._own = local()
        self._num_fed = 0
        self._lock = Lock()
        self._reserve(1)

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
        total = num_past + len(tokens)
        self._reserve(total)
        if self._input_ids.shape[1] != len(tokens):
            self._input_ids = np.empty((1, len(tokens)), np.int64)
            self._bind_input("input_ids", self._input_ids)
        self._input_ids[0] = tokens
        self._bind_input("attention_mask", self._ones[:, :total])
        logits = self._logits_buffer(num_rows)
        if logits is not self._bound_logits:
            self._bound_logits, self._num_logits = logits, np.array([num_rows], np.int64)
            self._binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
            self._bind_input("num_logits_to_keep", self._num_logits)
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # ONNX Runtime has no common base of its own
            raise self._translated(error, "a pass") from error
        rows: Logits = logits[0]
        return rows

    def _logits_buffer(self, num_rows: int) -> Logits:
        """The calling thread's own buffer, [1, num_rows, vocab_size]: another thread's call leaves it alone."""
        logits: Logits | None = getattr(self._own, "logits", None)
        if logits is None or logits.shape[1] != num_rows:
            logits = self._own.logits = np.empty((1, num_rows, self.vocab_size), np.float32)
        return logits

    def _bind_input(self, name: str, array: npt.NDArray[np.int64]) -> None:
        """Bind an array, which must live until the run is over: the binding keeps its address alone."""
        self._binding.bind_input(name, "cpu", 0, np.int64, array.shape, array.ctypes.data)

    def _reserve(self, needed: int) -> None:
        """Make room for needed positions, keeping what the cache holds."""
        capacity = self._ones.shape[1]
        if needed <= capacity:
            return
        grown = grown_capacity(max(capacity, _FIRST_CAPACITY), needed, self.context_length)
        kv = self._manifest.kv_cache
        shape = (1, kv.num_kv_heads, grown, kv.head_dim)
        held = len(self._held)
        for layer in range(kv.num_layers):
            for part in ("key", "value"):
                self._bind_cache(f"{layer}.{part}", shape, held)
        self._ones = np.ones((1, grown), np.int64)

    def _bind_cache(self, name: str, shape: tuple[int, ...], held: int) -> None:
        try:
            buffer = np.zeros(shape, self._manifest.kv_cache.dtype)
            if held:
                buffer[:, :, :held] = self._caches[name].numpy()[:, :, :held]
            value = self._ort.OrtValue.ortvalue_from_numpy(buffer, self._device.name)
        except MemoryError:
            raise MemoryExhausted(f"no memory for a context of {shape[2]} tokens; use a shorter one") from None
        self._caches[name] = value
        self._binding.bind_ortvalue_input(f"past_key_values.{name}", value)
        self._binding.bind_ortvalue_output(f"present.{name}", value)

    def _load(self, graph: Path, num_threads: int) -> Any:
        options = self._ort.SessionOptions()
        options.intra_op_num_threads = num_threads
        options.log_severity_level = 3
        try:
            session = self._ort.InferenceSession(
                str(graph), options, providers=[self._device.provider], enable_fallback=0
            )
        except Exception as error:  # ONNX Runtime has no common base of its own
            raise self._translated(error, f"loading {graph}") from error
        kv = self._manifest.kv_cache
        wanted = {"input_ids", "attention_mask", "num_logits_to_keep"}
        wanted |= {f"past_key_values.{i}.{part}" for i in range(kv.num_layers) for part in ("key", "value")}
        if (found := {value.name for value in session.get_inputs()}) != wanted:
            differing = ", ".join(sorted(found ^ wanted)[:3])
            raise ManifestError(f"{graph} does not take what its manifest says ({differing}); export it again")
        cache = next(value for value in session.get_inputs() if value.name == "past_key_values.0.key")
        stated = (kv.num_kv_heads, kv.head_dim, self.vocab_size)
        shaped = (cache.shape[1], cache.shape[3], session.get_outputs()[0].shape[-1])
        if shaped != stated:
            raise ManifestError(
                f"{graph} has key heads, head size and vocabulary of {shaped}, its manifest says {stated}; "
                "export it again"
            )
        return session

    def _translated(self, error: Exception, doing: str) -> EdgeSpecError:
        said = str(error)
        if isinstance(error, MemoryError) or "allocate memory" in said or "bad_alloc" in said:
            return MemoryExhausted(f"out of memory while {doing}; close other programs or use a smaller model")
        kind = ManifestError if doing.startswith("loading") else EdgeSpecError
        return kind(f"ONNX Runtime failed {doing}: {said}")
