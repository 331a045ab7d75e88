"""The graphs of a model folder: those of a decoder-only transformer in ONNX, weights and all.

Inputs, for a batch of one:
    input_ids            int64 [batch, num_tokens]   the tokens that the cache does not hold
    attention_mask       int64 [batch, total]        ones; total counts cached and new tokens
    num_logits_to_keep   int64 [1]                   how many of the last positions get logits
    past_key_values.{i}.key, .value  float32 or float16 [batch, num_kv_heads, capacity, head_dim]
    past_rows.{i}                    [batch, num_before, hidden_size], the rows of the tokens before; of a layer
                                     that has a short convolution and no keys and values
    past_state.{i}                   of a layer that has a recurrent state: the state, and in past_rows.{i} rows of
                                     a few tokens before it and of all that follow it in the past
    num_settled          int64 [1]   with such layers: how many of these rows and of the new ones go into the state
Outputs:
    logits               float32 [batch, num_logits_to_keep, vocab_size]
    present.{i}.key, .value          the same buffers as past_key_values
    present_rows.{i}                 [batch, num_tokens, hidden_size], the rows of the new tokens
    present_state.{i}                the state behind the settled rows; present_rows.{i} begin a few before it
A graph with a best token also outputs
    best                 float32 [batch, num_logits_to_keep, 2]   for each row the id of the likeliest token,
                                                                  the lowest of equal ones, and the sum of logits
A tree graph also takes
    position_ids         int64 [batch, num_tokens]
    attention_bias       float32 [batch, 1, num_tokens, total]   added to the scores, large and negative to hide
    local_attention_bias the bias of layers that see a window, if there are any; it states the window
and needs a past that is not empty: ONNX Runtime's CPU provider ignores position_ids otherwise. In the gpu form
RotaryEmbedding rotates queries and keys before attention, since WebGPU's attention never reads position_ids.
A graph with hidden states also outputs, for some layers,
    hidden_states.{i}    float32 [batch, num_tokens, hidden_size]   the residual stream after layer i; where i is
                                                                   the number of layers, after the final norm

Attention is com.microsoft GroupQueryAttention with rotary inside; quantised weights are MatMulNBits with
activations in 8 bits (accuracy_level 4). Knows nothing of sources and folders.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgespec.export.decoder_config import DecoderConfig
from edgespec.export.layers import LayerWriter
from edgespec.export.nodes import Graphs, make_output
from edgespec.export.precision import Rule
from edgespec.export.static_graph import StaticGraph
from edgespec.export.tensors import Tensors
from edgespec.export.weights import WeightsFile
from edgespec.manifest import Manifest
from edgespec.types import Range

DRAFT_HEAD = "draft_head"  # role of a trimmed head


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One of the graphs over a weights file.

    layers: The layers to keep, all unless given (self-speculative drafting: Zhang et al., arXiv:2309.08168).
    head: Role of the head among the tensors.
    """

    layers: tuple[int, ...] | None = None
    head: str = "head"
    has_tree_inputs: bool = False
    has_best: bool = False
    hidden_layers: tuple[int, ...] = ()


