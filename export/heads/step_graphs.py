"""Heads that have a graph for each token of a draft and no attention: names of their tensors, plans and graphs.

Inputs of each:
    input_ids  int64 [1, 1]           the token before: the text's newest, then the one that was drafted before
    hidden     float32 [1, 1, width]  the target's hidden state, then the state that the graph before gave
Outputs:
    logits     float32 [1, 1, rows]
    state      float32 [1, 1, next_width]
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from edgespec.errors import SourceError
from edgespec.export.heads.head_source import HeadPlan, HeadSource
from edgespec.export.linear import LinearWriter
from edgespec.export.nodes import Nodes, make_output, typed_value
from edgespec.export.precision import Rule
from edgespec.export.sources import LoadedSource
from edgespec.export.tensors import StoredTensor
from edgespec.export.weights import WeightsFile
from edgespec.manifest import Head, KVCache, Manifest
from edgespec.types import TokenIds

_EPS = 1e-6  # of the norms of MLP and LSTM speculators, whose settings do not state it
_NO_CACHE = KVCache(num_layers=0, num_kv_heads=1, head_dim=1)
# Names before those of the tensors: of the module that held the head where it was saved.
_PREFIXES = ("medusa_head.", "medusa_heads.", "hydra_head.", "speculator.")


class StepWriter:
    """Writes the parts of one graph."""

    def __init__(self, tensors: Mapping[str, StoredTensor], weights: WeightsFile, rule: Rule) -> None:
        self.tensors, self.weights = tensors, weights
        self.nodes = Nodes()
        self.op, self.constant = self.nodes.op, self.nodes.constant
        self.linear = LinearWriter(self.nodes, weights, rule)
        self.type = ir.DataType.FLOAT16 if rule.is_half else ir.DataType.FLOAT
        self.floats = np.float16 if rule.is_half else np.float32

    def input_state(self, name: str, shape: Sequence[str | int]) -> tuple[ir.Value, ir.Value]:
        """An input of float32, and its value in the type of activations."""
        given = typed_value(name, ir.DataType.FLOAT, shape)
        return given, given if self.type == ir.DataType.FLOAT else self.op("Cast", given, to=int(self.type))

    def output(self, name: str, x: ir.Value, shape: Sequence[str | int]) -> ir.Value:
        """An output of float32, apart from x, which may be an input."""
        return make_output(self.op("Cast", x, to=int(ir.DataType.FLOAT)), name, ir.DataType.FLOAT, shape)

    def multiply(self, role: str, x: ir.Value) -> ir.Value:
        """x times the matrix of a role, plus its bias if there is one."""
        return self.linear(role, x, [self.tensors[role]], [self.tensors.get(f"{role}_bias")])[0]

    def head(self, role: str, x: ir.Value) -> ir.Value:
        return self.linear.head(role, x, self.tensors[role], self.tensors.get(f"{role}_bias"))

    def rows(self, role: str, input_ids: ir.Value) -> ir.Value:
        return self.linear.rows(role, self.tensors[role], input_ids)

    def vector(self, role: str) -> ir.Value:
        values = self.tensors[role].vector().astype(self.floats)
        return self.weights.append(role, [values], values.shape)

    def norm(self, role: str, x: ir.Value, eps: float = _EPS) -> ir.Value:
        """RMSNorm of x with the gain of a role, plus its bias if there is one."""
        normed = self.normalize(x, self.vector(role), eps)
        return self.op("Add", normed, self.vector(f"{role}_bias")) if f"{role}_bias" in self.tensors else normed

    def normalize(self, x: ir.Value, gain: ir.Value, eps: float = _EPS) -> ir.Value:
        return self.op("SimplifiedLayerNormalization", x, gain, axis=-1, epsilon=eps, stash_type=1)

    def scale(self, x: ir.Value, scale: float) -> ir.Value:
        return self.op("Mul", x, self.constant(f"scale_{scale:.9g}", np.array(scale, self.floats)))

    def silu(self, x: ir.Value) -> ir.Value:
        return self.op("QuickGelu", x, alpha=1.0)

    def gelu(self, x: ir.Value) -> ir.Value:
        return self.op("Gelu", x, approximate="none")

    def split(self, x: ir.Value, sizes: Sequence[int]) -> list[ir.Value]:
        name = f"split_{len(self.nodes.nodes)}"
        outputs = [ir.Value(name=f"{name}.{i}") for i in range(len(sizes))]
        return self.nodes.node("Split", [x, self.constant(name, np.array(sizes))], outputs=outputs, axis=-1)


Body = Callable[[StepWriter, ir.Value, ir.Value], tuple[ir.Value, ir.Value]]
"""From input_ids, [1, 1], and hidden, [1, 1, width], to what the vocabulary head reads and the next state."""


@dataclass(frozen=True, kw_only=True)
class StepGraph:
    """One of the graphs.

    head: Role of its vocabulary head among the tensors.
    """

    file: str
    width: int
    next_width: int
    head: str
    body: Body


def write_steps(
    steps: Sequence[StepGraph], tensors: Mapping[str, StoredTensor], weights: WeightsFile, rule: Rule
) -> dict[str, ir.Model]:
    """Write the weights, and return the graphs over them by file name."""
    return {step.file: _write_step(step, StepWriter(tensors, weights, rule)) for step in steps}


def _write_step(step: StepGraph, writer: StepWriter) -> ir.Model:
    input_ids = typed_value("input_ids", ir.DataType.INT64, [1, 1])
    given, hidden = writer.input_state("hidden", [1, 1, step.width])
    features, state = step.body(writer, input_ids, hidden)
    rows = writer.tensors[step.head].rows
    logits = writer.output("logits", writer.head(step.head, features), [1, 1, rows])
    outputs = [logits, writer.output("state", state, [1, 1, step.next_width])]
    return writer.nodes.model("step", [input_ids, given], outputs)


def medusa_step(i: int, num_blocks: int) -> Body:
    """Residual blocks on the target's hidden state, the state of all steps (Cai et al., arXiv:2401.10774)."""

    def body(writer: StepWriter, input_ids: ir.Value, hidden: ir.Value) -> tuple[ir.Value, ir.Value]:
        x = hidden
        for block in range(num_blocks):
            x = writer.op("Add", x, writer.silu(writer.multiply(f"{i}.{block}", x)))
        return x, hidden

    return body


