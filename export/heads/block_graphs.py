"""The graphs of a head that drafts a block of tokens in one pass (DFlash: arXiv:2602.06036; DSpark: 2607.05147).

DFlash 2 (inco.ai/blog/dflash2) has a convolution along the block before and after each part of a layer, whose
kernel is a constant for each number of a state plus a share that follows from the state, and chooses each token
among the likeliest by the one before it.

The known token and masks in the place of those that follow it are the rows of a block. Each sees all of the block,
or in a causal layer what is not after it, and in the keys and values of each layer a row for each token before the
block, or for the last of these where the layer has a window, made of the target's hidden states.

Inputs of the main graph, for a batch of one:
    input_ids            int64 [1, block]            the text's newest token, then masks
    hidden               float32 [1, new, state_size]  what the fuse graph gives for tokens before it; one at least
    attention_mask       int64 [1, total]            ones; total counts the tokens before the block
    num_logits_to_keep   int64 [1]                   how many tokens of the draft get logits
    past_key_values.{i}.key, .value                  of the tokens before the block
Outputs:
    logits               float32 [1, num_logits_to_keep, num_rows]   of the first tokens of the draft
    state                float32 [1, num_drafted, state_size]        after the final norm, by token of a draft
    present.{i}.key, .value                          with the rows of hidden after them, and none of the block
The step graph, of heads whose tokens depend on those drafted before them, takes one token of the draft:
    input_ids    int64 [1, 1]                  the token before
    hidden       float32 [1, 1, state_size]    a row of state
    logits_in    float32 [1, 1, num_rows]      a row of logits
    memory_in    float32 [1, 1, rank]          where the head keeps a memory; zeros at first
and gives logits, float32 [1, 1, num_rows], memory, and confidence, float32 [1, 1]: the chance that the token is
accepted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce

import numpy as np
import onnx_ir as ir

from edgespec.export.decoder_config import DecoderConfig
from edgespec.export.heads.recurrent_graphs import build_fuse
from edgespec.export.heads.step_graphs import StepWriter
from edgespec.export.layers import LayerWriter
from edgespec.export.nodes import Graphs, Values, make_output
from edgespec.export.precision import Rule
from edgespec.export.tensors import Tensors
from edgespec.export.weights import WeightsFile
from edgespec.manifest import Manifest

MARKOV_KINDS = ("vanilla", "gated", "rnn")
SELECTOR = "selector"
_HIDDEN = -30000.0  # added to scores; half floats hold it


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """How a head drafts a block.

    config: Its layers; its context_length is that of the text, after which a block begins.
    num_tokens: Tokens of a block, the known one included.
    skips_known: The row of the known token predicts nothing, so that a draft has one token less than the block.
    markov: One of MARKOV_KINDS or SELECTOR; None where a token does not depend on the one before it.
    num_candidates: Of a selector: among how many of the likeliest tokens it chooses.
    num_taps: Of the convolutions: how many rows of the block each reads, its own and those before it; 0 for none.
    group_size: How many numbers of a state have one share of the kernel.
    are_causal: True for each layer whose rows do not see those after them.
    counts_from_known: A window ends before the known token, for all rows; otherwise each row is in its own.
    has_confidence, confidence_reads_token: Whether there is a confidence, and whether of the token before, too.
    """

    config: DecoderConfig
    num_tokens: int
    skips_known: bool
    are_causal: tuple[bool, ...]
    counts_from_known: bool = False
    markov: str | None = None
    num_candidates: int = 0
    num_taps: int = 0
    group_size: int = 1
    has_confidence: bool = False
    confidence_reads_token: bool = False

    def write_graphs(self, manifest: Manifest, tensors: Tensors, weights: WeightsFile, rule: Rule) -> Graphs:
        head = manifest.head
        assert head is not None
        assert head.fuse_graph is not None
        writer = partial(LayerWriter, self.config, tensors, weights, rule)
        graphs = {manifest.graph: _BlockWriter(self, writer()).build()}
        graphs[head.fuse_graph] = build_fuse(writer(), norm_behind="state_norm")
        for file in head.step_graphs:
            graphs[file] = self._build_step(StepWriter(tensors, weights, rule))
        return graphs

    def _build_step(self, writer: StepWriter) -> ir.Model:
        op, head = writer.op, writer.tensors.get("head", writer.tensors["embedding"])
        input_ids = ir.val("input_ids", ir.DataType.INT64, [1, 1])
        given, hidden = writer.input_state("hidden", [1, 1, self.config.hidden_size])
        logits = ir.val("logits_in", ir.DataType.FLOAT, [1, 1, head.rows])
        inputs, outputs = [input_ids, given, logits], []
        token = writer.rows("markov_embedding", input_ids) if self.markov else None
        if token is not None:
            mixed = token
            if self.markov == SELECTOR:
                logits = self._select(writer, logits, op("Mul", token, writer.product("selector", hidden)))
            elif self.markov == "gated":
                gate = writer.product("markov_gate", op("Concat", hidden, token, axis=-1))
                mixed = op("Mul", op("Sigmoid", gate), token)
            elif self.markov == "rnn":
                rank = writer.tensors["markov_embedding"].columns
                kept, memory = writer.input_state("memory_in", [1, 1, rank])
                joined = writer.product("markov_joint", op("Concat", memory, token, hidden, axis=-1))
                gate, candidate, mixed = writer.split(joined, [rank] * 3)
                gate, mixed = op("Sigmoid", gate), op("Tanh", mixed)
                rest = op("Sub", writer.constant("one", np.array(1, writer.floats)), gate)
                memory = op("Add", op("Mul", gate, memory), op("Mul", rest, op("Tanh", candidate)))
                inputs.append(kept)
                outputs.append(writer.output("memory", memory, [1, 1, rank]))
            if self.markov != SELECTOR:
                bias = op("Cast", writer.head("markov_head", mixed), to=int(ir.DataType.FLOAT))
                logits = op("Add", logits, bias)
        outputs.append(writer.output("logits", logits, [1, 1, head.rows]))
        if self.has_confidence:
            features = hidden
            if self.confidence_reads_token:
                assert token is not None
                features = op("Concat", hidden, token, axis=-1)
            found = writer.float_product("confidence", features, "confidence_matrix")
            found = op("Sigmoid", op("Add", found, writer.vector("confidence_bias")))
            found = op("Reshape", found, writer.ints(1, 1))
            outputs.append(writer.output("confidence", found, [1, 1]))
        return writer.nodes.model("step", inputs, outputs)

    def _select(self, writer: StepWriter, logits: ir.Value, known: ir.Value) -> ir.Value:
        """Logits of the likeliest tokens by the one before, of which known is made; others are hidden."""
        op, count = writer.op, writer.ints(self.num_candidates)
        best, ids = writer.nodes.node("TopK", [logits, count], [ir.Value(name="best"), ir.Value(name="ids")])
        products = op("Mul", writer.rows("markov_head", ids), op("Unsqueeze", known, writer.ints(2)))
        edges = op("ReduceSum", products, writer.ints(3), keepdims=0)
        scores = op("Add", best, op("Cast", edges, to=int(ir.DataType.FLOAT)))
        hidden = op("Expand", writer.constant("no_logit", np.array(_HIDDEN, np.float32)), op("Shape", logits))
        return op("ScatterElements", hidden, ids, scores, axis=2)


class _BlockWriter:
    """Writes the main graph."""

    def __init__(self, block: BlockShape, write: LayerWriter) -> None:
        self.block, self.write, self.config = block, write, block.config
        self.op, self.ints, self.constant = write.op, write.ints, write.constant
        self.groups = self.config.num_heads // self.config.num_kv_heads
        self.seen: dict[int | None, tuple[ir.Value, ir.Value | None]] = {}
        num_tokens = block.num_tokens
        self.input_ids = ir.val("input_ids", ir.DataType.INT64, [1, num_tokens])
        self.hidden = ir.val("hidden", ir.DataType.FLOAT, [1, "new", self.config.hidden_size])
        self.mask = ir.val("attention_mask", ir.DataType.INT64, [1, "total"])
        self.lengths = write.lengths(self.mask)
        self.num_before = self.op("Shape", self.mask, start=1, end=2)
        places = self.constant("places", np.arange(num_tokens)[None])
        self.positions = self.op("Add", places, self.num_before)
        self.before = write.as_activation(self.hidden)

    def build(self) -> ir.Model:
        config, write, num_tokens = self.config, self.write, self.block.num_tokens
        num_logits = ir.val("num_logits_to_keep", ir.DataType.INT64, [1])
        inputs, outputs = [self.input_ids, self.hidden, self.mask, num_logits], []
        embedded, head = write.embedding(self.input_ids)
        residual = write.scale(embedded, config.embedding_scale)
        normed = write.norm(residual, "0.input_norm")
        for i in range(config.num_layers):
            past, present = write.caches(i)
            given, finish = self._convolve(f"{i}.attention", normed)
            attended = self._attention(i, given, past, present)
            normed, residual = write.add_norm(finish(attended), residual, f"{i}.mlp_norm")
            following = f"{i + 1}.input_norm" if i + 1 < config.num_layers else "final_norm"
            given, finish = self._convolve(f"{i}.mlp", normed)
            normed, residual = write.add_norm(finish(write.mlp(i, given)), residual, following)
            inputs += past
            outputs += present
        first = 1 if self.block.skips_known else 0
        rows = self._rows(normed, first, num_tokens) if first else normed
        num_drafted = num_tokens - first
        state = write.output("state", rows, [1, num_drafted, config.hidden_size])
        wanted = self.op("Slice", rows, self.ints(0), num_logits, self.ints(1))
        logits = write.as_float(write.cap(head(write.scale(wanted, config.logit_scale))))
        num_columns = write.tensors.get("head", write.tensors["embedding"]).rows
        logits = make_output(logits, "logits", ir.DataType.FLOAT, [1, "num_logits", num_columns])
        return write.nodes.model(
            "block", inputs, [logits, state, *outputs], context_length=str(config.context_length)
        )

    def _convolve(self, part: str, x: ir.Value) -> tuple[ir.Value, Callable[[ir.Value], ir.Value]]:
        """What a part of a layer reads in place of x, and a function of what it gives; the same without taps."""
        num_taps, op, write = self.block.num_taps, self.op, self.write
        if not num_taps:
            return x, lambda y: y
        size = self.block.group_size
        groups = self.config.hidden_size // size
        names = [f"{part}_kernels.{i}" for i in range(2 * num_taps)]
        shares = write.nodes.split(write.product(f"{part}_kernels", x), names)
        kernels = write.tensors[f"{part}_kernel"].vector().astype(write.floats).reshape(-1, groups, size)
        one_each, taps = self.ints(self.block.num_tokens, groups, 1), []
        for i, (share, kernel) in enumerate(zip(shares, kernels, strict=True)):
            own = write.weights.append(f"{part}_kernel.{i}", [kernel], [groups, size])
            taps.append(op("Add", own, op("Reshape", share, one_each)))
        return self._sum_rows(x, taps[:num_taps]), partial(self._sum_rows, taps=taps[num_taps:])

    def _sum_rows(self, x: ir.Value, taps: Values) -> ir.Value:
        """Each row of a block times the first tap, plus the row before it times the second, and so on."""
        op, num_tokens, hidden = self.op, self.block.num_tokens, self.config.hidden_size
        size = self.block.group_size
        rows, terms = op("Reshape", x, self.ints(num_tokens, -1, size)), []
        for tap, kernel in enumerate(taps):
            shifted = rows
            if tap:
                none = self.constant(f"no_rows_{tap}", np.zeros((tap, hidden // size, size), self.write.floats))
                kept = op("Slice", rows, self.ints(0), self.ints(-tap), self.ints(0))
                shifted = op("Concat", none, kept, axis=0)
            terms.append(op("Mul", kernel, shifted))
        return op("Reshape", reduce(partial(op, "Add"), terms), self.ints(1, num_tokens, hidden))

    def _rows(self, x: ir.Value, start: int, stop: int) -> ir.Value:
        return self.op("Slice", x, self.ints(start), self.ints(stop), self.ints(1))

    def _attention(self, i: int, x: ir.Value, past: Values, present: Values) -> ir.Value:
        op, write, last = self.op, self.write, np.iinfo(np.int64).max
        query = self._project(i, "q", x)
        # One product for the rows before the block and those of the block reads the weights once.
        rows = op("Concat", self.before, x, axis=1)
        key, value = (self._project(i, part, rows) for part in "kv")
        old = [self._rows(each, 0, -self.block.num_tokens) for each in (key, value)]
        key, value = (self._rows(each, -self.block.num_tokens, last) for each in (key, value))
        rotary = self.config.layers[i].rotary
        assert rotary is not None
        # Attention among the rows before the block is computed for nothing: the operator is what appends to the
        # cache in its place, and with keys for queries costs little.
        write.nodes.node(
            "GroupQueryAttention",
            [old[0], *old, *past, *self.lengths, *write.rotary_tables(rotary)],
            outputs=[ir.Value(name=f"{i}.unused"), *present],
            do_rotary=1,
            num_heads=self.config.num_kv_heads,
            kv_num_heads=self.config.num_kv_heads,
            scale=self.config.attention_scale,
        )
        query, key = (write.rotate(each, rotary, part, self.positions) for part, each in enumerate((query, key)))
        attended = self._attend(i, query, (present[0], key), (present[1], value))
        return write.product(f"{i}.o", attended)

    def _project(self, i: int, part: str, x: ir.Value) -> ir.Value:
        """Queries, keys or values of all heads, [1, num_rows, heads * head_dim], normed where the head does so."""
        tensors, role = self.write.tensors, f"{i}.{part}"
        projected = self.write.product(role, x)
        if f"{role}_norm" not in tensors:
            return projected
        heads = self.op("Reshape", projected, self.ints(0, 0, -1, self.config.head_dim))
        return self.op("Reshape", self.write.norm(heads, f"{role}_norm"), self.ints(0, 0, tensors[role].rows))

    def _seen(self, window: int | None) -> tuple[ir.Value, ir.Value | None]:
        """The first token before the block that a layer sees, and the bias of those that not all rows see."""
        if window is None:
            return self.ints(0), None
        if window not in self.seen:
            op, num_tokens = self.op, self.block.num_tokens
            reach = (
                np.full(num_tokens, window) if self.block.counts_from_known else window - 1 - np.arange(num_tokens)
            )
            wanted = op("Sub", self.num_before, self.constant(f"reach_{window}", reach[:1]))
            start, bias = op("Max", wanted, self.ints(0)), None
            if reach[-1] < reach[0]:
                count = op("Squeeze", op("Sub", self.num_before, start))
                # How far before the block each token lies that is seen.
                behind = op(
                    "Range", count, self.constant("none", np.array(0)), self.constant("back", np.array(-1))
                )
                rows = self.constant(f"reach_{window}_rows", np.tile(reach, self.groups)[:, None])
                hides, shows = (self.constant(f"bias_{x:g}", np.array(x, self.write.floats)) for x in (_HIDDEN, 0))
                bias = op("Where", op("Greater", behind, rows), hides, shows)
            self.seen[window] = start, bias
        return self.seen[window]

    def _hidden_rows(self, i: int, window: int | None) -> ir.Value | None:
        """The bias of rows of the block that not all see, [groups * num_tokens, num_tokens]; None where all do."""
        behind = np.subtract.outer(*[np.arange(self.block.num_tokens)] * 2)
        hidden = behind < 0 if self.block.are_causal[i] else np.zeros_like(behind, bool)
        if window is not None and not self.block.counts_from_known:
            hidden |= abs(behind) >= window
        if not hidden.any():
            return None
        bias = np.where(np.tile(hidden, (self.groups, 1)), _HIDDEN, 0).astype(self.write.floats)
        return self.constant(f"{i}.hidden_rows", bias)

    def _attend(self, i: int, query: ir.Value, keys: Values, values: Values) -> ir.Value:
        """Attention of the block's rows to the tokens before it, whose keys and values are first, and to it."""
        op, config, num_tokens = self.op, self.config, self.block.num_tokens
        window = config.layers[i].sliding_window
        first, bias = self._seen(window)
        held = [op("Slice", each[0], first, self.num_before, self.ints(2)) for each in (keys, values)]
        old_keys, old_values = (op("Squeeze", each, self.ints(0)) for each in held)
        kv_heads, head_dim, groups = config.num_kv_heads, config.head_dim, self.groups
        by_head = self.ints(num_tokens, kv_heads, groups, head_dim)
        stacked = self.ints(kv_heads, groups * num_tokens, head_dim)
        # Heads that share keys are rows of one product.
        query = op("Reshape", op("Transpose", op("Reshape", query, by_head), perm=[1, 2, 0, 3]), stacked)
        query = self.write.scale(query, config.attention_scale)
        own = self.ints(num_tokens, kv_heads, head_dim)
        key, value = (op("Transpose", op("Reshape", each[1], own), perm=[1, 0, 2]) for each in (keys, values))
        if self.write.rule.has_fused_products:
            products = [op("FusedMatMul", query, each, transB=1) for each in (old_keys, key)]
        else:
            products = [op("MatMul", query, op("Transpose", each, perm=[0, 2, 1])) for each in (old_keys, key)]
        biases = (bias, self._hidden_rows(i, window))
        scores = [each if by is None else op("Add", each, by) for each, by in zip(products, biases, strict=True)]
        shares = op("Softmax", op("Concat", *scores, axis=-1), axis=-1)
        border, end = self.ints(-num_tokens), self.ints(int(np.iinfo(np.int64).max))
        of_text = op("Slice", shares, self.ints(0), border, self.ints(2))
        of_block = op("Slice", shares, border, end, self.ints(2))
        attended = op("Add", op("MatMul", of_text, old_values), op("MatMul", of_block, value))
        apart = self.ints(kv_heads, groups, num_tokens, head_dim)
        row = self.ints(1, num_tokens, config.num_heads * head_dim)
        return op("Reshape", op("Transpose", op("Reshape", attended, apart), perm=[2, 0, 1, 3]), row)
