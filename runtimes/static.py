"""A decoder of fixed shapes: one token a pass, or a block of a prompt, and the cache outside of the graph."""

from pathlib import Path
from threading import Lock
from typing import Any, Unpack

import numpy as np

from edgespec.decoding.cached_prefix import reusable_prefix
from edgespec.decoding.decoder import Cache, Decoder, Pass, Rows
from edgespec.errors import ManifestError, require_context
from edgespec.manifest import Manifest
from edgespec.runtimes.compiled_graphs import load_graphs
from edgespec.runtimes.devices import Device, import_onnxruntime
from edgespec.runtimes.node_placement import NodePlacement, read_node_placement, require_placement
from edgespec.runtimes.session import (
    SessionOptions,
    ends_with,
    refuse_device,
    require_same,
    translate_errors,
    translate_memory_errors,
)
from edgespec.runtimes.static_pass import StaticCache, StaticPass, allocator
from edgespec.system.cancel import Cancel
from edgespec.types import Logits, TokenIds


class StaticDecoder(Decoder, Cache):
    """The model of a folder in its static form, as a function from tokens to logits; raises as OnnxDecoder does.

    The cache is a memo: a rewind is a mask that shows less of it. In deterministic mode every pass runs one token,
    so that a row is equal to the bit however tokens came.
    """

    num_fed = 0

    def __init__(
        self, folder: Path, manifest: Manifest, device: Device, **options: Unpack[SessionOptions]
    ) -> None:
        """Load the graphs; raises as open_session does."""
        self.vocab_size, self.context_length = manifest.vocab_size, manifest.context_length
        graphs = {1: manifest.graph}
        if manifest.prefill_graph and not options.get("deterministic"):
            graphs[manifest.prefill_tokens] = manifest.prefill_graph
        sessions = load_graphs(folder, manifest, list(graphs.values()), device, **options)
        self._sessions = dict(zip(graphs, sessions, strict=True))
        for width, session in self._sessions.items():
            _require_static(folder / graphs[width], manifest, device, session)
        allocate = allocator(device)  # once a session is open: some providers offer shared memory only then
        with translate_memory_errors("allocating the KV cache"):
            self._cache = StaticCache(manifest, allocate, manifest.kv_cache.dtype)
            self._passes = {
                width: StaticPass(session, manifest, self._cache, allocate)
                for width, session in self._sessions.items()
            }
        self._held = np.zeros(0, np.int32)
        self._lock = Lock()
        self._new_options = import_onnxruntime().RunOptions
        self._options = self._new_options()  # for the passes that run, or the last ones
        if device.name != "cpu":
            cancel = options.get("cancel") or Cancel()
            with (
                ends_with(cancel, self.interrupt),
                refuse_device(device),
            ):  # whether a device runs a graph that it loads shows only in a pass
                self._pass(np.zeros(1, np.int32), 0)  # what it leaves in the cache is masked

    @property
    def placements(self) -> dict[int, NodePlacement]:
        """Which provider runs which nodes, by the width of the graph."""
        return {width: read_node_placement(session) for width, session in self._sessions.items()}

    @property
    def num_written(self) -> int:
        """Bytes of the KV cache and of the masks that the host has written so far."""
        return self._cache.num_written + sum(each.num_written for each in self._passes.values())

    @property
    def cache(self) -> Cache:
        return self

    def run(self, given: Pass) -> Rows:
        tokens, num_last = given.tokens, given.num_rows
        require_context(len(tokens), self.context_length)
        assert 1 <= num_last <= len(tokens)
        with self._lock, translate_memory_errors("running a pass"):
            self._options = self._new_options()
            return Rows(self._logits(tokens, num_last))

    def interrupt(self) -> None:
        self._options.terminate = True

    def pretend(self, tokens: TokenIds) -> None:
        require_context(len(tokens), self.context_length)
        with self._lock:
            self._held = tokens

    def forget(self) -> None:
        """Hold no tokens; the cache is of a fixed size."""
        with self._lock:
            self._held = self._held[:0]

    def _logits(self, tokens: TokenIds, num_last: int) -> Logits:
        start, first = reusable_prefix(self._held, tokens, num_last), len(tokens) - num_last
        rows = np.empty((num_last, self.vocab_size), np.float32)
        while start < len(tokens):
            width = max(width for width in self._sessions if width <= len(tokens) - start)
            self._held = tokens[:start]
            found = self._pass(tokens[start : start + width], start)
            self.num_fed += width
            start += width
            wanted = min(width, max(0, start - first))
            rows[start - wanted - first : start - first] = found[width - wanted :]
        self._held = tokens
        return rows

    def _pass(self, tokens: TokenIds, num_past: int) -> Logits:
        with translate_errors("running a pass"):
            return self._passes[len(tokens)].run(tokens, num_past, self._options)


def _require_static(graph: Path, manifest: Manifest, device: Device, session: Any) -> None:
    """Raises as open_session does."""
    require_placement(read_node_placement(session), device, str(graph))
    shapes, kv = {value.name: tuple(value.shape) for value in session.get_inputs()}, manifest.kv_cache
    if not {"input_ids", "position_ids"} < set(shapes):
        raise ManifestError(
            f"{graph} takes {', '.join(sorted(shapes)[:4])}, which is no static form; export it again"
        )
    wanted = (kv.num_kv_heads, manifest.context_length, kv.head_dim)
    pasts = {past for past, _ in manifest.signature.caches(kv.num_layers)}
    found = {name: shape for name, shape in shapes.items() if "past" in name}
    made = {value.name for value in session.get_outputs()}
    outputs = [name for _, name in manifest.signature.roles(kv.num_layers)[1]]
    require_same(
        graph,
        [
            *(f"{name} is missing, wanted {wanted}" for name in sorted(pasts - found.keys())),
            *(f"{name} is not expected" for name in sorted(found.keys() - pasts)),
            *(f"{name} is {shape}, wanted {wanted}" for name, shape in found.items() if shape != wanted),
            *(f"its output {name} is missing" for name in outputs if name not in made),
        ],
    )
