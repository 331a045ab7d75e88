"""The graphs of a recurrent head: a token and the state before it give logits, and the state that goes with them.

Inputs, for a batch of one:
    input_ids            int64 [batch, num_tokens]
    hidden               float32 [batch, num_tokens, state_size]   the state that goes with the token before each
    attention_mask       int64 [batch, total]        ones; total counts cached and new rows
    num_logits_to_keep   int64 [1]                   how many of the last rows get logits
    past_key_values.{i}.key, .value
Outputs:
    logits               float32 [batch, num_logits_to_keep, num_rows]
    state                float32 [batch, num_logits_to_keep, state_size]   the state that goes with each of these
    present.{i}.key, .value
The tree graph also takes position_ids and attention_bias, as that of a model does.
The fuse graph takes features, float32 [batch, num_tokens, layers · target_hidden_size], the hidden states of the
target that the head reads, and gives hidden for the tokens after them.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir

from edgespec.export.blocks import Floats
from edgespec.export.decoder_config import DecoderConfig
from edgespec.export.heads.head_source import HeadPlan
from edgespec.export.heads.vocabulary import HeadVocabulary
from edgespec.export.layers import LayerWriter
from edgespec.export.nodes import Graphs, make_output
from edgespec.export.precision import Rule
from edgespec.export.tensors import Tensors
from edgespec.export.weights import WeightsFile
from edgespec.manifest import Head, Manifest
from edgespec.manifest.caches import KVCache


@dataclass(frozen=True, kw_only=True)
class RecurrentShape:
    """How a head reads a token beside a state, and which state goes on; the norms are those that have weights.

    is_wide: The first layer's queries, keys and values read embedding and state side by side (EAGLE-3); otherwise
        a matrix makes one of both before the first layer.
    has_state_first: That matrix has the columns of the state before those of the embedding.
    adds_to_normed: What a wide first layer adds to is the state after its norm.
    returns_normed: The state that goes on is the one after the final norm.
    has_mask: A state of zeros stands for that of the features which the head has for tokens that are not known yet
        (P-EAGLE: arXiv:2602.01469).
    """

    config: DecoderConfig
    is_wide: bool
    has_state_first: bool = False
    adds_to_normed: bool = False
    returns_normed: bool = False
    has_mask: bool = False

    def write_graphs(self, manifest: Manifest, tensors: Tensors, weights: WeightsFile, rule: Rule) -> Graphs:
        assert manifest.head is not None
        writer = partial(LayerWriter, self.config, tensors, weights, rule)
        graphs = {manifest.graph: self._build(writer())}
        if manifest.tree_graph is not None:
            graphs[manifest.tree_graph] = self._build(writer(has_tree_inputs=True))
        if manifest.head.fuse_graph is not None:
            graphs[manifest.head.fuse_graph] = build_fuse(writer(), len(manifest.head.target_layers))
        return graphs

    def _build(self, write: LayerWriter) -> ir.Model:
        config, tensors = self.config, write.tensors
        input_ids = ir.val("input_ids", ir.DataType.INT64, ["batch", "num_tokens"])
        hidden = _floats("hidden", config.hidden_size)
        mask = ir.val("attention_mask", ir.DataType.INT64, ["batch", "total_tokens"])
        num_logits = ir.val("num_logits_to_keep", ir.DataType.INT64, [1])
        lengths = write.lengths(mask)
        inputs, outputs = [input_ids, hidden, mask, num_logits, *write.tree.values()], []

        embedded, head = write.embedding(input_ids)
        given = write.as_activation(hidden)
        if self.has_mask:
            size = write.op("ReduceL1", given, write.ints(2))
            is_none = write.op("Equal", size, write.constant("nothing", np.array(0, write.floats)))
            row = _fused_row(write).astype(write.floats)
            given = write.op(
                "Where", is_none, write.weights.append("mask_state", [row], [config.hidden_size]), given
            )
        normed, residual = self._begin(write, embedded, given)
        for i in range(config.num_layers):
            past, present = write.caches(i)
            # Of a text that is read the last layer leaves keys and values, and no more is computed.
            wanted = num_logits if i == config.num_layers - 1 else None
            attended = write.attention(i, normed, past, present, lengths, wanted)
            residual = residual if wanted is None else write.last_rows(residual, wanted)
            normed, residual = write.add_norm(attended, residual, f"{i}.mlp_norm")
            following = f"{i + 1}.input_norm" if i + 1 < config.num_layers else "final_norm"
            normed, residual = write.add_norm(write.mlp(i, normed), residual, following)
            inputs += past
            outputs += present
        state = normed if self.returns_normed else residual
        outputs.insert(0, write.output("state", state, ("batch", "num_logits", config.hidden_size)))
        logits = head(write.scale(normed, config.logit_scale))
        if "markov_head" in tensors:
            before = write.last_rows(input_ids, num_logits)
            rows = write.rows("markov_embedding", before)
            logits = write.op("Add", logits, write.head("markov_head", rows))
        logits = write.cap(logits)
        shape = ("batch", "num_logits", tensors.get("head", tensors["embedding"]).rows)
        logits = make_output(write.as_float(logits), "logits", ir.DataType.FLOAT, shape)
        return write.nodes.model("head", inputs, [logits, *outputs], context_length=str(config.context_length))

    def _begin(self, write: LayerWriter, embedded: ir.Value, hidden: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The values that the first layer reads, and those that it adds to."""
        token, state = write.norm(embedded, "token_norm"), write.norm(hidden, "state_norm")
        if self.is_wide:
            return write.op("Concat", token, state, axis=-1), state if self.adds_to_normed else hidden
        sides = (state, token) if self.has_state_first else (token, state)
        joined = write.product("join", write.op("Concat", *sides, axis=-1))
        return write.norm(joined, "0.input_norm"), joined


