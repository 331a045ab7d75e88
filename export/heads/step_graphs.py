"""Heads that have a graph for each token of a draft and no attention: names of their tensors, plans and writers.

Inputs of each:
    input_ids  int64 [1, 1]           the token before: the text's newest, then the one that was drafted before
    hidden     float32 [1, 1, width]  the target's hidden state, then the state that the graph before gave
Outputs:
    logits     float32 [1, 1, rows]
    state      float32 [1, 1, next_width]
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from edgespec.export.heads.head_source import HeadPlan, HeadSource
from edgespec.export.linear import PartWriter
from edgespec.export.nodes import Graphs
from edgespec.export.precision import Rule
from edgespec.export.sources import LoadedSource
from edgespec.export.tensors import Tensors
from edgespec.export.weights import WeightsFile
from edgespec.manifest import Head, Manifest
from edgespec.manifest.caches import KVCache
from edgespec.types import TokenIds

_EPS = 1e-6  # of the norms of MLP and LSTM speculators, whose settings do not state it
_NO_CACHE = KVCache(num_layers=0, num_kv_heads=1, head_dim=1)
# Names before those of the tensors: of the module that held the head where it was saved.
_PREFIXES = ("medusa_head.", "medusa_heads.", "hydra_head.", "speculator.")


class StepWriter(PartWriter):
    """Writes the parts of the graph of a step."""

    def input_state(self, name: str, shape: Sequence[str | int]) -> tuple[ir.Value, ir.Value]:
        """An input of float32, and its value in the type of activations."""
        given = ir.val(name, ir.DataType.FLOAT, shape)
        return given, self.as_activation(given)

    def norm(self, role: str, x: ir.Value) -> ir.Value:
        """RMSNorm of x with the gain of a role, plus its bias if there is one."""
        normed = self.normalize(x, self.vector(role))
        return self.op("Add", normed, self.vector(f"{role}_bias")) if f"{role}_bias" in self.tensors else normed

    def normalize(self, x: ir.Value, gain: ir.Value) -> ir.Value:
        return self.op("SimplifiedLayerNormalization", x, gain, axis=-1, epsilon=_EPS, stash_type=1)

    def scale(self, x: ir.Value, scale: float) -> ir.Value:
        return self.op("Mul", x, self.constant(f"scale_{scale:.9g}", np.array(scale, self.floats)))

    def gelu(self, x: ir.Value) -> ir.Value:
        return self.op("Gelu", x, approximate="none")

    def split(self, x: ir.Value, sizes: Sequence[int]) -> list[ir.Value]:
        name = f"split_{len(self.nodes.nodes)}"
        return self.nodes.split(x, [f"{name}.{i}" for i in range(len(sizes))], *sizes)


Body = Callable[[StepWriter, ir.Value, ir.Value], tuple[ir.Value, ir.Value]]
"""From input_ids, [1, 1], and hidden, [1, 1, width], to what the vocabulary head reads and the next state."""


class Step(NamedTuple):
    """One of the graphs; head is the role of its vocabulary head among the tensors."""

    width: int
    next_width: int
    head: str
    body: Body

    def write_graph(self, writer: StepWriter) -> ir.Model:
        input_ids = ir.val("input_ids", ir.DataType.INT64, [1, 1])
        given, hidden = writer.input_state("hidden", [1, 1, self.width])
        features, state = self.body(writer, input_ids, hidden)
        rows = writer.tensors[self.head].rows
        logits = writer.output("logits", writer.head(self.head, features), [1, 1, rows])
        outputs = [logits, writer.output("state", state, [1, 1, self.next_width])]
        return writer.nodes.model("step", [input_ids, given], outputs)


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
    method: str,
    target: LoadedSource,
    steps: Sequence[Step],
    tensors: Tensors,
    *,
    num_steps: int | None = None,
    tokens: TokenIds | None,
    borrowed: tuple[str, ...] = (),
    layer: int | None = None,
) -> HeadPlan:
    """The plan of a head.

    Args:
        num_steps: The steps of a draft, where the last graph serves several.
        layer: The layer of the target after which it reads; None for the state after the final norm.
    """
    files = [f"model_step_{i}.onnx" for i in range(len(steps))]

    def write(manifest: Manifest, roles: Tensors, weights: WeightsFile, rule: Rule) -> Graphs:
        made = zip(files, steps, strict=True)
        return {file: step.write_graph(StepWriter(roles, weights, rule)) for file, step in made}

    return HeadPlan(
        head=Head(
            method=method,
            kind="steps",
            target_layers=(target.config.num_layers if layer is None else layer,),
            target_hidden_size=target.config.hidden_size,
            state_size=steps[0].width,
            step_graphs=(*files, *files[-1:] * ((num_steps or len(files)) - len(files))),
        ),
        kv_cache=_NO_CACHE,
        tensors=tensors,
        write_graphs=write,
        borrowed=borrowed,
        tokens=tokens,
        vocabulary_heads=tuple(role for role in tensors if role.endswith(("head", "head_bias"))),
        graph=files[0],
    )


def recognizer(*patterns: str) -> Callable[[HeadSource], bool]:
    """A function that tells if a head has a tensor for each of some patterns of names."""

    def recognizes(source: HeadSource) -> bool:
        names = without_prefixes(source).tensors
        return all(any(re.fullmatch(pattern, name) for name in names) for pattern in patterns)

    return recognizes
