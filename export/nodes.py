"""A growing list of graph nodes with their constants; names are given in order of making."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

# Operators of ONNX Runtime itself; the rest belong to the ONNX standard.
_CONTRIB = {
    "FusedMatMul",
    "GatherBlockQuantized",
    "GroupQueryAttention",
    "MatMulNBits",
    "QuickGelu",
    "SkipSimplifiedLayerNormalization",
}


class Nodes:
    """What a node is given and carries a value of its own becomes an initializer of the graph."""

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []
        self._initializers: dict[ir.Value, None] = {}
        self._constants: dict[str, ir.Value] = {}

    @property
    def initializers(self) -> list[ir.Value]:
        return list(self._initializers)

    def constant(self, name: str, array: npt.NDArray[np.generic]) -> ir.Value:
        """A small constant kept in the graph file; the same name gives the same constant."""
        if name not in self._constants:
            tensor = ir.tensor(array, name=name)
            type_ = ir.TensorType(tensor.dtype)
            shape = ir.Shape(array.shape)
            self._constants[name] = ir.Value(name=name, shape=shape, type=type_, const_value=tensor)
        return self._constants[name]

    def op(self, kind: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        return self.node(kind, inputs, [ir.Value(name=f"{kind}_{len(self.nodes)}.out")], **attributes)[0]

    def node(
        self, kind: str, inputs: Sequence[ir.Value | None], outputs: Sequence[ir.Value], **attributes: Any
    ) -> list[ir.Value]:
        self._initializers |= {
            value: None for value in inputs if value is not None and value.const_value is not None
        }
        domain = "com.microsoft" if kind in _CONTRIB else ""
        name = f"{kind}_{len(self.nodes)}"
        node = ir.node(kind, inputs, attributes=attributes, domain=domain, outputs=outputs, name=name)
        self.nodes.append(node)
        return list(node.outputs)