def plan_recurrent(
    head: Head, recurrence: RecurrentShape, layers: Tensors, vocabulary: HeadVocabulary
) -> HeadPlan:
    """The plan of a recurrent head whose layers have these tensors."""
    config = recurrence.config
    return HeadPlan(
        head=head,
        kv_cache=KVCache(num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim),
        tensors={**layers, **vocabulary.tensors},
        write_graphs=recurrence.write_graphs,
        borrowed=vocabulary.borrowed,
        tokens=vocabulary.tokens,
        vocabulary_heads=("head", "markov_head"),
        has_trees=not recurrence.has_mask,
        sliding_window=next(filter(None, (layer.sliding_window for layer in config.layers)), None),
    )


def build_fuse(write: LayerWriter, num_parts: int = 1, norm_behind: str = "") -> ir.Model:
    """From hidden states of the target to states, with a norm over all of them, or one over each, or none.

    norm_behind: The role of a norm of the states, if there is one.
    """
    matrix = write.tensors["fuse"]
    features = _floats("features", matrix.columns)
    parts = write.norm(write.as_activation(features), "fuse_norm")
    if "fuse_norm.0" in write.tensors:
        sizes = [matrix.columns // num_parts] * num_parts
        split = write.nodes.split(parts, [f"features.{at}" for at in range(num_parts)], *sizes)
        normed = [write.norm(part, f"fuse_norm.{at}") for at, part in enumerate(split)]
        parts = write.op("Concat", *normed, axis=-1)
    fused = write.norm(write.product("fuse", parts), norm_behind)
    hidden = write.output("hidden", fused, ("batch", "num_tokens", matrix.rows))
    return write.nodes.model("fuse", [features], [hidden])


def _fused_row(write: LayerWriter) -> Floats:
    """The state that the fuse graph would give for the features of a mask, [state_size]."""

    def norm(x: Floats, role: str) -> Floats:
        if role not in write.tensors:
            return x
        gain = write.tensors[role].vector()
        return np.asarray(x / np.sqrt((x**2).mean() + write.config.rms_eps) * gain, np.float32)

    row = norm(write.tensors["mask_features"].vector(), "fuse_norm")
    num_parts = sum(name.startswith("fuse_norm.") for name in write.tensors) or 1
    parts = [norm(part, f"fuse_norm.{at}") for at, part in enumerate(np.split(row, num_parts))]
    return np.concatenate([rows @ np.concatenate(parts) for rows in write.tensors["fuse"].floats()])


def _floats(name: str, size: int) -> ir.Value:
    return ir.val(name, ir.DataType.FLOAT, ["batch", "num_tokens", size])
