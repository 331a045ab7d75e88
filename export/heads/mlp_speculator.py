"""MLP speculators (Wertheimer et al., arXiv:2404.19124) and LSTM speculators, of IBM and Snowflake.

Names of their tensors have one number, or two where parts are sequences of one.
"""

import re
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt

import numpy as np
import onnx_ir as ir

from edgespec.errors import SourceError
from edgespec.export.heads.head_source import Dialect, HeadPlan, HeadSource
from edgespec.export.heads.head_tensors import Reader, require_hidden_size
from edgespec.export.heads.step_graphs import Step, StepWriter, plan_steps, recognizer, without_prefixes
from edgespec.export.heads.vocabulary import fit_vocabulary, last_known_token
from edgespec.export.sources import LoadedSource
from edgespec.export.tensors import StoredTensor

_MAX_STEPS = 32


@dataclass(frozen=True, kw_only=True)
class _Mixing:
    """The roles of a step of an MLP or LSTM speculator among the tensors, and how state and token are mixed.

    alpha: Weight of the token's embedding over that of the state.
    width: Of the state that it takes.
    scales_input: Whether the target's hidden state is normed and divided by √2.
    last_token: The last one with a row in the embedding, which later ones are read as; None where each has one.
    """

    projection: str
    embedding: str
    norm: str
    alpha: float
    width: int
    scales_input: bool
    last_token: int | None = None

    def token(self, writer: StepWriter, input_ids: ir.Value) -> ir.Value:
        """The weighted embedding of a token."""
        if self.last_token is not None:
            # Gathered outside of a matrix of blocks, a row would be whatever lies there.
            input_ids = writer.op("Min", input_ids, writer.constant("last_token", np.array(self.last_token)))
        return writer.scale(writer.rows(self.embedding, input_ids), self.alpha)

    def scaled(self, writer: StepWriter, hidden: ir.Value) -> ir.Value:
        if not self.scales_input:
            return hidden
        gain = np.full(self.width, 0.5**0.5, writer.floats)
        return writer.normalize(hidden, writer.weights.append("input_gain", [gain], gain.shape))


