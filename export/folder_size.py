"""The size of a model folder before it is written: its graphs are built over weights that are only counted."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir

from edgespec.export.graph import DRAFT_HEAD, build_graphs
from edgespec.export.nodes import Graphs
from edgespec.export.precision import Rule
from edgespec.export.sources import LoadedSource
from edgespec.export.static_graph import StaticGraph
from edgespec.export.tensors import Tensors, unread
from edgespec.export.vocabulary import Vocabulary
from edgespec.export.weights import Parts, WeightsFile, aligned
from edgespec.manifest import Manifest
from edgespec.types import Array, Range

OTHER_BYTES = 1 << 14  # the manifest and the model card
_TOKEN_BYTES = 8  # of the file that lists the tokens of a trimmed head


def folder_bytes(loaded: LoadedSource, rule: Rule, manifest: Manifest, num_tokens: int | None) -> int:
    """The bytes of all files that an export writes; num_tokens: of a trimmed head."""
    tensors = dict(loaded.tensors)
    if num_tokens is not None:
        tensors[DRAFT_HEAD] = replace(tensors.get("head", tensors["embedding"]), rows=num_tokens)

    def write(tensors: Tensors, weights: WeightsFile) -> Graphs:
        ranges = None
        if rule.precision == "w8a16":  # its weights are written once to measure ranges, and once more in 16 bits
            width, capacity = manifest.prefill_tokens, manifest.context_length
            StaticGraph(loaded.config, tensors, weights, rule, width, capacity).build()
            ranges = _AnyRange()
        return build_graphs(manifest, loaded.config, tensors, weights, rule, ranges)

    return written_bytes(write, tensors, loaded.vocabulary, manifest.weights) + (num_tokens or 0) * _TOKEN_BYTES


def written_bytes(
    write: Callable[[Tensors, WeightsFile], Graphs],
    tensors: Tensors,
    vocabulary: Vocabulary,
    file: str = "model.onnx.data",
) -> int:
    """The bytes of the weights and graphs that a function writes, with the texts of a vocabulary."""
    weights = _CountedWeights(Path(file))
    graphs = write({role: unread(tensor) for role, tensor in tensors.items()}, weights)
    graphs_bytes: int = sum(ir.to_proto(graph).ByteSize() for graph in graphs.values())
    texts = vocabulary.tokenizer_json, vocabulary.chat_template or ""
    return weights.end + graphs_bytes + sum(len(text.encode()) for text in texts) + OTHER_BYTES


class _AnyRange(dict[str, Range]):
    def __missing__(self, name: str) -> Range:
        return Range(-1.0, 1.0)


class _CountedWeights(WeightsFile):
    """Counts the bytes of weights by the shapes of their tensors, and writes nothing."""

    def __init__(self, path: Path) -> None:
        self.path, self.end, self._written = path, 0, {}

    def _place(self, first: Array, others: Parts, num_bytes: int) -> int:
        """Count an array; no other part than the first, which gives its type, is made."""
        start = aligned(self.end, num_bytes)
        self.end = start + num_bytes
        return start
