"""A growing list of graph nodes with their constants, named in order of creation."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

# Operators of ONNX Runtime itself; the rest belong to the ONNX standard.
_CONTRIB = {
    "FusedMatMul", "GatherBlockQuantized", "GroupQueryAttention", "LinearAttention", "MatMulNBits",
    "MoE", "QMoE", "QuickGelu", "RotaryEmbedding", "SkipSimplifiedLayerNormalization",
}  # fmt: skip


Values = Sequence[ir.Value]
Graphs = dict[str, ir.Model]  # by file name
_OPSET = 21  # the first that quantises to 16 bits
_IR_VERSION = 10


def make_output(value: ir.Value, name: str, dtype: ir.DataType, shape: Sequence[str | int]) -> ir.Value:
    """The value itself, with what an output of a graph must state."""
    value.name, value.type, value.shape = name, ir.TensorType(dtype), ir.Shape(shape)
    return value


class Nodes:
    """Nodes of a graph; inputs with a constant value become its initializers."""

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []
        self._initializers: dict[ir.Value, None] = {}
        self._constants: dict[str, ir.Value] = {}

    @property
    def initializers(self) -> list[ir.Value]:
        return list(self._initializers)

    def model(self, name: str, inputs: Values, outputs: Values, **stated: str) -> ir.Model:
        """The finished graph; stated is metadata."""
        domains = {"com.microsoft": 1} if any(node.domain for node in self.nodes) else {}
        graph = ir.Graph(
            inputs,
            outputs,
            nodes=self.nodes,
            initializers=self.initializers,
            opset_imports={"": _OPSET, **domains},
            name=name,
        )
        return ir.Model(graph, ir_version=_IR_VERSION, producer_name="edgespec", metadata_props=stated)

    def constant(self, name: str, array: npt.NDArray[np.generic]) -> ir.Value:
        """A small constant kept in the graph file; there is one for each name."""
        if name not in self._constants:
            self._constants[name] = ir.val(name, const_value=ir.tensor(array, name=name))
        return self._constants[name]

    def ints(self, *numbers: int) -> ir.Value:
        """A constant of whole numbers, [len(numbers)]."""
        return self.constant(f"ints_{'_'.join(map(str, numbers))}", np.array(numbers, np.int64))

    def op(self, kind: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        return self.node(kind, inputs, [ir.Value(name=f"{kind}_{len(self.nodes)}.out")], **attributes)[0]

    def node(
        self, kind: str, inputs: Sequence[ir.Value | None], outputs: Values, **attributes: Any
    ) -> list[ir.Value]:
        constants = [value for value in inputs if value is not None and value.const_value is not None]
        self._initializers |= dict.fromkeys(constants)
        domain = "com.microsoft" if kind in _CONTRIB else ""
        name = f"{kind}_{len(self.nodes)}"
        node = ir.node(kind, inputs, attributes=attributes, domain=domain, outputs=outputs, name=name)
        self.nodes.append(node)
        return list(node.outputs)

    def split(self, x: ir.Value, names: Sequence[str], *sizes: int) -> list[ir.Value]:
        """Parts of x along its last axis, of some sizes, or all of one size."""
        outputs = [ir.Value(name=name) for name in names]
        if sizes:
            return self.node("Split", [x, self.ints(*sizes)], outputs, axis=-1)
        return self.node("Split", [x], outputs, axis=-1, num_outputs=len(names))
