"""A decoder of fixed shapes: one token a pass, or a block of a prompt, and the cache outside of the graph."""

from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from edgespec.cache import reusable_prefix
from edgespec.cancel import Cancel
from edgespec.errors import ContextOverflow, EdgeSpecError, ManifestError, MemoryExhausted
from edgespec.manifest import Manifest
from edgespec.runtimes.devices import Device, import_onnxruntime, physical_cores
from edgespec.runtimes.placement import Placement, expect_placed, placement
from edgespec.runtimes.session import load_graph, not_run, telling_of_memory, translated
from edgespec.types import Logits, TokenIds

_HIDDEN = -30000.0  # which half floats hold


class StaticDecoder:
    """The model of a folder in its static form, as a function from tokens to logits.

    The cache is a memo: a rewind is a mask that shows less of it. In deterministic mode every token has a pass of
    its own, so that a row is the same to the bit however tokens came.
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
        """Load the graphs.

        Raises:
            Cancelled: It was given up.
            DeviceUnavailable: The device does not run it.
            ManifestError: A graph does not load, or takes other inputs than the static form has.
            MemoryExhausted: The weights do not fit.
        """
        self._manifest = manifest
        threads = num_threads or physical_cores()
        graphs = {1: manifest.graph}
        if manifest.prefill_graph and not deterministic:
            graphs[manifest.prefill_tokens] = manifest.prefill_graph
        self._sessions = {
            width: _open(folder / graph, manifest, device, threads, shares_cores, cancel or Cancel())
            for width, graph in graphs.items()
        }
        kv = manifest.kv_cache
        shape = (kv.num_kv_heads, manifest.context_length, kv.head_dim)
        # Where nothing is cached yet is masked, so that any value will do.
        self._caches = {past: np.zeros(shape, kv.dtype) for past, _ in manifest.signature.caches(kv.num_layers)}
        self._held = np.zeros(0, np.int32)
        self._num_fed = 0
        self._lock = Lock()
        self._new_options = import_onnxruntime().RunOptions
        self._options = self._new_options()  # of the passes that go on, or of the last
        if device.name != "cpu":
            self._try(device)

    @property
    def placements(self) -> dict[int, Placement]:
        """Which nodes run where, by the width of the graph."""
        return {width: placement(session) for width, session in self._sessions.items()}

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
            MemoryExhausted: The workspace does not fit.
        """
        if len(tokens) > self.context_length:
            raise ContextOverflow(len(tokens), self.context_length)
        assert 1 <= num_last <= len(tokens)
        with self._lock, telling_of_memory("running a pass"):
            self._options = self._new_options()
            return self._logits(tokens, num_last)

    def interrupt(self) -> None:
        """End the passes that another thread runs: an error is raised, and the cache holds what was run."""
        self._options.terminate = True

    def pretend(self, tokens: TokenIds) -> None:
        """Hold tokens that were never run; see PretendingDecoder."""
        if len(tokens) > self.context_length:
            raise ContextOverflow(len(tokens), self.context_length)
        with self._lock:
            self._held = tokens

    def forget(self) -> None:
        """Hold nothing; the cache is of a fixed size."""
        with self._lock:
            self._held = self._held[:0]

    def _try(self, device: Device) -> None:
        """Raises DeviceUnavailable: It loads the graph and does not run it, which a pass alone shows."""
        try:
            self._pass(np.zeros(1, np.int32), 0)  # what it leaves in the cache is masked
        except MemoryExhausted:
            raise
        except EdgeSpecError as error:
            raise not_run(error, device) from error

    def _logits(self, tokens: TokenIds, num_last: int) -> Logits:
        start, first = reusable_prefix(self._held, tokens, num_last), len(tokens) - num_last
        rows = np.empty((num_last, self.vocab_size), np.float32)
        while start < len(tokens):
            width = max(width for width in self._sessions if width <= len(tokens) - start)
            self._held = tokens[:start]
            found = self._pass(tokens[start : start + width], start)
            self._num_fed += width
            start += width
            wanted = min(width, max(0, start - first))
            rows[start - wanted - first : start - first] = found[width - wanted :]
        self._held = tokens
        return rows

    def _pass(self, tokens: TokenIds, num_past: int) -> Logits:
        session, width = self._sessions[len(tokens)], len(tokens)
        feeds = pass_inputs(session, self._manifest, tokens, num_past)
        names = [value.name for value in session.get_outputs()]
        try:
            found = dict(zip(names, session.run(names, {**feeds, **self._caches}, self._options), strict=True))
        except Exception as error:  # ONNX Runtime has no common base of its own
            raise translated(error, "running a pass") from error
        for past, present in self._manifest.signature.caches(self._manifest.kv_cache.num_layers):
            self._caches[past][:, num_past : num_past + width] = found[present]
        logits: Logits = found["logits"]
        return logits


def pass_inputs(session: Any, manifest: Manifest, tokens: TokenIds, num_past: int) -> dict[str, npt.NDArray[Any]]:
    """What a static graph takes beside its cache, of which num_past positions are filled."""
    positions = np.arange(num_past, num_past + len(tokens), dtype=np.int32)
    feeds: dict[str, npt.NDArray[Any]] = {"input_ids": tokens.astype(np.int32), "position_ids": positions}
    for value in session.get_inputs():
        if value.name.endswith("attention_mask"):
            window = manifest.sliding_window if value.name.startswith("local") else None
            mask = _mask(positions, manifest.context_length, window)
            feeds[value.name] = mask.astype(np.float16 if value.type == "tensor(float16)" else np.float32)
    return feeds


def _mask(positions: npt.NDArray[np.int32], capacity: int, window: int | None) -> npt.NDArray[np.float64]:
    """[num_tokens, capacity + num_tokens]: what is filled of the cache, and of the pass what came before."""
    filled = np.arange(capacity)
    slots = np.concatenate([np.where(filled < positions[0], filled, capacity), positions])
    behind = positions[:, None] - slots
    hidden = behind < 0 if window is None else (behind < 0) | (behind >= window)
    return np.where(hidden, _HIDDEN, 0.0)


def _open(
    graph: Path, manifest: Manifest, device: Device, num_threads: int, shares_cores: bool, cancel: Cancel
) -> Any:
    session = load_graph(graph, device, num_threads, shares_cores, cancel)
    shapes = {value.name: tuple(value.shape) for value in session.get_inputs()}
    expect_placed(placement(session), device, str(graph))
    names, kv = set(shapes), manifest.kv_cache
    if not {"input_ids", "position_ids"} < names:
        raise ManifestError(
            f"{graph} takes {', '.join(sorted(names)[:4])}, which is no static form; export it again"
        )
    wanted = (kv.num_kv_heads, manifest.context_length, kv.head_dim)
    pasts = {past for past, _ in manifest.signature.caches(kv.num_layers)}
    found = {name: shape for name, shape in shapes.items() if "past" in name}
    if set(found) != pasts or set(found.values()) != {wanted}:
        shape = next((shape for shape in found.values() if shape != wanted), wanted)
        raise ManifestError(
            f"{graph} is not what its manifest says: its cache has {len(found)} inputs, as of {shape}, wanted "
            f"{len(pasts)} of {wanted}; export it again"
        )
    made = {value.name for value in session.get_outputs()}
    if missing := [name for _, name in manifest.signature.roles(kv.num_layers)[1] if name not in made]:
        raise ManifestError(
            f"{graph} is not what its manifest says: its output {missing[0]} is missing; export it again"
        )
    return session