def _mlp_step(
    mixing: _Mixing, writer: StepWriter, input_ids: ir.Value, hidden: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """state = gelu(norm(projected state + alpha · embedding))."""
    projected = writer.product(mixing.projection, mixing.scaled(writer, hidden))
    token = mixing.token(writer, input_ids)
    state = writer.gelu(writer.norm(mixing.norm, writer.op("Add", projected, token)))
    return state, state


def _lstm_step(
    mixing: _Mixing, is_first: bool, writer: StepWriter, input_ids: ir.Value, hidden: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """A cell with gates, whose four parts add the same embedding; its state is output and cell, in this order.

    The first step's cell is zero, and its state the target's hidden state.
    """
    size, cell = writer.tensors["state_norm"].columns, None
    if is_first:
        given = mixing.scaled(writer, hidden)
    else:
        given, cell = writer.split(hidden, [size, size])
    token = mixing.token(writer, input_ids)
    parts = writer.split(writer.product(mixing.projection, given), [size] * 4)
    forget, enter, leave, candidate = (writer.op("Add", part, token) for part in parts)
    candidate = writer.gelu(writer.norm(mixing.norm, candidate))
    filled = writer.op("Mul", candidate, writer.op("Sigmoid", enter))
    if cell is not None:
        filled = writer.op("Add", writer.op("Mul", cell, writer.op("Sigmoid", forget)), filled)
    active = writer.gelu(writer.norm("state_norm", filled))
    output = writer.op("Mul", active, writer.op("Sigmoid", leave))
    return output, writer.op("Concat", output, filled, axis=-1)


def _unnested(source: HeadSource) -> HeadSource:
    """A head whose names of tensors have one number. Raises SourceError: A part is a sequence of several."""
    source = without_prefixes(source)
    several = [name for name in source.tensors if re.fullmatch(r"(emb|proj|ln)\.\d+\.[1-9]\d*\.\w+", name)]
    if several:
        raise SourceError(
            f"{source.path} has tensor {several[0]}: speculators whose parts have several layers are not read; "
            "give one with a single emb_dim, proj_dim and inner_dim"
        )
    names = {re.sub(r"^(emb|proj|ln)\.(\d+)\.0\.", r"\1.\2.", name): name for name in source.tensors}
    return replace(source, tensors={new: source.tensors[name] for new, name in names.items()})


def _num_steps(source: HeadSource) -> tuple[int, int]:
    """The steps that a head was trained for, and those that it drafts. Raises SourceError: They are too many."""
    trained = source.settings.count("n_predict")
    drafted = source.settings.count("num_lookahead_tokens", trained)
    if not max(trained, drafted) <= _MAX_STEPS:
        raise SourceError(
            f"{source.settings.path} drafts {max(trained, drafted)} tokens, at most {_MAX_STEPS} are read"
        )
    return trained, drafted


def _alpha(num_trained: int, size: int) -> float:
    """Weight of an embedding over that of the state, which is half of the whole after num_trained steps."""
    state: float = 0.5 ** (0.5 / num_trained)
    return sqrt((1 - state**2) * (size / 2)) / state


def _plan_mlp(source: HeadSource, target: LoadedSource) -> HeadPlan:
    reader = Reader(source := _unnested(source))
    first = reader.take("proj.0.weight")
    hidden, size = target.config.hidden_size, first.rows
    require_hidden_size(source, target, first.columns)
    trained, drafted = _num_steps(source)
    is_tied = bool(source.settings.get("tie_weights"))
    # Of tied steps the first and the second have projections of their own; the second serves the others too.
    num_graphs = min(drafted, 2) if is_tied else min(drafted, trained)
    tensors: dict[str, StoredTensor] = {}
    heads: list[StoredTensor] = []
    steps = []
    for i in range(num_graphs):
        own = 0 if is_tied else i
        width = hidden if i == 0 else size
        tensors[f"{i}.proj"] = reader.take(f"proj.{i}.weight", size, width)
        tensors[f"{own}.embedding"] = reader.take(f"emb.{own}.weight", columns=size)
        tensors[f"{own}.norm"] = reader.take(f"ln.{own}.weight", 1, size)
        tensors[f"{own}.norm_bias"] = reader.take(f"ln.{own}.bias", 1, size)
        if own == len(heads):
            heads.append(reader.take(f"head.{own}.weight", columns=size))
        mixing = _Mixing(
            projection=f"{i}.proj",
            embedding=f"{own}.embedding",
            norm=f"{own}.norm",
            alpha=_alpha(trained, size),
            width=width,
            scales_input=i == 0 and bool(source.settings.get("scale_input")),
            last_token=last_known_token(source, tensors[f"{own}.embedding"], target),
        )
        steps.append(Step(width, size, f"{own}.head", partial(_mlp_step, mixing)))
    tokens = fit_vocabulary(source, heads, target)
    tensors |= {f"{i}.head": head for i, head in enumerate(heads)}
    num_steps = drafted if is_tied else num_graphs
    return plan_steps("mlp_speculator", target, steps, tensors, num_steps=num_steps, tokens=tokens)


def _plan_lstm(source: HeadSource, target: LoadedSource) -> HeadPlan:
    reader = Reader(source := without_prefixes(source))
    if "input_emb.0.weight" in source.tensors:
        raise SourceError(
            f"{source.path} has an embedding for each gate, which is not read; give one with tie_lstm_embs"
        )
    first = reader.take("projs.0.weight")
    hidden, size = target.config.hidden_size, first.rows // 4
    require_hidden_size(source, target, first.columns)
    trained, drafted = _num_steps(source)
    tensors = {
        "0.proj": reader.take("projs.0.weight", 4 * size, hidden),
        "1.proj": reader.take("projs.1.weight", 4 * size, size),
        "embedding": reader.take("forget_emb.0.weight", columns=size),
    }
    for role, name in (("norm", "cell_ln"), ("state_norm", "state_ln")):
        tensors[role] = reader.take(f"{name}.0.weight", 1, size)
        tensors[f"{role}_bias"] = reader.take(f"{name}.0.bias", 1, size)
    heads = [reader.take("head.0.weight", columns=size)]
    tokens = fit_vocabulary(source, heads, target)
    tensors["head"] = heads[0]
    steps = []
    for i in range(min(drafted, 2)):
        width = hidden if i == 0 else 2 * size
        mixing = _Mixing(
            projection=f"{i}.proj",
            embedding="embedding",
            norm="norm",
            alpha=_alpha(trained, size),
            width=width,
            scales_input=i == 0 and bool(source.settings.get("scale_input")),
            last_token=last_known_token(source, tensors["embedding"], target),
        )
        steps.append(Step(width, 2 * size, "head", partial(_lstm_step, mixing, i == 0)))
    return plan_steps("mlp_speculator", target, steps, tensors, num_steps=drafted, tokens=tokens)


SPECULATOR_DIALECTS: tuple[Dialect, ...] = (
    Dialect(
        name="LSTM speculator",
        recognizes=recognizer(r"forget_emb\.0\.weight", r"projs\.0\.weight"),
        plan=_plan_lstm,
    ),
    Dialect(
        name="MLP speculator",
        recognizes=recognizer(r"emb\.0\.(0\.)?weight", r"proj\.0\.(0\.)?weight", r"head\.0\.weight"),
        plan=_plan_mlp,
    ),
)
