"""Gemma 4's assistants: layers without keys of their own, which read keys and values of their target.

An assistant joins the embedding of a token with the state before it, as multi-token prediction does. Its layers
attend to the text as the target's last layers of each kind do that make keys: from these layers' own matrices and
the states that go into them, the graph makes the same keys again. All tokens of a draft stand at one position, the
one after the text that the target has run, and none sees another but by the state.

The graph is that of a recurrent head (recurrent_graphs.py). A row of hidden is the states that go into the layers
whose keys are read, and the one after the target's final norm. A state that the head gives has zeros for the
former, so that keys and values of a drafted token are zeros, by which they are known and hidden.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from edgespec.errors import SourceError
from edgespec.export.decoder_config import DecoderConfig
from edgespec.export.heads.eagle import recurrent_head
from edgespec.export.heads.head_source import Dialect, HeadPlan, HeadSource, nested
from edgespec.export.heads.head_tensors import Reader, require_hidden_size, require_shapes
from edgespec.export.layers import LayerWriter, Lengths
from edgespec.export.nodes import Graphs, Values, make_output
from edgespec.export.precision import Rule
from edgespec.export.roles import LAYER_TENSORS, PARTS, layer_shapes
from edgespec.export.settings import SourceSettings
from edgespec.export.sources import LoadedSource
from edgespec.export.tensors import StoredTensor, Tensors
from edgespec.export.weights import WeightsFile
from edgespec.manifest import Manifest
from edgespec.manifest.caches import KVCache

_HIDDEN = -30000.0  # added to scores, or a logit; half floats hold it
_LAYER_ROLES = ("q", "q_norm", "o", "input_norm", "attended_norm", "fed_norm", *PARTS, "output_scale")
_LAYER_NAMES = {
    **{role: LAYER_TENSORS[role][1] for role in _LAYER_ROLES},
    "mlp_norm": "pre_feedforward_layernorm.weight",
}
_KEY_ROLES = ("input_norm", "k", "v", "k_norm")
_LOCAL = "sliding_attention"
_Places = tuple[ir.Value, dict[bool, ir.Value]]  # positions, and biases by whether there is a window


@dataclass(frozen=True, kw_only=True)
class AssistantShape:
    """How an assistant drafts.

    config: A layer for each kind of attention, whose keys are the target's, then the assistant's own.
    target_size, embedding_scale: Of the target's states, and what its embedding is multiplied by.
    clusters: The token of each place in a cluster of the vocabulary, [num_clusters, size]; None where all tokens
        get a logit.
    num_chosen: How many clusters get logits.
    """

    config: DecoderConfig
    target_size: int
    embedding_scale: float
    clusters: np.ndarray | None = None
    num_chosen: int = 0

    def write_graphs(self, manifest: Manifest, tensors: Tensors, weights: WeightsFile, rule: Rule) -> Graphs:
        return {manifest.graph: _AssistantWriter(self, LayerWriter(self.config, tensors, weights, rule)).build()}


class _AssistantWriter:
    def __init__(self, shape: AssistantShape, write: LayerWriter) -> None:
        self.shape, self.write, self.config = shape, write, shape.config
        self.op, self.ints, self.constant = write.op, write.ints, write.constant
        self.sources = [i for i, layer in enumerate(self.config.layers) if layer.keys_of is None]

    def build(self) -> ir.Model:
        write, op, shape, tensors = self.write, self.op, self.shape, self.write.tensors
        parts = len(self.sources) + 1
        input_ids = ir.val("input_ids", ir.DataType.INT64, ["batch", "num_tokens"])
        size: list[str | int] = ["batch", "num_tokens", parts * shape.target_size]
        hidden = ir.val("hidden", ir.DataType.FLOAT, size)
        mask = ir.val("attention_mask", ir.DataType.INT64, ["batch", "total_tokens"])
        num_logits = ir.val("num_logits_to_keep", ir.DataType.INT64, [1])
        inputs, outputs, lengths = [input_ids, hidden, mask, num_logits], [], write.lengths(mask)
        given = write.nodes.split(write.as_activation(hidden), [f"given.{i}" for i in range(parts)])
        total = op("Shape", mask, start=1, end=2)
        held = []
        for i in self.sources:
            past, present = write.caches(i)
            self._append_keys(i, given[i], past, present, lengths)
            held.append([op("Slice", each, self.ints(0), total, self.ints(2)) for each in present])
            inputs += past
            outputs += present
        places = self._places(input_ids, held[0][1], total, lengths)
        embedded = write.scale(write.rows("embedding", input_ids), shape.embedding_scale)
        joined = op("Concat", embedded, given[-1], axis=-1)
        residual = write.product("join", joined)
        for i in range(len(self.sources), self.config.num_layers):
            residual = self._layer(i, residual, held, places)
        normed = write.norm(residual, "final_norm")
        state = write.as_float(write.product("back", normed))
        before = (parts - 1) * shape.target_size
        state = op("Pad", state, self.ints(0, 0, before, 0, 0, 0))
        state = make_output(state, "state", ir.DataType.FLOAT, size)
        logits = write.as_float(self._logits(write.last_rows(normed, num_logits)))
        shown = "batch", "num_logits", tensors["head"].rows
        logits = make_output(logits, "logits", ir.DataType.FLOAT, shown)
        return write.nodes.model(
            "assistant", inputs, [logits, state, *outputs], context_length=str(self.config.context_length)
        )

    def _append_keys(self, i: int, given: ir.Value, past: Values, present: Values, lengths: Lengths) -> None:
        """Keys and values of a layer of the target, of the states that go into it, after those that are held."""
        write, size, layer = self.write, self.config.head_size(i), self.config.layers[i]
        x = write.norm(given, f"{i}.input_norm")
        key = write.product(f"{i}.k", x)
        value = write.product(f"{i}.v", x) if layer.has_values else key
        ones = np.ones(size, write.floats)
        key = self._norm_heads(i, key, write.vector(f"{i}.k_norm"))
        value = self._norm_heads(i, value, write.weights.append(f"{i}.ones", [ones], [size]))
        assert layer.rotary is not None
        # Attention is computed for nothing: the operator is what appends to the cache in its place.
        write.nodes.node(
            "GroupQueryAttention",
            [key, key, value, *past, *lengths, *write.rotary_tables(layer.rotary)],
            outputs=[ir.Value(name=f"{i}.unused"), *present],
            do_rotary=1,
            num_heads=self.config.kv_heads(i),
            kv_num_heads=self.config.kv_heads(i),
        )

    def _norm_heads(self, i: int, x: ir.Value, gain: ir.Value) -> ir.Value:
        size = self.config.head_size(i)
        apart = self.op("Reshape", x, self.ints(0, 0, -1, size))
        return self.op("Reshape", self.write.rms_norm(apart, gain), self.ints(0, 0, -1))

    def _places(self, input_ids: ir.Value, values: ir.Value, total: ir.Value, lengths: Lengths) -> _Places:
        """The position of each row, [1, num_tokens], and the bias of what it sees, by whether there is a window.

        values: Of a layer, [1, heads, total, size], which are zeros where a token was drafted.
        """
        op, constant = self.op, self.constant
        largest = op("ReduceMax", op("Abs", values), self.ints(0, 1, 3), keepdims=0)
        is_known = op("Greater", largest, constant("nothing", np.array(0, self.write.floats)))
        slots = op("Range", constant("first", np.array(0)), op("Squeeze", total), constant("step", np.array(1)))
        own = op("Transpose", self.write.positions(input_ids, lengths), perm=[1, 0])
        seen = op("And", is_known, op("LessOrEqual", slots, own))
        count = op("ReduceSum", op("Cast", seen, to=int(ir.DataType.INT64)), self.ints(1), keepdims=1)
        biases, hides = {}, [constant(f"bias_{x:g}", np.array(x, self.write.floats)) for x in (0, _HIDDEN)]
        for window in dict.fromkeys(layer.sliding_window for layer in self.config.layers):
            if window is not None:  # of the target's tokens; its own would be one more
                reach = op("Sub", count, constant("reach", np.array(window + 1)))
                biases[True] = op("Where", op("And", seen, op("GreaterOrEqual", slots, reach)), *hides)
            else:
                biases[False] = op("Where", seen, *hides)
        return op("Transpose", count, perm=[1, 0]), biases

    def _layer(self, i: int, residual: ir.Value, held: Sequence[Values], places: _Places) -> ir.Value:
        write, op = self.write, self.op
        attended = self._attend(i, write.norm(residual, f"{i}.input_norm"), held, places)
        attended = write.norm(attended, f"{i}.attended_norm")
        normed, residual = write.add_norm(attended, residual, f"{i}.mlp_norm")
        fed = write.norm(write.mlp(i, normed), f"{i}.fed_norm")
        return write.scale_output(i, op("Add", fed, residual))

    def _attend(self, i: int, x: ir.Value, held: Sequence[Values], places: _Places) -> ir.Value:
        write, op, layer, config = self.write, self.op, self.config.layers[i], self.config
        assert layer.keys_of is not None
        assert layer.rotary is not None
        size, kv_heads = config.head_size(i), config.kv_heads(i)
        query = write.product(f"{i}.q", x)
        query = self._norm_heads(i, query, write.vector(f"{i}.q_norm"))
        query = write.rotate(query, layer.rotary, 0, places[0], i)
        by_head = self.ints(-1, kv_heads, config.num_heads // kv_heads, size)
        query = op("Transpose", op("Reshape", query, by_head), perm=[1, 2, 0, 3])
        # Of all heads that read the same keys: [kv_heads, 1, total, size].
        key, value = (op("Transpose", each, perm=[1, 0, 2, 3]) for each in held[layer.keys_of])
        scores = op("MatMul", query, op("Transpose", key, perm=[0, 1, 3, 2]))
        scores = op(
            "Add", write.scale(scores, config.attention_scale), places[1][layer.sliding_window is not None]
        )
        attended = op("Transpose", op("MatMul", op("Softmax", scores, axis=-1), value), perm=[2, 0, 1, 3])
        row = self.ints(1, -1, config.num_heads * size)
        return write.product(f"{i}.o", op("Reshape", attended, row))

    def _logits(self, x: ir.Value) -> ir.Value:
        """Logits of all tokens, or of those in the likeliest clusters, with all others hidden."""
        write, op, head = self.write, self.op, self.write.tensors["head"]
        if self.shape.clusters is None:
            return write.head("head", x)
        count = self.ints(self.shape.num_chosen)
        by_cluster = write.float_product("centroids", x)
        chosen = [ir.Value(name=name) for name in ("best", "chosen")]
        write.nodes.node("TopK", [by_cluster, count], chosen, axis=-1, sorted=0)
        clusters = self.shape.clusters.astype(np.int64)
        table = write.weights.append("clusters", [clusters], clusters.shape)
        ids = op("Gather", table, chosen[1], axis=0)
        ids = op("Reshape", ids, self.ints(0, 0, -1))
        rows = write.rows("head", ids)
        column = op("Unsqueeze", x, self.ints(-1))
        logits = op("Squeeze", op("MatMul", rows, column), self.ints(-1))
        shape = op("Concat", op("Shape", x, start=0, end=2), self.ints(head.rows), axis=0)
        hidden = op("Expand", self.constant("no_logit", np.array(_HIDDEN, write.floats)), shape)
        return op("ScatterElements", hidden, ids, logits, axis=2)


def _plan(source: HeadSource, target: LoadedSource) -> HeadPlan:
    text, reader = SourceSettings(source.settings.path, nested(source.settings, "text_config")), Reader(source)
    require_hidden_size(source, target, source.settings.count("backbone_hidden_size"))
    kinds = text.get("layer_types", [])
    sources = {kind: _last_with_keys(source, target, kind) for kind in dict.fromkeys(kinds)}
    tensors: dict[str, StoredTensor] = {}
    for number, i in enumerate(sources.values()):
        found = {role: target.tensors.get(f"{i}.{role}") for role in _KEY_ROLES}
        tensors |= {f"{number}.{role}": each for role, each in found.items() if each is not None}
    for number in range(len(kinds)):
        at = len(sources) + number
        own = {role: reader.take(f"layers.{number}.{name}") for role, name in _LAYER_NAMES.items()}
        tensors |= {f"{at}.{role}": each for role, each in own.items()}
    config = _config(text, target, tensors, kinds, sources)
    tensors |= {
        "embedding": target.tensors["embedding"],
        "join": reader.take("pre_projection.weight", config.hidden_size, 2 * target.config.hidden_size),
        "back": reader.take("post_projection.weight", target.config.hidden_size, config.hidden_size),
        "final_norm": reader.take("norm.weight", 1, config.hidden_size),
        "head": reader.take("embed_tokens.weight", target.config.vocab_size, config.hidden_size),
    }
    reader.optional("lm_head.weight")  # the same once more
    for i in range(len(sources), config.num_layers):
        own = {role: tensors[f"{i}.{role}"] for role in _LAYER_NAMES}
        require_shapes(source, own, layer_shapes(config, config.hidden_size, i))
    shape = AssistantShape(
        config=config, target_size=target.config.hidden_size, embedding_scale=target.config.embedding_scale
    )
    if source.settings.get("use_ordered_embeddings"):
        clusters = _clusters(source, target.config.vocab_size)
        tensors["centroids"] = reader.take("masked_embedding.centroids.weight", len(clusters), config.hidden_size)
        num_chosen = source.settings.count("centroid_intermediate_top_k", 32)
        shape = replace(shape, clusters=clusters, num_chosen=num_chosen)
    reader.require_all_taken("Gemma 4 assistant")
    before = tuple(i - 1 for i in sources.values())
    head = recurrent_head("assistant", (*before, target.config.num_layers), target, config)
    others = replace(config, layers=config.layers[: len(sources)]).other_heads
    return HeadPlan(
        head=replace(head, state_size=len(head.target_layers) * target.config.hidden_size, reads_all=True),
        kv_cache=KVCache(
            num_layers=len(sources), num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, other_heads=others
        ),
        tensors=tensors,
        write_graphs=shape.write_graphs,
        borrowed=("embedding", "keys"),
        vocabulary_heads=() if shape.num_chosen else ("head",),
    )


def _config(
    text: SourceSettings, target: LoadedSource, tensors: Tensors, kinds: Sequence[str], sources: Mapping[str, int]
) -> DecoderConfig:
    """The target's layers whose keys are read, and the assistant's own, which turn their queries as those do."""
    first, heads = len(sources), text.count("num_attention_heads")
    layers = [
        replace(
            target.config.layers[i],
            num_kv_heads=target.config.kv_heads(i),
            head_dim=target.config.head_size(i),
            intermediate_size=None,
        )
        for i in sources.values()
    ]
    of_kind = dict(zip(sources, range(first), strict=True))
    layers += [replace(layers[of_kind[kind]], keys_of=of_kind[kind]) for kind in kinds]
    return DecoderConfig(
        architecture="gemma4",
        hidden_size=tensors[f"{first}.o"].rows,
        intermediate_size=tensors[f"{first}.gate"].rows,
        num_heads=heads,
        num_kv_heads=target.config.kv_heads(next(iter(sources.values()))),
        head_dim=target.config.head_size(next(iter(sources.values()))),
        vocab_size=target.config.vocab_size,
        context_length=target.config.context_length,
        rms_eps=text.number("rms_norm_eps", 1e-6),
        layers=tuple(layers),
        activation="gelu_pytorch_tanh",
        attention_scale=1.0,
    )


def _last_with_keys(source: HeadSource, target: LoadedSource, kind: str) -> int:
    """The last layer of the target that makes keys for one kind of attention. Raises SourceError: None does."""
    layers = target.config.layers
    found = [
        i for i, layer in enumerate(layers)
        if layer.attends and layer.keys_of is None and (layer.sliding_window is not None) == (kind == _LOCAL)
    ]  # fmt: skip
    if not found or f"{found[-1]}.k" not in target.tensors or f"{found[-1]}.k_norm" not in target.tensors:
        raise SourceError(
            f"{source.path} reads the keys of a layer with {kind}, which {target.source.name} does not have; it "
            "was made for another model: name an assistant that was made for this one"
        )
    if not found[-1]:
        raise SourceError(f"{source.path} reads the embedding of its target, which is not supported")
    return found[-1]


def _clusters(source: HeadSource, vocab_size: int) -> np.ndarray:
    """The token of each place in each cluster. Raises SourceError: They are not all tokens, each once."""
    stored = source.integers.get("masked_embedding.token_ordering")
    count = source.settings.count("num_centroids", 2048)
    if stored is None or stored.count != vocab_size or vocab_size % count:
        raise SourceError(
            f"{source.path}: masked_embedding.token_ordering has {stored.count if stored else 'no'} entries, "
            f"wanted the {vocab_size} tokens of its target in {count} clusters of one size; the file is damaged"
        )
    ordering = stored.values()
    if not np.array_equal(np.sort(ordering), np.arange(vocab_size)):
        raise SourceError(
            f"{source.path}: masked_embedding.token_ordering names a token twice; the file is damaged"
        )
    return ordering.reshape(count, -1)


_MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
ASSISTANT_DIALECT = Dialect(
    name="MTP of Gemma 4 (assistant)",
    recognizes=lambda source: source.settings.get("model_type") in _MODEL_TYPES,
    plan=_plan,
)
