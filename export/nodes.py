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
    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []
        self._initializers: dict[str, ir.Value] = {}

    @property
    def initializers(self) -> list[ir.Value]:
        return list(self._initializers.values())

    def add(self, initializer: ir.Value) -> ir.Value:
        assert initializer.name is not None
        assert initializer.name not in self._initializers, initializer.name
        self._initializers[initializer.name] = initializer
        return initializer

    def constant(self, name: str, array: npt.NDArray[np.int64]) -> ir.Value:
        """A small integer constant kept in the graph file; the same name gives the same constant."""
        if name not in self._initializers:
            tensor = ir.tensor(array.astype(np.int64), name=name)
            self.add(
                ir.Value(
                    name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
                )
            )
        return self._initializers[name]

    def op(self, kind: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        return self.node(kind, inputs, [ir.Value(name=f"{kind}_{len(self.nodes)}.out")], **attributes)[0]

    def node(
        self, kind: str, inputs: Sequence[ir.Value | None], outputs: Sequence[ir.Value], **attributes: Any
    ) -> list[ir.Value]:
        domain = "com.microsoft" if kind in _CONTRIB else ""
        node = ir.node(
            kind,
            inputs,
            attributes=attributes,
            domain=domain,
            outputs=outputs,
            name=f"{kind}_{len(self.nodes)}",
        )
        self.nodes.append(node)
        return list(node.outputs)