def build_graph(
    config: DecoderConfig, tensors: Tensors, weights: WeightsFile, rule: Rule, variant: Variant = Variant()
) -> ir.Model:
    """Write the weights that the file does not hold yet, and return the graph over it."""
    write = LayerWriter(config, tensors, weights, rule, has_tree_inputs=variant.has_tree_inputs)
    input_ids = ir.val("input_ids", ir.DataType.INT64, ["batch", "num_tokens"])
    mask = ir.val("attention_mask", ir.DataType.INT64, ["batch", "total_tokens"])
    num_logits = ir.val("num_logits_to_keep", ir.DataType.INT64, [1])
    lengths = write.lengths(mask)
    inputs, outputs = [input_ids, mask, num_logits, *write.tree.values()], []
    inputs += [write.recurrence.num_settled] if config.recurrence else []
    layers = range(config.num_layers) if variant.layers is None else variant.layers

    embedded, head = write.embedding(input_ids, variant.head)
    residual = write.scale(embedded, config.embedding_scale)
    layer_inputs = write.layer_inputs(input_ids, residual) if config.layer_input_size else ()
    hidden_shape = ("batch", "num_tokens", config.hidden_size)
    kept: dict[int, list[ir.Value]] = {}  # keys and values by layer, for those that share them
    norms = [*(f"{i}.input_norm" for i in layers), "final_norm"]
    normed = write.norm(residual, norms[0])
    for number, i in enumerate(layers):
        past, present = write.caches(number, i)
        if (source := config.layers[i].keys_of) is not None:
            past, present = kept[source], []
        kept[i] = past if write.lends_new_keys else present
        if config.layers[i].recurrent:
            attended = write.recurrence(i, normed, past[-2:], present[-2:])
            if config.layers[i].has_both:
                beside = write.attention(i, normed, past[:2], present[:2], lengths)
                attended = write.op("Add", attended, beside)
        elif config.layers[i].convolved:
            attended = write.convolution(i, normed, past[0], present[0])
        else:
            attended = write.attention(i, normed, past, present, lengths)
        attended = write.norm(attended, f"{i}.attended_norm")
        attended = write.scale(attended, config.residual_scale)
        normed, residual = write.add_norm(attended, residual, f"{i}.mlp_norm")
        fed = write.scale(write.norm(write.mlp(i, normed), f"{i}.fed_norm"), config.residual_scale)
        if layer_inputs or f"{i}.output_scale" in tensors:
            residual = write.op("Add", fed, residual)
            residual = write.add_layer_input(i, residual, layer_inputs[i]) if layer_inputs else residual
            residual = write.scale_output(i, residual)
            normed = write.norm(residual, norms[number + 1])
        else:
            normed, residual = write.add_norm(fed, residual, norms[number + 1])
        inputs += past if source is None else []
        outputs += present
        if i in variant.hidden_layers:
            outputs.append(write.output(f"hidden_states.{i}", residual, hidden_shape))
    if config.num_layers in variant.hidden_layers:
        outputs.append(write.output(f"hidden_states.{config.num_layers}", normed, hidden_shape))
    logits = write.cap(head(write.scale(write.last_rows(normed, num_logits), config.logit_scale)))
    rows = tensors.get(variant.head, tensors["embedding"]).rows
    shape = ("batch", "num_logits", rows)
    logits = make_output(write.as_float(logits), "logits", ir.DataType.FLOAT, shape)
    if variant.has_best:
        outputs.append(_best(write, logits, rows))
    return write.nodes.model("decoder", inputs, [logits, *outputs], context_length=str(config.context_length))


def _best(write: LayerWriter, logits: ir.Value, vocab_size: int) -> ir.Value:
    """The likeliest token of each row and the sum of the row, [batch, num_logits, 2].

    Not by ArgMax, which WebGPU scans a row with by one thread; where CUDA runs the graph it is opened with
    ArgMax in place (runtimes/device_rows.py). Maxima can hide NaN, a sum does not.
    """
    op, constant = write.op, write.constant
    last = write.ints(2)
    ids = write.weights.append("token_ids", [np.arange(vocab_size, dtype=np.float32)], [vocab_size])
    none = constant("no_token", np.array(vocab_size, np.float32))
    is_largest = op("Equal", logits, op("ReduceMax", logits, last))
    first = op("ReduceMin", op("Where", is_largest, ids, none), last)
    best = op("Concat", first, op("ReduceSum", logits, last), axis=2)
    return make_output(best, "best", ir.DataType.FLOAT, ["batch", "num_logits", 2])


def build_graphs(
    manifest: Manifest,
    config: DecoderConfig,
    tensors: Tensors,
    weights: WeightsFile,
    rule: Rule,
    ranges: Mapping[str, Range] | None,
) -> Graphs:
    """Write every weight into the weights file and return the graphs over it by file name.

    ranges are those of activations, for w8a16.
    """
    if manifest.kv_cache.form == "static":
        widths = {manifest.graph: 1}
        if manifest.prefill_graph:
            widths[manifest.prefill_graph] = manifest.prefill_tokens
        return {
            file: StaticGraph(config, tensors, weights, rule, width, manifest.context_length, ranges).build()
            for file, width in widths.items()
        }
    head = DRAFT_HEAD if manifest.vocab_subset else "head"
    has_best = manifest.signature.best is not None
    variants = {manifest.graph: Variant(hidden_layers=manifest.hidden_layers, head=head, has_best=has_best)}
    if manifest.tree_graph:
        variants[manifest.tree_graph] = Variant(
            has_tree_inputs=True, has_best=has_best, hidden_layers=manifest.hidden_layers
        )
    if drafter := manifest.self_drafter:
        head = DRAFT_HEAD if drafter.vocab_subset else "head"
        variants[drafter.graph] = Variant(layers=drafter.layers, head=head)
    return {file: build_graph(config, tensors, weights, rule, variant) for file, variant in variants.items()}
