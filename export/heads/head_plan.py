"""What a dialect makes of a head and its target: the tensors of the graphs by role, and how these are written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from edgespec.export.heads.head_source import HeadSource
from edgespec.export.precision import Rule
from edgespec.export.sources import LoadedSource
from edgespec.export.tensors import StoredTensor
from edgespec.export.weights import WeightsFile
from edgespec.manifest import Head, KVCache, Manifest
from edgespec.types import TokenIds

FUSE_GRAPH, STEP_GRAPH = "model_fuse.onnx", "model_step.onnx"

WriteGraphs = Callable[[Manifest, Mapping[str, StoredTensor], WeightsFile, Rule], dict[str, ir.Model]]
"""Writes the weights and gives the graphs by file name: those that the manifest names."""


@dataclass(frozen=True, kw_only=True)
class HeadPlan:
    """What the folder of a head will hold, in whatever precision and form.

    dialect: The name of the format that it was read from, for messages.
    graph: The file of its main graph.
    has_trees: Another graph runs trees.
    tensors: All weights by role, those of the target among them.
    borrowed: What the head has no weights of and takes from its target, for messages.
    tokens: The target's token of each row of the vocabulary head, ascending, [num_rows]; None where each token has
        a row.
    vocabulary_heads: Roles of all tensors that have a row for each token which can be drafted.
    """

    dialect: str
    head: Head
    kv_cache: KVCache
    tensors: Mapping[str, StoredTensor]
    write_graphs: WriteGraphs
    borrowed: tuple[str, ...] = ()
    tokens: TokenIds | None = None
    vocabulary_heads: tuple[str, ...] = ("head",)
    graph: str = "model.onnx"
    has_trees: bool = False


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """A format in which heads are published.

    recognizes: Whether a head is in this format, by its settings and the names of its tensors.
    plan: What the folder of such a head for a target will hold; raises SourceError, or VocabularyMismatch.
    """

    name: str
    recognizes: Callable[[HeadSource], bool]
    plan: Callable[[HeadSource, LoadedSource], HeadPlan]