def hydra_step(i: int, num_blocks: int) -> Body:
    """Blocks on the hidden state and the embeddings of all tokens since (Ankner et al., arXiv:2402.05109).

    All of these, one after the other, are the state. The first block projects what it adds to as well.
    """

    def body(writer: StepWriter, input_ids: ir.Value, hidden: ir.Value) -> tuple[ir.Value, ir.Value]:
        state = writer.op("Concat", hidden, writer.rows("embedding", input_ids), axis=-1)
        active = writer.silu(writer.multiply(f"{i}.0", state))
        x = writer.op("Add", writer.multiply(f"{i}.residual", state), active)
        for block in range(1, num_blocks):
            x = writer.op("Add", x, writer.silu(writer.multiply(f"{i}.{block}", x)))
        return x, state

    return body


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """The roles of a step of an MLP or LSTM speculator among the tensors, and how state and token are mixed.

    alpha: Weight of the token's embedding over that of the state.
    scales_input: Whether the target's hidden state is normed and divided by √2.
    last_token: The last one with a row in the embedding, which later ones are read as; None where each has one.
    """

    projection: str
    embedding: str
    norm: str
    alpha: float
    scales_input: bool
    last_token: int | None = None

    def token(self, writer: StepWriter, input_ids: ir.Value) -> ir.Value:
        """The weighted embedding of a token."""
        if self.last_token is not None:
            # Gathered outside of a matrix of blocks, a row would be whatever lies there.
            input_ids = writer.op("Min", input_ids, writer.constant("last_token", np.array(self.last_token)))
        return writer.scale(writer.rows(self.embedding, input_ids), self.alpha)

    def scaled(self, writer: StepWriter, hidden: ir.Value, width: int) -> ir.Value:
        if not self.scales_input:
            return hidden
        gain = np.full(width, 0.5**0.5, writer.floats)
        return writer.normalize(hidden, writer.weights.append("input_gain", [gain], gain.shape))


def mlp_step(mixing: Mixing, width: int) -> Body:
    """state = gelu(norm(projected state + alpha · embedding)) (Wertheimer et al., arXiv:2404.19124)."""

    def body(writer: StepWriter, input_ids: ir.Value, hidden: ir.Value) -> tuple[ir.Value, ir.Value]:
        projected = writer.multiply(mixing.projection, mixing.scaled(writer, hidden, width))
        token = mixing.token(writer, input_ids)
        state = writer.gelu(writer.norm(mixing.norm, writer.op("Add", projected, token)))
        return state, state

    return body


