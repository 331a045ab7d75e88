"""The graphs of a model folder, by the names in its manifest."""

from collections.abc import Mapping

import onnx_ir as ir

from edgespec.export.families import DecoderConfig
from edgespec.export.graph import Variant, build_graph
from edgespec.export.precision import Rule
from edgespec.export.static_graph import build_static_graph
from edgespec.export.tensors import StoredTensor
from edgespec.export.weights import WeightsFile
from edgespec.manifest import Manifest
from edgespec.types import Range

DRAFT_HEAD = "draft_head"  # role of a trimmed head


def build_graphs(
    manifest: Manifest,
    config: DecoderConfig,
    tensors: Mapping[str, StoredTensor],
    weights: WeightsFile,
    rule: Rule,
    ranges: Mapping[str, Range] | None = None,
) -> dict[str, ir.Model]:
    """Write every weight into the weights file and return the graphs over it by file name.

    ranges are those of activations, for w8a16.
    """
    if manifest.kv_cache.form == "static":
        widths = {manifest.graph: 1}
        if manifest.prefill_graph:
            widths[manifest.prefill_graph] = manifest.prefill_tokens
        return {
            file: build_static_graph(
                config, tensors, weights, rule, num_tokens=width, capacity=manifest.context_length, ranges=ranges
            )
            for file, width in widths.items()
        }
    head = DRAFT_HEAD if manifest.vocab_subset else "head"
    has_best = manifest.signature.best is not None
    variants = {manifest.graph: Variant(hidden_layers=manifest.hidden_layers, head=head, has_best=has_best)}
    if manifest.tree_graph:
        variants[manifest.tree_graph] = Variant(
            has_tree_inputs=True,
            rotates_apart=manifest.form == "gpu",
            has_best=has_best,
            hidden_layers=manifest.hidden_layers,
        )
    if drafter := manifest.self_drafter:
        head = DRAFT_HEAD if drafter.vocab_subset else "head"
        variants[drafter.graph] = Variant(layers=drafter.layers, head=head)
    return {file: build_graph(config, tensors, weights, rule, variant) for file, variant in variants.items()}