def lstm_step(mixing: Mixing, width: int, size: int, *, is_first: bool) -> Body:
    """A cell with gates, whose four parts add the same embedding; its state is output and cell, in this order.

    The first step's cell is zero, and its state the target's hidden state.
    """

    def body(writer: StepWriter, input_ids: ir.Value, hidden: ir.Value) -> tuple[ir.Value, ir.Value]:
        cell, given = None, hidden
        if is_first:
            given = mixing.scaled(writer, hidden, width)
        else:
            given, cell = writer.split(hidden, [size, size])
        token = mixing.token(writer, input_ids)
        parts = writer.split(writer.multiply(mixing.projection, given), [size] * 4)
        forget, enter, leave, candidate = (writer.op("Add", part, token) for part in parts)
        candidate = writer.gelu(writer.norm(mixing.norm, candidate))
        filled = writer.op("Mul", candidate, writer.op("Sigmoid", enter))
        if cell is not None:
            filled = writer.op("Add", writer.op("Mul", cell, writer.op("Sigmoid", forget)), filled)
        active = writer.gelu(writer.norm("state_norm", filled))
        output = writer.op("Mul", active, writer.op("Sigmoid", leave))
        return output, writer.op("Concat", output, filled, axis=-1)

    return body


def step_graph(i: int) -> str:
    """The file name of the graph of a step."""
    return f"model_step_{i}.onnx"


def without_prefixes(source: HeadSource) -> HeadSource:
    """A head whose names of tensors begin with their own module."""

    def short(name: str) -> str:
        return next((name.removeprefix(prefix) for prefix in _PREFIXES if name.startswith(prefix)), name)

    return replace(
        source,
        tensors={short(name): tensor for name, tensor in source.tensors.items()},
        integers={short(name): found for name, found in source.integers.items()},
    )


def plan_steps(
    name: str,
    method: str,
    target: LoadedSource,
    steps: list[StepGraph],
    tensors: Mapping[str, StoredTensor],
    *,
    num_steps: int | None = None,
    tokens: TokenIds | None = None,
    borrowed: tuple[str, ...] = (),
    layer: int | None = None,
) -> HeadPlan:
    """The plan of a head.

    Args:
        num_steps: The steps of a draft, where the last graph serves several.
        layer: The layer of the target after which it reads; None for the state after the final norm.
    """
    files = [step.file for step in steps]
    files += files[-1:] * ((num_steps or len(files)) - len(files))

    def write(
        manifest: Manifest, roles: Mapping[str, StoredTensor], weights: WeightsFile, rule: Rule
    ) -> dict[str, ir.Model]:
        return write_steps(steps, roles, weights, rule)

    return HeadPlan(
        dialect=name,
        head=Head(
            method=method,
            kind="steps",
            target_layers=(target.config.num_layers if layer is None else layer,),
            target_hidden_size=target.config.hidden_size,
            state_size=steps[0].width,
            step_graphs=tuple(files),
        ),
        kv_cache=_NO_CACHE,
        tensors=tensors,
        write_graphs=write,
        borrowed=borrowed,
        tokens=tokens,
        vocabulary_heads=tuple(role for role in tensors if role.endswith(("head", "head_bias"))),
        graph=files[0],
    )


def require_all_used(source: HeadSource, tensors: Mapping[str, StoredTensor], pattern: str) -> None:
    """Raises SourceError: A tensor whose name has a pattern is in no graph, as where one before it is missing."""
    used = {tensor.name for tensor in tensors.values()}
    for name, tensor in source.tensors.items():
        if re.fullmatch(pattern, name) and tensor.name not in used:
            raise SourceError(
                f"{source.path} has tensor {name}, which is of no whole part of it: a tensor beside or "
                "before it is missing; fetch it again"
            )


def recognizer(*patterns: str) -> Callable[[HeadSource], bool]:
    """A function that tells if a head has a tensor for each of some patterns of names."""

    def recognizes(source: HeadSource) -> bool:
        names = without_prefixes(source).tensors
        return all(any(re.fullmatch(pattern, name) for name in names) for pattern in patterns)

    return recognizes
